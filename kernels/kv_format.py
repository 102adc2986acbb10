"""Quantised caches: what a record holds, and how it is written and read in torch, the reference of every backend.

A quantised cache is one tensor of bytes, uint8 [num_layers, 2 (K, V), num_blocks, num_kv_heads, block_bytes],
contiguous. A record, the last dimension, is one block of one KV head:

    block_size * head_dim values of one byte, token by token │ int8: block_size scales, bf16, one for each token

so that moves of blocks take the scales along, and a split by heads needs no change. What is quantised is what a cache
in the model's dtype would hold: K behind its rotation, both rounded to that dtype. All attention, that of the tokens
written in the same step too, reads K and V from the cache.

int8: scale = max|x| / 127 of the token's head, rounded to bf16 (nearest, ties to even); value = x / scale, rounded
likewise to an integer. Both divisions are IEEE's, in fp32. Rounding the scale moves the largest value by less than half
a step, so that none is beyond 127. A scale below the least normal number, 2^-126, is 0 with values 0: such a row, and
one of zeros, reads as zeros. If a number of a row is not finite the scale is NaN, 0x7fc0, and the values are 0: all of
the row reads as NaN. What is read is value * scale in fp32.

fp8: e4m3fn without scales: x rounded to nearest, ties to even, and at most 448 in magnitude; what is not finite is NaN,
0x7f, so that a step over it gives logits that are not finite. The sign of zero is kept.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.batch import KVQuantisation, KVShape

LARGEST_INT8 = 127
LARGEST_FP8 = 448.0
"""Of e4m3fn."""
NAN_SCALE = 0x7FC0
NAN_FP8 = 0x7F
SCALE_BYTES = 2
POISON = 0xFF
"""A record of such bytes reads as NaN in both formats."""


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are kept; `rows` and tokens as above, values as bytes: uint8, whatever they stand for."""

    name: KVQuantisation
    value_dtype: torch.dtype
    """One byte each."""
    has_scales: bool

    def token_bytes(self, head_dim: int) -> int:
        """Of one token's K, or V, of one head."""
        return head_dim + (SCALE_BYTES if self.has_scales else 0)

    def block_bytes(self, block_size: int, head_dim: int) -> int:
        """Of a record."""
        return block_size * self.token_bytes(head_dim)

    def quantise(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """rows [..., head_dim], floating. Values uint8 [..., head_dim], scales bf16 [...], or None."""
        wide = rows.float()
        if not self.has_scales:
            finite = wide.clamp(-LARGEST_FP8, LARGEST_FP8).masked_fill(~wide.isfinite(), torch.nan)
            return finite.to(self.value_dtype).view(torch.uint8), None
        largest = wide.abs().amax(-1)
        scales = (largest / LARGEST_INT8).to(torch.bfloat16)
        scales = scales.masked_fill(scales < torch.finfo(torch.bfloat16).tiny, 0.0)
        scales = scales.masked_fill(~largest.isfinite(), torch.nan)
        is_empty = ~(scales > 0)  # NaN as well
        steps = (wide / scales.float().masked_fill(is_empty, 1.0).unsqueeze(-1)).round()
        steps = steps.masked_fill(is_empty.unsqueeze(-1), 0.0).clamp(-LARGEST_INT8, LARGEST_INT8)
        return steps.to(self.value_dtype).view(torch.uint8), scales

    def dequantise(self, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        """What `quantise` gave. fp32 [..., head_dim]."""
        wide = values.view(self.value_dtype).float()
        return wide if scales is None else wide * scales.float().unsqueeze(-1)

    def split(self, records: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """records uint8 [..., block_bytes]. Views of them: values uint8 [..., block_size, head_dim], and scales bf16
        [..., block_size], or None."""
        block_size = records.shape[-1] // self.token_bytes(head_dim)
        num_values = block_size * head_dim
        values = records[..., :num_values].view(*records.shape[:-1], block_size, head_dim)
        return values, records[..., num_values:].view(torch.bfloat16) if self.has_scales else None

    def pack(self, blocks: torch.Tensor) -> torch.Tensor:
        """Whole blocks, [..., block_size, head_dim], to their records, uint8 [..., block_bytes]."""
        values, scales = self.quantise(blocks)
        parts = [values.flatten(-2)] if scales is None else [values.flatten(-2), scales.view(torch.uint8)]
        return torch.cat(parts, -1)

    def read(self, records: torch.Tensor, head_dim: int) -> torch.Tensor:
        """records uint8 [..., block_bytes]. fp32 [..., block_size, head_dim]."""
        return self.dequantise(*self.split(records, head_dim))

    def write(self, kv: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Quantises rows [num, head_dim] into a layer's cache, uint8 [2, num_blocks, num_kv_heads, block_bytes].

        tokens: int64 [num], places in a cache seen as [2 * num_blocks * num_kv_heads * block_size], none twice.
        """
        head_dim = rows.shape[-1]
        values, scales = self.split(kv.view(-1, kv.shape[-1]), head_dim)
        block_size = values.shape[1]
        record, offset = tokens // block_size, tokens % block_size
        new_values, new_scales = self.quantise(rows)
        values[record, offset] = new_values
        if scales is not None and new_scales is not None:
            scales[record, offset] = new_scales


INT8 = KVFormat("int8", torch.int8, has_scales=True)
FP8 = KVFormat("fp8", torch.float8_e4m3fn, has_scales=False)
_FORMATS: dict[Literal["int8", "fp8"], KVFormat] = {"int8": INT8, "fp8": FP8}


def find_format(quantisation: KVQuantisation | None) -> KVFormat | None:
    """None: K and V are kept as they are, in the model's dtype."""
    return None if quantisation is None else _FORMATS[quantisation]


def layer_sizes(shape: KVShape) -> tuple[int, ...]:
    """Of one layer's cache."""
    planes = (2, shape.num_blocks, shape.num_kv_heads)
    quantised = find_format(shape.quantisation)
    if quantised is None:
        return (*planes, shape.block_size, shape.head_dim)
    return (*planes, quantised.block_bytes(shape.block_size, shape.head_dim))


def cache_dtype(shape: KVShape, dtype: torch.dtype) -> torch.dtype:
    """Of the cache of a model of this dtype."""
    return dtype if shape.quantisation is None else torch.uint8


def token_bytes(quantisation: KVQuantisation | None, head_dim: int, dtype: torch.dtype) -> int:
    """Of one token's K, or V, of one head, in the cache of a model of this dtype."""
    quantised = find_format(quantisation)
    return head_dim * dtype.itemsize if quantised is None else quantised.token_bytes(head_dim)
