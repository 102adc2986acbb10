"""Kernels whose arguments and results are asserted to be what `kernels.interface` says.

For tests and `--check-kv`: some hundred assertions a step cost about a millisecond.
"""

from dataclasses import dataclass
from typing import Any

import torch

from kernels.batch import AttentionBatch, DrawBatch, Extend, Int32Array, KVShape, Node, Tail
from kernels.fixed_step import FixedStep, StepForm, StepLimits
from kernels.interface import Kernels
from kernels.kv_format import cache_dtype, layer_sizes


@dataclass(frozen=True, slots=True)
class CheckedLinear:
    num_inputs: int
    num_outputs: int
    packed: Any


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    batch: AttentionBatch
    shape: KVShape
    dtype: torch.dtype
    plan: Any

    def check_kv(self, kv: torch.Tensor) -> None:
        _check(kv, layer_sizes(self.shape), cache_dtype(self.shape, self.dtype))
        assert kv.is_contiguous()

    def check_heads(self, q: torch.Tensor, out: torch.Tensor, num_rows: int) -> None:
        num_heads = q.shape[1]
        assert num_heads % self.shape.num_kv_heads == 0
        for x in (q, out):
            _check(x, (num_rows, num_heads, self.shape.head_dim), self.dtype)
            assert x[0].is_contiguous()
        assert out.is_contiguous()


class CheckedKernels:
    """Stands before the kernels of any backend."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.name = kernels.name

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CheckedLinear:
        num_outputs, num_inputs = weight.shape
        if bias is not None:
            _check(bias, (num_outputs,), weight.dtype)
        return CheckedLinear(num_inputs, num_outputs, self.kernels.pack_linear(weight, bias))

    def linear(self, x: torch.Tensor, packed: CheckedLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        sizes = (x.shape[0], packed.num_outputs)
        _check(x, (x.shape[0], packed.num_inputs), x.dtype)
        if residual is not None:
            _check(residual, sizes, x.dtype)
        return _checked(self.kernels.linear(x, packed.packed, residual), sizes, x.dtype)

    def linear_and_norm(
        self, x: torch.Tensor, packed: CheckedLinear, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = (x.shape[0], packed.num_outputs)
        _check(x, (x.shape[0], packed.num_inputs), x.dtype)
        _check(residual, sizes, x.dtype)
        _check(weight, sizes[1:], x.dtype)
        summed, normed = self.kernels.linear_and_norm(x, packed.packed, residual, weight, eps)
        return _checked(summed, sizes, x.dtype), _checked(normed, sizes, x.dtype)

    def swiglu(self, x: torch.Tensor, gate: CheckedLinear, up: CheckedLinear) -> torch.Tensor:
        _check(x, (x.shape[0], gate.num_inputs), x.dtype)
        assert (up.num_inputs, up.num_outputs) == (gate.num_inputs, gate.num_outputs)
        return _checked(self.kernels.swiglu(x, gate.packed, up.packed), (x.shape[0], gate.num_outputs), x.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        _check(weight, x.shape[-1:], x.dtype)
        assert x.dim() in (2, 3)
        assert x.shape[0] == 0 or x[0].is_contiguous()
        return _checked(self.kernels.rms_norm(x, weight, eps), x.shape, x.dtype)

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> CheckedPlan:
        check_batch(batch, shape)
        return CheckedPlan(batch, shape, dtype, self.kernels.plan(batch, shape, dtype))

    def fixed_step(
        self, limits: StepLimits, shape: KVShape, dtype: torch.dtype, vocab_size: int
    ) -> "CheckedFixedStep | None":
        step = self.kernels.fixed_step(limits, shape, dtype, vocab_size)
        return None if step is None else CheckedFixedStep(step, limits, shape, dtype)

    def rope_and_write_kv(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor, plan: CheckedPlan
    ) -> torch.Tensor:
        plan.check_kv(kv)
        num_rows, num_heads, head_dim = len(plan.batch.slots), heads.shape[1], plan.shape.head_dim
        _check(heads, (num_rows, num_heads, head_dim), plan.dtype)
        assert heads.is_contiguous()
        for table in (cosines, sines):
            _check(table, (num_rows, 1, head_dim), torch.float32)
        q = self.kernels.rope_and_write_kv(heads, cosines, sines, kv, plan.plan)
        return _checked(q, (num_rows, num_heads - 2 * plan.shape.num_kv_heads, head_dim), plan.dtype)

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: CheckedPlan, out: torch.Tensor) -> None:
        plan.check_kv(kv)
        plan.check_heads(q, out, plan.batch.num_decodes)
        self.kernels.decode_attention(q, kv, plan.plan, out)

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: CheckedPlan, out: torch.Tensor) -> None:
        plan.check_kv(kv)
        plan.check_heads(q, out, len(plan.batch.slots) - plan.batch.num_decodes)
        self.kernels.extend_attention(q, kv, plan.plan, out)

    def merge(self, values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_heads, num_parts, head_dim = values.shape
        _check(values, values.shape, torch.float32)
        _check(lse, (num_rows, num_heads, num_parts), torch.float32)
        assert lse.is_contiguous()
        merged, merged_lse = self.kernels.merge(values, lse)
        _check(merged_lse, (num_rows, num_heads), torch.float32)
        return _checked(merged, (num_rows, num_heads, head_dim), torch.float32), merged_lse


class CheckedFixedStep:
    """Steps that are written are checked, and what is launched over its plans."""

    def __init__(self, step: FixedStep, limits: StepLimits, shape: KVShape, dtype: torch.dtype) -> None:
        self._step = step
        self._shape = shape
        self._dtype = dtype
        num_rows = limits.num_rows
        self._rows = AttentionBatch([-1] * num_rows, [Tail([0], 1)] * num_rows)
        self.token_ids = step.token_ids
        self.positions = step.positions
        self.forms = step.forms
        self.draw = step.draw

    def plan(self, form: StepForm) -> CheckedPlan:
        return CheckedPlan(self._rows, self._shape, self._dtype, self._step.plan(form))

    def try_write(
        self, token_ids: Int32Array, positions: Int32Array, attention: AttentionBatch, draw: DrawBatch
    ) -> StepForm | None:
        check_batch(attention, self._shape, may_write_nothing=True)
        return self._step.try_write(token_ids, positions, attention, draw)


def check_batch(batch: AttentionBatch, shape: KVShape, *, may_write_nothing: bool = False) -> None:
    """That it reads and writes within the cache, and no slot twice. may_write_nothing: a slot may be -1."""
    size = shape.block_size
    slots = [slot for slot in batch.slots if not (may_write_nothing and slot == -1)]
    assert len(set(slots)) == len(slots)
    assert all(0 <= slot < shape.num_blocks * size for slot in slots)
    assert len(batch.slots) == batch.num_decodes + sum(extend.num_rows for extend in batch.extends)
    for node in batch.nodes:
        assert node.block_ids
        assert len(set(node.rows)) == len(node.rows) > 0
        assert all(0 <= row < batch.num_decodes for row in node.rows)
    runs: list[Tail | Extend] = [*batch.tails, *batch.extends]
    for run in runs:
        assert 0 < run.num_tokens <= len(run.block_ids) * size
    tables: list[Node | Tail | Extend] = [*batch.nodes, *runs]
    assert all(0 <= block_id < shape.num_blocks for table in tables for block_id in table.block_ids)


def _checked(x: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    _check(x, sizes, dtype)
    return x


def _check(x: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    assert x.shape == sizes, f"expected {tuple(sizes)}, got {tuple(x.shape)}"
    assert x.dtype == dtype, f"expected {dtype}, got {x.dtype}"
