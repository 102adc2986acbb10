"""What the scheduler tells the runner about one step, and what the runner gives back. Plain Python, no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.forest import SharedNode
from engine.protocol import TokenLogprobs
from engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """One row of a step. A named tuple, as hundreds of them are made in each step."""

    sequence: Sequence
    num_new_tokens: int
    """Computed this step: `token_ids[num_computed_tokens : num_computed_tokens + num_new_tokens]`, at least 1.
    `num_computed_tokens` moves on only after the step."""
    samples: bool
    """The last of them is the sequence's last token: draw the next one."""


class BlockCopy(NamedTuple):
    """All layers' K and V of block `source` go to block `target`, before anything of the step is written."""

    source: int
    target: int


class SwapOut(NamedTuple):
    """All layers' K and V of block `source` go to slot `target` of the host tier."""

    source: int
    target: int


class SwapIn(NamedTuple):
    """All layers' K and V in slot `source` of the host tier go to block `target`."""

    source: int
    target: int


class Transfers(NamedTuple):
    """What is moved before anything of the step is written: swapped out, then swapped in, then copied.

    No block or slot is the target of two of them, no slot is read and written; what is swapped out may be written then.
    """

    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    copies: tuple[BlockCopy, ...] = ()


NO_TRANSFERS = Transfers()


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    sequences: tuple[ScheduledSequence, ...]
    """The `num_decodes` decode rows (one new token, which is the last one) first, then the extends."""
    num_decodes: int = 0
    transfers: Transfers = NO_TRANSFERS
    nodes: tuple[SharedNode, ...] = ()
    """Shared leading blocks of the decode rows; `SharedNode.rows` index into the decode rows."""
    num_blocks_not_read: int = 0
    """What the nodes save."""
    may_come_again: bool = False
    """Nothing but these decode rows is there to be computed: unless something happens, the next step has the same."""

    @property
    def decodes(self) -> tuple[ScheduledSequence, ...]:
        return self.sequences[: self.num_decodes]

    @property
    def extends(self) -> tuple[ScheduledSequence, ...]:
        return self.sequences[self.num_decodes :]

    @property
    def num_tokens(self) -> int:
        return sum(scheduled.num_new_tokens for scheduled in self.sequences)


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None
    """If `params.logprobs` asks for it."""
    fault: str | None = None
    """Why no token could be drawn: this sequence ends with an error, its neighbours go on. `token_id` means nothing."""


@dataclass(frozen=True, slots=True)
class StepResult:
    tokens: list[SampledToken]
    """One for each scheduled sequence with `samples`, in the order of the batch."""
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """By request id, for sequences with `params.prompt_logprobs`: one entry for each position computed this step
    whose next token is a prompt token, in order; the entry is of that next token."""
