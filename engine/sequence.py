"""The engine's token state of one request. No torch."""

import enum
from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field

from engine.protocol import END, FinishReason, Scope, TokenLogprobs
from engine.sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def find_trunk_end(scopes: Sequences[Scope]) -> int:
    """End of the first scope, if another follows: up to there a prompt is shared with other readers."""
    return scopes[0].end_token if len(scopes) > 1 and scopes[0].key != scopes[-1].key else 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """Tokens of one request and how far their KV is computed.

    There is no prefill phase and no decode phase: `num_computed_tokens` chases `num_tokens`, and when it has caught
    up the runner draws one more. `block_table[i]` holds tokens `[i * block_size, (i + 1) * block_size)`; it only grows
    at its end, until the blocks are freed.
    """

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    scopes: tuple[Scope, ...]
    seed: int
    """The client's, or one drawn by the server: noise is Philox(seed, choice, position)."""
    max_output_tokens: int
    """`params.max_tokens`, clamped to what context and pool leave."""
    choice: int = 0
    tenant: str = ""
    priority: int = 0
    arrival: int = 0
    """Counts up with each request that the engine accepted."""
    is_trunk: bool = False
    """Only its KV is wanted: it draws no token and ends when all are computed."""
    arrived_s: float = 0.0
    """When, by the core's clock."""
    resumed_ids: Sequences[int] = ()
    """The output that an earlier life of the engine has given already."""

    token_ids: list[int] = field(init=False)
    """Prompt and output; append-only."""
    num_prompt_tokens: int = field(init=False)
    num_trunk_tokens: int = field(init=False)
    """Up to where its blocks are nobody's own. A trunk has nothing of its own."""
    stop_ids: frozenset[int] = field(init=False)
    """Every id that ends this sequence."""
    status: SequenceStatus = field(default=SequenceStatus.WAITING, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    # set by the KV cache manager
    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose KV is written: `[0, num_computed_tokens)`."""
    num_published_blocks: int = field(default=0, init=False)
    """Leading blocks that the prefix cache has been offered."""
    block_table: list[int] = field(default_factory=list, init=False)
    block_hashes: list[bytes] = field(default_factory=list, init=False)
    """Of the leading full blocks of `token_ids`, as far as they have been needed; append-only."""
    unpublished_tails: list[tuple[int, bytes]] = field(default_factory=list, init=False)
    """While it runs: ends in mid-block up to which the prefix cache is going to know its tokens, ascending, each with
    the hash of that part of its block."""

    num_cached_host_tokens: int = field(default=0, init=False)
    """Of those that came from the prefix cache when it was first admitted: what came back from the host tier."""

    # set by the scheduler
    num_cached_tokens: int | None = field(default=None, init=False)
    """Prompt tokens that came from the prefix cache when it was first admitted; None before."""
    queue_ms: float = field(default=0.0, init=False)
    """Until it was first admitted."""
    num_served_tokens: int = field(default=0, init=False)
    """Tokens that were computed before it was last preempted, or taken from the prefix cache since."""
    num_preemptions: int = field(default=0, init=False)
    num_bypasses: int = field(default=0, init=False)
    """Requests admitted past this one while it waited for blocks."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    """Entry i is of prompt token i + 1; complete with the first output, if asked for."""

    def __post_init__(self) -> None:
        self.token_ids = [*self.prompt_ids, *self.resumed_ids]
        self.num_prompt_tokens = len(self.prompt_ids)
        self.num_trunk_tokens = END if self.is_trunk else find_trunk_end(self.scopes)
        params = self.params
        self.stop_ids = frozenset(params.stop_token_ids + (() if params.ignore_eos else params.eos_token_ids))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_cached_trunk_tokens(self) -> int | None:
        """Of `num_cached_tokens` those that are shared with other readers."""
        return min(self.num_cached_tokens, self.num_trunk_tokens) if self.num_cached_tokens is not None else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Asked for and not given yet: they come with the first output, and once."""
        return self.params.prompt_logprobs is not None and self.num_output_tokens == 0

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
