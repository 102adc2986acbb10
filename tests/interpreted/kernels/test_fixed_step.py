"""Launches over the memory of fixed steps, with grids for the most that can come, give what exact ones give."""

import numpy as np
import pytest
import torch

from kernels.batch import AttentionBatch, DrawBatch, Node, Tail
from kernels.checked import CheckedKernels
from kernels.fixed_step import StepLimits
from kernels.triton.backend import TritonKernels
from kernels.triton.draw import draw
from kernels.triton.tiles import Tiles
from tests.kernels.pool import Pool

CPU = torch.device("cpu")
TILES = Tiles(piece_tokens=32, tile_tokens=16, max_node_rows=16, extend_rows=16, merge_heads=2)
VOCABULARY = 40


def draws(num_rows: int) -> DrawBatch:
    rows = np.arange(num_rows)
    return DrawBatch(
        temperatures=np.where(rows % 2, 0.9, 0.0).astype(np.float32),
        top_ks=np.full(num_rows, 12, dtype=np.int32),
        top_ps=np.full(num_rows, 0.9),
        min_ps=np.zeros(num_rows),
        seeds=rows.astype(np.int64),
        choices=np.zeros(num_rows, dtype=np.int32),
        positions=rows.astype(np.int64) + 5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_of_many_sizes_over_one_memory_have_the_bits_of_exact_launches(dtype: torch.dtype) -> None:
    """Four rows, then two without a node, then three: what the larger ones left behind the smaller ones' numbers is
    out of range for these."""
    pool = Pool(kv_heads=1, block_size=8, head_dim=16, dtype=dtype)
    kernels = CheckedKernels(TritonKernels(CPU, 2, TILES))
    step = kernels.fixed_step(StepLimits(4, (32, 64), 96), pool.shape, dtype, VOCABULARY)
    assert step is not None
    node, lengths = pool.blocks(40), (3, 20, 35, 70)
    tables = [pool.blocks(length) for length in lengths]
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(1))
    for rows, readers in (([0, 1, 2, 3], [0, 2, 3]), ([1, 3], []), ([3, 0, 1], [0, 2])):
        num_rows = len(rows)
        tails = [Tail(tables[row], lengths[row]) for row in rows]
        nodes = [Node(node, readers)] if readers else []
        slots = [tables[row][-1] * 8 + (lengths[row] - 1) % 8 for row in rows]
        batch = AttentionBatch(slots, tails, nodes)
        q = torch.zeros(4, 2, 16, dtype=dtype)
        q[:num_rows] = pool.random(num_rows, 2, 16)

        exact = torch.empty(num_rows, 2, 16, dtype=dtype)
        kernels.decode_attention(q[:num_rows], pool.kv, kernels.plan(batch, pool.shape, dtype), exact)
        ids = np.zeros(num_rows, dtype=np.int32)
        form = step.try_write(ids, ids, batch, draws(num_rows))
        assert form is not None
        assert form.has_nodes == bool(nodes)
        out = torch.full((4, 2, 16), 7.0, dtype=dtype)
        kernels.decode_attention(q, pool.kv, step.plan(form), out)
        assert torch.equal(out[:num_rows], exact)
        assert not out[num_rows:].any()

        drawn = torch.full((2, 4), -1)
        step.draw(logits, drawn)
        assert torch.equal(drawn[:, :num_rows], draw(logits[:num_rows].clone(), draws(num_rows)))


def test_rows_that_nobody_has_write_no_keys_and_values() -> None:
    """Nor does anything before a step was written."""
    pool = Pool(num_blocks=4, kv_heads=1, block_size=8, head_dim=16, dtype=torch.float32)
    kernels = TritonKernels(CPU, 2, TILES)
    step = kernels.fixed_step(StepLimits(4, (32,), 32), pool.shape, torch.float32, VOCABULARY)
    plan, kv, table = step.plan(step.forms[0]), pool.kv.clone(), torch.ones(4, 1, 16)
    heads = pool.random(4, 4, 16)

    def written() -> list[int]:
        kernels.rope_and_write_kv(heads.clone(), table, torch.zeros(4, 1, 16), kv, plan)
        is_written = (kv[1, :, 0] == heads[:, None, None, 3]).all(-1).any(0)
        return [block * 8 + slot for block, slot in is_written.nonzero().tolist()]

    assert written() == []
    ids = np.zeros(2, dtype=np.int32)
    step.try_write(ids, ids, AttentionBatch([9, 25], [Tail([1], 2), Tail([3], 2)]), draws(2))
    assert written() == [9, 25]
