"""The backend for GPUs: torch's matrix products, and Triton kernels for everything between them.

Under TRITON_INTERPRET=1 the same kernels are interpreted on a CPU, slowly, to check them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import AttentionBatch, KVShape
from kernels.fixed_step import StepLimits
from kernels.triton.decode import attend_nodes, attend_tails, merge_parts
from kernels.triton.extend import attend_extends
from kernels.triton.fixed_step import TritonFixedStep
from kernels.triton.plan import MIN_ROWS, NodePlan, TailPlan, TritonPlan, make_plan
from kernels.triton.pointwise import rms_norm_rows, silu_and_multiply
from kernels.triton.rope import rotate_and_write
from kernels.triton.tiles import Tiles, tiles_for


@dataclass(frozen=True, slots=True)
class TritonLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of all rows, in one list: `kernels.triton.decode`."""

    values: torch.Tensor
    lse: torch.Tensor


class TritonKernels:
    """For models of `num_heads` query heads, whose attention goes by `rule`."""

    name = "triton"

    def __init__(
        self, device: torch.device, num_heads: int, tiles: Tiles | None = None, rule: AttentionRule = FULL
    ) -> None:
        self._device = device
        self._num_heads = num_heads
        self._tiles = tiles or tiles_for(device)
        self._rule = rule
        self._scratch = torch.empty(0, dtype=torch.float32, device=device)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> TritonLinear:
        own_bias = None if bias is None else bias.to(self._device, copy=True)
        return TritonLinear(weight.to(self._device, copy=True), own_bias)

    def linear(self, x: torch.Tensor, packed: TritonLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        y = F.linear(x, packed.weight, packed.bias)
        return y if residual is None else y.add_(residual)

    def swiglu(self, x: torch.Tensor, gate: TritonLinear, up: TritonLinear) -> torch.Tensor:
        activated, multiplied = self.linear(x, gate), self.linear(x, up)
        tile = self._tiles.pointwise_values
        silu_and_multiply[(triton.cdiv(activated.numel(), tile),)](
            activated, multiplied, activated, activated.numel(), TILE=tile, **self._tiles.pointwise.options
        )
        return activated

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(x, None, weight, out, None, eps)
        return out

    def linear_and_norm(
        self, x: torch.Tensor, packed: TritonLinear, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        delta = self.linear(x, packed)
        normed = torch.empty_like(residual)
        self._norm(residual, delta, weight, normed, delta, eps)
        return delta, normed

    def _norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        out: torch.Tensor,
        summed: torch.Tensor | None,
        eps: float,
    ) -> None:
        size = x.shape[-1]
        # of three dimensions the first may have gaps, as heads of a projection have
        inner = x.shape[1] if x.dim() == 3 else 1
        assert x[0].is_contiguous()
        width = triton.next_power_of_2(size)
        num_rows = x.numel() // size
        rows = max(1, self._tiles.pointwise_values // width)
        rms_norm_rows[(triton.cdiv(num_rows, rows),)](
            x,
            delta,
            weight,
            out,
            summed,
            num_rows,
            eps,
            x.stride(0),
            INNER=inner,
            SIZE=size,
            WIDTH=width,
            ROWS=rows,
            ADDS=delta is not None,
            **self._tiles.pointwise.options,
        )

    def rope_and_write_kv(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor, plan: TritonPlan
    ) -> torch.Tensor:
        num_rows, num_all, head_dim = heads.shape
        num_kv_heads, block_size = plan.shape.num_kv_heads, plan.shape.block_size
        half = triton.next_power_of_2(head_dim // 2)
        pairs = max(1, self._tiles.pointwise_values // (2 * half))
        rotate_and_write[(triton.cdiv(num_rows * num_all, pairs),)](
            heads,
            cosines,
            sines,
            *_planes(kv, plan.shape),
            plan.slots,
            num_rows,
            QUANTISATION=plan.shape.quantisation,
            NUM_HEADS=num_all - 2 * num_kv_heads,
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=block_size,
            HEAD_DIM=head_dim,
            HALF=half,
            PAIRS=pairs,
            **self._tiles.pointwise.options,
        )
        return heads[:, : num_all - 2 * num_kv_heads]

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> TritonPlan:
        group = self._num_heads // shape.num_kv_heads
        return make_plan(batch, shape, group, self._tiles, self._rule, self._device)

    def fixed_step(self, limits: StepLimits, shape: KVShape, dtype: torch.dtype, vocab_size: int) -> TritonFixedStep:
        group = self._num_heads // shape.num_kv_heads
        step = TritonFixedStep(limits, shape, self._tiles, self._rule, self._device, group=group, vocab_size=vocab_size)
        self._parts(step.num_parts, self._num_heads, shape.head_dim)
        step.scratch = self._scratch
        return step

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, out: torch.Tensor) -> None:
        tails = plan.tails
        assert tails is not None
        parts = self._parts(tails.num_parts, q.shape[1], q.shape[2])
        if plan.nodes is not None:
            self._attend_nodes(q, kv, plan, plan.nodes, parts)
        self._attend_tails(q, kv, plan, tails, parts)
        self._merge(parts, tails.row_parts, tails.merged_rows, out, None)

    def _parts(self, num_parts: int, num_heads: int, head_dim: int) -> _Parts:
        """Memory that every layer and step uses again."""
        num_lse = num_parts * num_heads
        if self._scratch.numel() < num_lse * (head_dim + 1):
            self._scratch = self._scratch.new_empty(num_lse * (head_dim + 1) * 5 // 4)
        values = self._scratch[: num_lse * head_dim].view(num_parts, num_heads, head_dim)
        lse = self._scratch[num_lse * head_dim : num_lse * (head_dim + 1)].view(num_parts, num_heads)
        return _Parts(values, lse)

    def _attend_tails(
        self, q: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, tails: TailPlan, parts: _Parts
    ) -> None:
        num_kv_heads = plan.shape.num_kv_heads
        attend_tails[(tails.num_items, num_kv_heads)](
            q,
            *_planes(kv, plan.shape),
            plan.blocks,
            tails.item_rows,
            tails.item_pieces,
            tails.item_count,
            tails.tail_blocks,
            tails.tail_first,
            tails.tail_tokens,
            tails.tail_parts,
            parts.values,
            parts.lse,
            q.shape[2] ** -0.5,
            **self._constants(q, plan.shape),
            ROWS=max(MIN_ROWS, triton.next_power_of_2(self._num_heads // num_kv_heads)),
            PIECE=self._tiles.piece_tokens,
            **self._tiles.tails.options,
        )

    def _attend_nodes(
        self, q: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, nodes: NodePlan, parts: _Parts
    ) -> None:
        attend_nodes[(nodes.num_items, plan.shape.num_kv_heads)](
            q,
            *_planes(kv, plan.shape),
            plan.blocks,
            nodes.item_nodes,
            nodes.item_tiles,
            nodes.item_pieces,
            nodes.item_count,
            nodes.node_blocks,
            nodes.node_tokens,
            nodes.node_readers,
            nodes.reader_rows,
            nodes.reader_first,
            nodes.reader_parts,
            parts.values,
            parts.lse,
            q.shape[2] ** -0.5,
            IS_WINDOWED=self._rule.window > 0,
            **self._constants(q, plan.shape),
            ROWS=nodes.tile_rows,
            PIECE=self._tiles.piece_tokens,
            **self._tiles.nodes.options,
        )

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: TritonPlan, out: torch.Tensor) -> None:
        extends = plan.extends
        assert extends is not None
        parts = self._parts(extends.num_parts, q.shape[1], q.shape[2])
        attend_extends[(extends.num_items, plan.shape.num_kv_heads)](
            q,
            *_planes(kv, plan.shape),
            plan.blocks,
            extends.item_extends,
            extends.item_tiles,
            extends.item_pieces,
            extends.item_count,
            extends.extend_blocks,
            extends.extend_context,
            extends.extend_rows,
            extends.extend_first,
            extends.extend_piece_tokens,
            extends.extend_pieces,
            extends.extend_parts,
            out,
            parts.values,
            parts.lse,
            q.shape[2] ** -0.5,
            WINDOW=self._rule.window,
            **self._constants(q, plan.shape),
            ROWS=self._tiles.extend_rows,
            **self._tiles.extends.options,
        )
        if extends.num_parts:
            self._merge(parts, extends.row_parts, extends.merged_rows, out, None)

    def _constants(self, q: torch.Tensor, shape: KVShape) -> dict[str, Any]:
        """What the three attention kernels are compiled for."""
        _, num_heads, head_dim = q.shape
        assert num_heads == self._num_heads
        return {
            "SOFT_CAP": self._rule.soft_cap,
            "QUANTISATION": shape.quantisation,
            "Q_STRIDE": q.stride(0),
            "NUM_HEADS": num_heads,
            "NUM_KV_HEADS": shape.num_kv_heads,
            "BLOCK_SIZE": shape.block_size,
            "HEAD_DIM": head_dim,
            "WIDTH": triton.next_power_of_2(head_dim),
            "TOKENS": self._tiles.tile_tokens,
        }

    def merge(self, values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_rows, num_heads, num_parts, head_dim = values.shape
        merged = values.new_empty(num_rows, num_heads, head_dim)
        merged_lse = lse.new_empty(num_rows, num_heads)
        parts = _Parts(values.transpose(1, 2).contiguous(), lse.transpose(1, 2).contiguous())
        row_parts = torch.arange(0, (num_rows + 1) * num_parts, num_parts, dtype=torch.int32, device=values.device)
        rows = torch.arange(num_rows, dtype=torch.int32, device=values.device)
        self._merge(parts, row_parts, rows, merged, merged_lse)
        return merged, merged_lse

    def _merge(
        self,
        parts: _Parts,
        row_parts: torch.Tensor,
        merged_rows: torch.Tensor,
        out: torch.Tensor,
        out_lse: torch.Tensor | None,
    ) -> None:
        _, num_heads, head_dim = out.shape
        heads = min(self._tiles.merge_heads, triton.next_power_of_2(num_heads))
        merge_parts[(len(merged_rows), triton.cdiv(num_heads, heads))](
            parts.values,
            parts.lse,
            row_parts,
            merged_rows,
            out,
            out_lse,
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            WIDTH=triton.next_power_of_2(head_dim),
            HEADS=heads,
            WRITES_LSE=out_lse is not None,
            **self._tiles.merge.options,
        )


def _planes(kv: torch.Tensor, shape: KVShape) -> tuple[torch.Tensor | None, ...]:
    """K, V and the scales of each as kernels take them: the scales lie behind the values of a record, and are the same
    memory seen as bf16."""
    if shape.quantisation != "int8":
        return kv[0], kv[1], None, None
    values, scales = kv.view(torch.int8), kv.view(torch.bfloat16)
    return values[0], values[1], scales[0], scales[1]
