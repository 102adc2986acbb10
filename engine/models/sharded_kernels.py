"""Kernels of one rank of a tensor-parallel group: where a product is a sum over all ranks, the sum is made."""

from collections.abc import Callable
from typing import Any

import torch

from kernels.batch import AttentionBatch, KVShape
from kernels.fixed_step import StepLimits
from kernels.interface import Kernels


class ShardedKernels:
    """Stands before the kernels of any backend, which see one rank's heads and features.

    A linear with a residual is one whose inputs are split, o and down: there are no others in this decoder. The
    residual is the same on all ranks, so the first one alone adds it; a bias of such a linear it alone has.
    """

    def __init__(self, kernels: Kernels, *, is_first: bool, all_reduce: Callable[[torch.Tensor], None]) -> None:
        self._kernels = kernels
        self._is_first = is_first
        self._all_reduce = all_reduce
        self.name = kernels.name
        self.pack_linear = kernels.pack_linear

    def linear(self, x: torch.Tensor, packed: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        if residual is None:
            return self._kernels.linear(x, packed)
        y = self._kernels.linear(x, packed, residual if self._is_first else None)
        self._all_reduce(y)
        return y

    def linear_and_norm(
        self, x: torch.Tensor, packed: Any, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x, packed, residual)
        return y, self._kernels.rms_norm(y, weight, eps)

    def swiglu(self, x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
        return self._kernels.swiglu(x, gate, up)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._kernels.rms_norm(x, weight, eps)

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> Any:
        return self._kernels.plan(batch, shape, dtype)

    def fixed_step(self, limits: StepLimits, shape: KVShape, dtype: torch.dtype, vocab_size: int) -> None:
        """The ranks behind the first are told each step anew."""
        return None

    def rope_and_write_kv(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        return self._kernels.rope_and_write_kv(heads, cosines, sines, kv, plan)

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        self._kernels.decode_attention(q, kv, plan, out)

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        self._kernels.extend_attention(q, kv, plan, out)

    def merge(self, values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._kernels.merge(values, lse)
