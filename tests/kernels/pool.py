"""A cache of random tokens with poison where nothing is, and attention over it written down in float64."""

import math
from collections.abc import Sequence

import torch

from kernels.attention_rule import FULL, AttentionRule
from kernels.batch import KVQuantisation, KVShape
from kernels.kv_format import POISON, cache_dtype, find_format, layer_sizes

TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1.6e-2, 5e-3)}
"""The largest difference, values being of unit variance; and the norm of all differences to that of the result."""


class Pool:
    """A cache in which every slot holds NaN until a sequence owns it; blocks come in a random order."""

    def __init__(
        self,
        *,
        num_blocks: int = 300,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        quantisation: KVQuantisation | None = None,
    ):
        """dtype: of rows, and of a cache without a quantisation."""
        self.shape = KVShape(num_blocks, kv_heads, block_size, head_dim, quantisation)
        self.dtype = dtype
        self.quantised = find_format(quantisation)
        poison = math.nan if self.quantised is None else POISON
        self.kv = torch.full(layer_sizes(self.shape), poison, dtype=cache_dtype(self.shape, dtype))
        self._generator = torch.Generator().manual_seed(1)
        self._free = (torch.randperm(num_blocks - 1, generator=self._generator) + 1).tolist()

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=self._generator).to(self.dtype)

    def blocks(self, num_tokens: int) -> list[int]:
        """Blocks holding `num_tokens` random tokens; the slots behind them stay poisoned."""
        size = self.shape.block_size
        ids = [self._free.pop() for _ in range(-(-num_tokens // size))]
        for i, block_id in enumerate(ids):
            used = min(size, num_tokens - i * size)
            numbers = self.random(2, self.shape.num_kv_heads, used, self.shape.head_dim)
            if self.quantised is None:
                self.kv[:, block_id, :, :used] = numbers
                continue
            values, scales = self.quantised.split(self.kv[:, block_id], self.shape.head_dim)
            new_values, new_scales = self.quantised.quantise(numbers)
            values[:, :, :used] = new_values
            if scales is not None and new_scales is not None:
                scales[:, :, :used] = new_scales
        return ids

    def keep_only(self, runs: Sequence[tuple[Sequence[int], int, int]]) -> None:
        """Poisons everything but of each run, a table of blocks, the tokens from one up to before another one."""
        size = self.shape.block_size
        is_lost = torch.ones(self.shape.num_blocks, size, dtype=torch.bool)
        for block_ids, first, end in runs:
            tokens = torch.arange(first, end)
            is_lost[torch.tensor(block_ids)[tokens // size], tokens % size] = False
        if self.quantised is None:
            self.kv.transpose(2, 3)[:, is_lost] = math.nan
            return
        values, scales = self.quantised.split(self.kv, self.shape.head_dim)
        values.transpose(2, 3)[:, is_lost] = POISON
        if scales is not None:
            scales.transpose(2, 3)[:, is_lost] = math.nan

    def tokens(self, block_ids: list[int], num_tokens: int) -> torch.Tensor:
        """[2, kv_heads, num_tokens, head_dim] in float64, as they are read."""
        blocks = self.kv[:, block_ids]
        if self.quantised is not None:
            blocks = self.quantised.read(blocks, self.shape.head_dim)
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :num_tokens].double()


def exact(q: torch.Tensor, kv: torch.Tensor, num_context: int, rule: AttentionRule = FULL) -> torch.Tensor:
    """One sequence in float64. q [rows, heads, head_dim]; row i sees `num_context + i + 1` tokens of kv."""
    group = q.shape[1] // kv.shape[1]
    keys, values = (x.repeat_interleave(group, 0) for x in kv)
    scores = torch.einsum("rhd,htd->hrt", q.double(), keys) / math.sqrt(q.shape[2])
    if rule.soft_cap:
        scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(num_context)
    if rule.window:
        seen = seen.triu(num_context + 1 - rule.window)
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("hrt,htd->rhd", weights, values)


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.isfinite().all()
    largest, relative = TOLERANCE[got.dtype]
    assert (got.double() - expected).abs().max() <= largest
    assert (got.double() - expected).norm() <= relative * expected.norm()
