"""Decode steps in memory that stays where it is, so that what they launch can be captured once and replayed."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from kernels.batch import AttentionBatch, DrawBatch, Int32Array


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that a step may have. One that has more is computed as any other step is."""

    num_rows: int
    row_tokens: tuple[int, ...]
    """Tokens of a row's own, all rows' on average, ascending: launches are made for the first that is enough."""
    max_tokens: int
    """Of one row; where `row_tokens` end there is room for one such row more."""


class StepForm(NamedTuple):
    """What the launches of a step depend on."""

    num_items: int
    """Programs that read tails, and as many that read nodes, for one KV head."""
    has_nodes: bool


class FixedStep(Protocol):
    """Everything that decode steps of up to `limits.num_rows` rows read, each array at one address for good.

    Launches are made for all rows; those that no sequence has write no K and V, and what they draw says nothing.
    """

    @property
    def token_ids(self) -> torch.Tensor:
        """int32 [num_rows], on the device."""

    @property
    def positions(self) -> torch.Tensor:
        """int32 [num_rows], on the device."""

    @property
    def forms(self) -> list[StepForm]:
        """Those that `try_write` may return, the smallest first."""

    def plan(self, form: StepForm) -> Any:
        """For the backend's operations, over as many programs as `form` says: those without an item end at once."""

    def try_write(
        self, token_ids: Int32Array, positions: Int32Array, attention: AttentionBatch, draw: DrawBatch
    ) -> StepForm | None:
        """Brings a step of decode rows to the device in one copy that nobody waits for, and says in which form it can
        be launched; None, and nothing is done, if it is larger than the limits.

        A slot of -1: the row writes nothing.
        """

    def draw(self, logits: torch.Tensor, drawn: torch.Tensor) -> None:
        """logits fp32 [num_rows, vocab_size], drawn int64 [2, num_rows] as `kernels.interface.TokenDraw` has it."""
