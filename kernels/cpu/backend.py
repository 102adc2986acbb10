"""The CPU backend: linears of oneDNN on weights packed once, with activation and residual in their epilogues, and
torch's flash attention with the query heads of a group folded into its rows.

A shared node is one dense pass for all its readers; tails of about the same length are gathered and run together; the
two meet by their log-sum-exps.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.batch import AttentionBatch, KVShape
from kernels.cpu.plan import CpuPlan, ExtendPlan, NodePlan, Scratch, TailPlan, filled_up, make_plan
from kernels.fixed_step import StepLimits
from kernels.reference import functions


@dataclass(frozen=True, slots=True)
class CpuLinear:
    weight: torch.Tensor
    """In oneDNN's own layout if packed."""
    bias: torch.Tensor | None
    is_packed: bool


class CpuKernels:
    name = "cpu"

    def __init__(self, *, packs_linears: bool) -> None:
        self._packs_linears = packs_linears
        self._pointwise = torch.ops.mkldnn._linear_pointwise
        self._scratch = Scratch()
        self._flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
        own_bias = None if bias is None else bias.clone()
        if self._packs_linears:
            return CpuLinear(torch.ops.mkldnn._reorder_linear_weight(weight), own_bias, True)
        return CpuLinear(weight.clone(), own_bias, False)

    def linear(self, x: torch.Tensor, packed: CpuLinear, residual: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor
        if not packed.is_packed:
            y = F.linear(x, packed.weight, packed.bias)
            return y if residual is None else y.add_(residual)
        if residual is None:
            y = self._pointwise(x, packed.weight, packed.bias, "none", [], "")
        else:
            y = self._pointwise.binary(x, residual, packed.weight, packed.bias, "add")
        return y

    def linear_and_norm(
        self, x: torch.Tensor, packed: CpuLinear, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = self.linear(x, packed, residual)
        return summed, self.rms_norm(summed, weight, eps)

    def swiglu(self, x: torch.Tensor, gate: CpuLinear, up: CpuLinear) -> torch.Tensor:
        if not gate.is_packed:
            return F.silu(self.linear(x, gate)).mul_(self.linear(x, up))
        activated = self._pointwise(x, gate.weight, gate.bias, "swish", [], "")
        y: torch.Tensor = self._pointwise.binary(x, activated, up.weight, up.bias, "mul")
        return y

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functions.rms_norm(x, weight, eps)

    def rope_and_write_kv(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor, plan: CpuPlan
    ) -> torch.Tensor:
        return functions.rope_and_write_kv(heads, cosines, sines, kv, plan.kv_rows, plan.quantised)

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> CpuPlan:
        return make_plan(batch, shape, dtype, self._scratch)

    def fixed_step(self, limits: StepLimits, shape: KVShape, dtype: torch.dtype, vocab_size: int) -> None:
        return None

    def merge(self, values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return functions.merge(values, lse)

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: CpuPlan, out: torch.Tensor) -> None:
        num, num_heads, head_dim = q.shape
        num_kv_heads = kv.shape[2]
        grouped = q.view(num, num_kv_heads, num_heads // num_kv_heads, head_dim)
        if not plan.nodes:
            for tail in plan.tails:
                attended, _ = self._attend_tail(grouped, kv, tail)
                rows = slice(None) if tail.rows is None else tail.rows
                out.view(grouped.shape)[rows] = attended
            return
        values = q.new_empty(num, num_heads, plan.num_parts, head_dim, dtype=torch.float32)
        lse = q.new_full((num, num_heads, plan.num_parts), float("-inf"), dtype=torch.float32)
        for tail in plan.tails:
            attended, part_lse = self._attend_tail(grouped, kv, tail)
            rows = slice(None) if tail.rows is None else tail.rows
            values[rows, :, 0] = attended.flatten(1, 2).float()
            lse[rows, :, 0] = part_lse.flatten(1, 2)
        for node in plan.nodes:
            attended, part_lse = self._attend_node(grouped, kv, node)
            values[node.rows, :, node.parts] = attended.float()
            lse[node.rows, :, node.parts] = part_lse
        merged, _ = self.merge(values, lse)
        out.copy_(merged)

    def _attend_tail(
        self, grouped: torch.Tensor, kv: torch.Tensor, tail: TailPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[tail rows, num_kv_heads, group, head_dim], and its log-sum-exps without the last dimension."""
        keys, values = tail.gather.keys_and_values(kv)
        part = grouped if tail.rows is None else grouped[tail.rows]
        group = part.shape[2]
        if len(grouped) == 1:
            part = filled_up(part)
        keys, values = keys[:, :, : tail.num_tokens], values[:, :, : tail.num_tokens]
        attended, lse = self._flash(part, keys, values, attn_mask=tail.mask)
        return attended[:, :, :group], lse[:, :, :group]

    def _attend_node(
        self, grouped: torch.Tensor, kv: torch.Tensor, node: NodePlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[readers, num_heads, head_dim], and its log-sum-exps without the last dimension."""
        keys, values = node.gather.keys_and_values(kv)
        part = grouped[node.rows]
        num, num_kv_heads, group, head_dim = part.shape
        folded = part.transpose(0, 1).reshape(1, num_kv_heads, num * group, head_dim)
        attended, lse = self._flash(folded, keys, values)
        attended = attended.reshape(num_kv_heads, num, group, head_dim).transpose(0, 1)
        return attended.flatten(1, 2), lse.reshape(num_kv_heads, num, group).transpose(0, 1).flatten(1, 2)

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: CpuPlan, out: torch.Tensor) -> None:
        for part in plan.extends:
            rows = slice(part.first_row, part.first_row + part.extend.num_rows)
            self._extend(q[rows], kv, part, out[rows])

    def _extend(self, q: torch.Tensor, kv: torch.Tensor, part: ExtendPlan, out: torch.Tensor) -> None:
        num, num_heads, head_dim = q.shape
        num_kv_heads = kv.shape[2]
        group = num_heads // num_kv_heads
        keys, values = part.gather.keys_and_values(kv)
        # KV heads as the batch, the heads of a group as its heads: K and V are shared by stride 0, not repeated
        queries = q.view(num, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)

        def shared(x: torch.Tensor) -> torch.Tensor:
            return x[0, :, None, : part.extend.num_tokens].expand(num_kv_heads, group, -1, head_dim)

        if part.mask is not None:
            queries = filled_up(queries)
        is_causal = part.mask is None
        attended, _ = self._flash(queries, shared(keys), shared(values), 0.0, is_causal, attn_mask=part.mask)
        out.view(num, num_kv_heads, group, head_dim).copy_(attended[:, :, :num].permute(2, 0, 1, 3))
