"""Every kernel in every form that steps launch it in, before the first request: compiling takes seconds."""

import numpy as np
import torch

from engine.decode_graphs import find_row_counts
from engine.kv_tensors import KVTensors
from engine.models.decoder import Decoder
from engine.scheduled_batch import BlockCopy, Transfers
from kernels.batch import AttentionBatch, DrawBatch, Extend, Node, Tail
from kernels.interface import TokenDraw

EXTEND_ROWS = 2
MAX_READERS = 64
"""With so many a node has the largest tiles, even if each head has keys of its own."""


def compile_kernels(decoder: Decoder, blocks: KVTensors, draw: TokenDraw | None, max_rows: int) -> None:
    """To be called before anything is stored: numbers of no meaning are left in blocks that nobody has.

    max_rows: of a step. A step for each number of readers, as tiles of a node are as large as its readers ask for.
    """
    shape = blocks.shape
    most = min(max_rows, MAX_READERS, shape.num_blocks * shape.block_size - EXTEND_ROWS)
    for num_readers in find_row_counts(most):
        hidden = _step(decoder, blocks, num_readers)
    logits = decoder.logits(hidden[:1])
    if draw is not None:
        draw(logits, _one_row())
    blocks.move(Transfers(copies=(BlockCopy(0, 1),)))
    blocks.move(Transfers(copies=(BlockCopy(0, 1), BlockCopy(1, 0))))  # by way of a buffer


def _step(decoder: Decoder, blocks: KVTensors, num_readers: int) -> torch.Tensor:
    """Decode rows behind one node, and an extend."""
    num_rows = num_readers + EXTEND_ROWS
    batch = AttentionBatch(
        slots=range(num_rows),
        tails=[Tail([0], 1)] * num_readers,
        nodes=[Node([0], range(num_readers))],
        extends=[Extend(EXTEND_ROWS, 0, [0])],
    )
    ids = np.zeros(num_rows, dtype=np.int32)
    return decoder.forward(ids, ids, blocks.kv, decoder.plan(batch, blocks.shape), num_readers)


def _one_row() -> DrawBatch:
    """With every filter."""
    zeros = np.zeros(1, dtype=np.int64)
    return DrawBatch(
        temperatures=np.ones(1, dtype=np.float32),
        top_ks=np.ones(1, dtype=np.int32),
        top_ps=np.full(1, 0.5),
        min_ps=np.full(1, 0.5),
        seeds=zeros,
        choices=zeros.astype(np.int32),
        positions=zeros,
    )
