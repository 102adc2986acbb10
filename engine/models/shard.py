"""Which part of a model one rank of a tensor-parallel group has, and how the parts' sums come together.

Heads are split: rank r has the r-th of `size` equal runs of KV heads, with the query heads that read them, and the same
run of the feed-forward's inner features. So q, k, v, gate and up are cut by their outputs, o and down by their inputs,
and what o and down give is the sum over all ranks. Norms and embedding are whole everywhere. The head is the first
rank's alone, which alone draws tokens: logits then take no exchange, and no other rank need know which rows are drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.errors import ModelNotSupported

if TYPE_CHECKING:
    # for the types alone: the models run where msgspec is not installed
    from engine.config import ModelConfig

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    rank: int = 0
    size: int = 1
    all_reduce: Callable[[torch.Tensor], None] | None = None
    """Puts the sum over all ranks in place of each rank's own; None for a whole model."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def has(self, name: str) -> bool:
        """Whether this rank has any of the tensor: a bias behind a sum is added once, the head is used once."""
        return self.is_first or not (name == "lm_head.weight" or (name.endswith(".bias") and _is_any(name, _BY_INPUTS)))

    def num_bytes(self, name: str, num_bytes: int) -> int:
        """Of this rank's part of a tensor that has `num_bytes`."""
        if not self.has(name):
            return 0
        return num_bytes if self._split_dim(name) is None else num_bytes // self.size

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A view of this rank's part of a whole tensor that it has."""
        assert self.has(name), f"rank {self.rank} has no {name}"
        dim = self._split_dim(name)
        if dim is None:
            return tensor
        length, rest = divmod(tensor.shape[dim], self.size)
        assert rest == 0, f"{name} of {tuple(tensor.shape)} is not split by {self.size}"
        return tensor.narrow(dim, self.rank * length, length)

    def _split_dim(self, name: str) -> int | None:
        if self.size == 1:
            return None
        if _is_any(name, _BY_OUTPUTS):
            return 0
        return 1 if _is_any(name, _BY_INPUTS) and name.endswith(".weight") else None


WHOLE = Shard()


def split_config(config: "ModelConfig", size: int) -> "ModelConfig":
    """The shape of one rank's part. Raises ModelNotSupported, in one sentence, for what cannot be split."""
    for number, what in ((config.num_kv_heads, "KV heads"), (config.intermediate_size, "feed-forward features")):
        if number % size:
            raise ModelNotSupported(
                f"tensor parallel {size} cannot split this model: it has {number} {what}, "
                f"which is no multiple of {size}"
            )
    return config.replace(
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )


def _is_any(name: str, projections: tuple[str, ...]) -> bool:
    return name.split(".")[-2] in projections
