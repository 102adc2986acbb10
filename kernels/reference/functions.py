"""Plain torch for what every backend may use: norm, rotation, index arithmetic of the cache."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.batch import Int32Array, KVShape
from kernels.kv_format import KVFormat


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., features], weight [features]."""
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, head_dim]; cosines, sines fp32 [rows, 1, head_dim], first half of the sines negated."""
    wide = x.float()
    swapped = torch.roll(wide, x.shape[-1] // 2, -1)
    return torch.addcmul(wide * cosines, swapped, sines).to(x.dtype)


def rope_and_write_kv(
    heads: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    kv: torch.Tensor,
    rows: torch.Tensor,
    quantised: KVFormat | None,
) -> torch.Tensor:
    """heads [rows, num_heads + 2 * num_kv_heads, head_dim], changed in place; rows as `kv_rows` makes them. The rotated
    q, [rows, num_heads, head_dim]."""
    num_kv_heads = kv.shape[2]
    num_heads = heads.shape[1] - 2 * num_kv_heads
    num_rotated = num_heads + num_kv_heads
    rotated = rope(heads[:, :num_rotated], cosines, sines)
    # K goes back beside V, so that one write takes both
    heads[:, num_heads:num_rotated] = rotated[:, num_heads:]
    write_kv(kv, heads[:, num_heads:], rows, quantised)
    return rotated[:, :num_heads]


def scores(q: torch.Tensor, keys: torch.Tensor, soft_cap: float) -> torch.Tensor:
    """Of q [..., rows, head_dim] and keys [..., tokens, head_dim]: [..., rows, tokens], scaled, and bent to stay within
    soft_cap if it is above 0."""
    scaled: torch.Tensor = q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scaled / soft_cap).tanh() * soft_cap if soft_cap else scaled


def merge(values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """values [rows, heads, parts, head_dim], lse fp32 [rows, heads, parts], as `kernels.interface.Kernels.merge` has
    them."""
    is_empty = lse == float("-inf")
    # where all parts are empty, no difference is taken of two infinities
    largest = lse.amax(-1, keepdim=True).clamp_(min=torch.finfo(lse.dtype).min)
    weights = (lse - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    # a weight of zero does not silence a NaN
    filled = values.masked_fill(is_empty.unsqueeze(-1), 0.0)
    merged = (weights.unsqueeze(-2) @ filled).squeeze(-2) / total.clamp(min=torch.finfo(lse.dtype).tiny)
    return merged, (largest + total.log()).squeeze(-1)


def kv_rows(slots: Sequence[int] | Int32Array, shape: KVShape, device: torch.device) -> torch.Tensor:
    """Rows of the cache seen as [2 * num_blocks * num_kv_heads * block_size] tokens that the new K and V of each slot
    go to: int64 [num_slots * 2 * num_kv_heads], in the order (slot, K or V, head)."""
    slot = torch.as_tensor(slots, dtype=torch.int64, device=device)[:, None, None]
    block, offset = slot // shape.block_size, slot % shape.block_size
    kv = torch.arange(2, device=device)[None, :, None]
    head = torch.arange(shape.num_kv_heads, device=device)[None, None, :]
    row = ((kv * shape.num_blocks + block) * shape.num_kv_heads + head) * shape.block_size + offset
    return row.reshape(-1)


def write_kv(kv: torch.Tensor, key_value: torch.Tensor, rows: torch.Tensor, quantised: KVFormat | None) -> None:
    """key_value [num_slots, 2 * num_kv_heads, head_dim] to `rows` of the layer's cache."""
    head_dim = key_value.shape[-1]
    if quantised is None:
        kv.view(-1, head_dim).index_copy_(0, rows, key_value.reshape(-1, head_dim))
    else:
        quantised.write(kv, rows, key_value.reshape(-1, head_dim))


def block_rows(tables: torch.Tensor, shape: KVShape) -> torch.Tensor:
    """Rows of the cache seen as [2 * num_blocks * num_kv_heads] blocks of a head, in the order of the result.

    tables: int64 [num, blocks]. Gathering these rows gives [2, num, num_kv_heads, blocks * block_size, head_dim],
    contiguous: one copy, no transpose. Returns int64 [2 * num * num_kv_heads * blocks].
    """
    kv = torch.arange(2, device=tables.device)[:, None, None, None]
    head = torch.arange(shape.num_kv_heads, device=tables.device)[None, None, :, None]
    return ((kv * shape.num_blocks + tables[None, :, None, :]) * shape.num_kv_heads + head).reshape(-1)


def padded(tables: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """int64 [num, longest]; the null block, 0, fills up."""
    # through numpy: torch reads lists of lists element by element, five times slower
    rows = np.zeros((len(tables), max(len(table) for table in tables)), dtype=np.int64)
    for row, table in zip(rows, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(rows).to(device)
