"""A cache of random keys and values on the device, its blocks handed out in a random order, and attention over it
written down in float64."""

import math
import random
from collections.abc import Sequence

import torch

from benchmarks.gpu_device import Device
from benchmarks.gpu_work import ModelShape
from kernels.batch import KVShape

BLOCK_SIZE = 16


class Cache:
    """kv [num_layers, 2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim]; the null block is never handed out."""

    def __init__(
        self,
        device: Device,
        model: ModelShape,
        num_blocks: int,
        *,
        num_layers: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        is_poisoned: bool = False,
    ) -> None:
        """num_blocks: without the null block. is_poisoned: every slot that nobody owns holds NaN; costs a copy for each
        block."""
        self._device = device
        self._is_poisoned = is_poisoned
        self.dtype = dtype
        self.shape = KVShape(num_blocks + 1, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
        layers = model.num_layers if num_layers is None else num_layers
        sizes = (layers, 2, num_blocks + 1, model.num_kv_heads, BLOCK_SIZE, model.head_dim)
        self.kv = torch.empty(sizes, dtype=dtype, device=device.device)
        if is_poisoned:
            self.kv.fill_(math.nan)
        else:
            device.fill(self.kv)
        self._free = list(range(1, num_blocks + 1))
        random.Random(1).shuffle(self._free)

    def blocks(self, num_tokens: int) -> list[int]:
        """Holding so many random tokens."""
        ids = [self._free.pop() for _ in range(-(-num_tokens // BLOCK_SIZE))]
        if self._is_poisoned:
            whole = ids if num_tokens % BLOCK_SIZE == 0 else ids[:-1]
            self._write(whole, BLOCK_SIZE)
            self._write(ids[len(whole) :], num_tokens % BLOCK_SIZE)
        return ids

    def _write(self, ids: list[int], num_slots: int) -> None:
        if ids:
            kv = self.kv[:, :, ids, :, :num_slots]
            self.kv[:, :, ids, :, :num_slots] = self._device.random(*kv.shape, dtype=self.dtype)

    def tokens(self, ids: Sequence[int], num_tokens: int, layer: int = 0) -> torch.Tensor:
        """float64 [2, num_kv_heads, num_tokens, head_dim]"""
        kv = self.kv[layer][:, torch.tensor(ids, device=self.kv.device)]
        return kv.transpose(1, 2).flatten(2, 3)[:, :, :num_tokens].double()


def exact_attention(q: torch.Tensor, kv: torch.Tensor, num_context: int) -> torch.Tensor:
    """Of one sequence in float64. q [rows, heads, head_dim]: row i sees `num_context + i + 1` tokens of kv, which is
    what `Cache.tokens` gives."""
    num_rows, num_heads, head_dim = q.shape
    keys, values = kv
    grouped = q.double().view(num_rows, keys.shape[0], -1, head_dim)
    scores = torch.einsum("rkgd,ktd->kgrt", grouped, keys) / math.sqrt(head_dim)
    seen = torch.ones(num_rows, kv.shape[2], dtype=torch.bool, device=q.device).tril(num_context)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("kgrt,ktd->rkgd", weights, values).reshape(num_rows, num_heads, head_dim)
