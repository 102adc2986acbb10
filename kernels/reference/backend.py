"""Plain torch on any device: the oracle of every test, and the backend where no faster one is.

Attention is written down as its formula, in fp32, over each sequence's whole context; nodes are taken apart into their
rows' own tables, so that a faster backend's grouping can be compared with it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import AttentionBatch, Extend, KVShape
from kernels.fixed_step import StepLimits
from kernels.kv_format import KVFormat, find_format
from kernels.reference import functions


@dataclass(frozen=True, slots=True)
class ReferenceLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Extend:
    extend: Extend
    first_row: int
    """Counted from the first extend's first row."""
    gather: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    kv_rows: torch.Tensor
    decode_gather: torch.Tensor | None
    unused: torch.Tensor | None
    """bool [num_decodes, 1, 1, tokens]: slots behind each row's context, and before its window."""
    extends: tuple[_Extend, ...]
    quantised: KVFormat | None


class ReferenceKernels:
    name = "reference"

    def __init__(self, device: torch.device, rule: AttentionRule = FULL) -> None:
        self._device = device
        self._rule = rule

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ReferenceLinear:
        # a copy: the prepared file's map should not stay open for it
        own_bias = None if bias is None else bias.to(self._device, copy=True)
        return ReferenceLinear(weight.to(self._device, copy=True), own_bias)

    def linear(self, x: torch.Tensor, packed: ReferenceLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, packed.weight, packed.bias)
        return y if residual is None else y + residual

    def linear_and_norm(
        self, x: torch.Tensor, packed: ReferenceLinear, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = self.linear(x, packed, residual)
        return summed, self.rms_norm(summed, weight, eps)

    def swiglu(self, x: torch.Tensor, gate: ReferenceLinear, up: ReferenceLinear) -> torch.Tensor:
        return F.silu(self.linear(x, gate)) * self.linear(x, up)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functions.rms_norm(x, weight, eps)

    def rope_and_write_kv(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor, plan: ReferencePlan
    ) -> torch.Tensor:
        return functions.rope_and_write_kv(heads, cosines, sines, kv, plan.kv_rows, plan.quantised)

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> ReferencePlan:
        device = self._device
        gather = unused = None
        if batch.tails:
            heads: dict[int, list[int]] = {}
            for node in batch.nodes:
                for row in node.rows:
                    heads.setdefault(row, []).extend(node.block_ids)
            tables = [heads.get(row, []) + list(tail.block_ids) for row, tail in enumerate(batch.tails)]
            lengths = [
                len(heads.get(row, [])) * shape.block_size + tail.num_tokens for row, tail in enumerate(batch.tails)
            ]
            padded = functions.padded(tables, device)
            gather = functions.block_rows(padded, shape)
            positions = torch.arange(padded.shape[1] * shape.block_size, device=device)
            firsts = [self._rule.first_seen(length - 1) for length in lengths]
            is_behind = positions >= torch.tensor(lengths, device=device)[:, None]
            unused = (is_behind | (positions < torch.tensor(firsts, device=device)[:, None]))[:, None, None, :]
        extends = []
        first_row = 0
        for extend in batch.extends:
            num_blocks = -(-extend.num_tokens // shape.block_size)
            table = torch.tensor([list(extend.block_ids[:num_blocks])], dtype=torch.int64, device=device)
            extends.append(_Extend(extend, first_row, functions.block_rows(table, shape)))
            first_row += extend.num_rows
        kv_rows, quantised = functions.kv_rows(batch.slots, shape, device), find_format(shape.quantisation)
        return ReferencePlan(kv_rows, gather, unused, tuple(extends), quantised)

    def fixed_step(self, limits: StepLimits, shape: KVShape, dtype: torch.dtype, vocab_size: int) -> None:
        return None

    def merge(self, values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functions.merge(values, lse)

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: ReferencePlan, out: torch.Tensor) -> None:
        assert plan.decode_gather is not None
        assert plan.unused is not None
        num, num_heads, head_dim = q.shape
        num_kv_heads = kv.shape[2]
        keys, values = _gather(kv, plan.decode_gather, num, head_dim, plan.quantised)
        grouped = q.view(num, num_kv_heads, num_heads // num_kv_heads, head_dim).float()
        scores = functions.scores(grouped, keys, self._rule.soft_cap)
        weights = scores.masked_fill(plan.unused, float("-inf")).softmax(-1)
        # a weight of zero does not silence a NaN
        values = values.masked_fill(plan.unused.transpose(-1, -2), 0.0)
        out.copy_((weights @ values).view(num, num_heads, head_dim))

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: ReferencePlan, out: torch.Tensor) -> None:
        num_kv_heads, head_dim = kv.shape[2], q.shape[-1]
        for part in plan.extends:
            extend = part.extend
            rows = slice(part.first_row, part.first_row + extend.num_rows)
            keys, values = _gather(kv, part.gather, 1, head_dim, plan.quantised)
            first = self._rule.first_seen(extend.num_context_tokens)
            keys, values = keys[0, :, None, first : extend.num_tokens], values[0, :, None, first : extend.num_tokens]
            grouped = q[rows].view(extend.num_rows, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3).float()
            scores = functions.scores(grouped, keys, self._rule.soft_cap)
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            seen = seen.tril(extend.num_context_tokens - first)
            if self._rule.window:
                seen = seen.triu(extend.num_context_tokens - first + 1 - self._rule.window)
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            out[rows] = (weights @ values).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)


def _gather(
    kv: torch.Tensor, rows: torch.Tensor, num: int, head_dim: int, quantised: KVFormat | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of `num` tables, fp32 [num, num_kv_heads, tokens, head_dim] each."""
    blocks = kv.flatten(0, 2).flatten(1).index_select(0, rows)
    wide = blocks.float() if quantised is None else quantised.read(blocks, head_dim)
    keys, values = wide.view(2, num, kv.shape[2], -1, head_dim).unbind(0)
    return keys, values
