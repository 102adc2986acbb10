"""Attention of some query rows over a run of tokens: the loop that tails, shared nodes and extends have in common.

Rows are (query, head of a group): all heads that read one KV head lie in one tile, so K and V are read once for them.
Scores are kept in units of log2 and become natural where a log-sum-exp is written.
"""

import triton
import triton.language as tl

from kernels.triton.arithmetic import dot

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,
    last_seen,
    keys,
    values,
    blocks,
    kv_head,
    start,
    end,
    scale,
    ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Over tokens [start, end), at least one, of the table `blocks`, TOKENS at a time; nothing is read behind `end`.

    q [ROWS, WIDTH], zeros from HEAD_DIM on; last_seen [ROWS]: if IS_CAUSAL the last token that a row sees, at least
    `start`. keys, values [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]. Returns fp32: the weighted mean of the
    values [ROWS, WIDTH] and the natural log-sum-exp [ROWS].
    """
    dims = tl.arange(0, WIDTH)
    offsets = tl.arange(0, TOKENS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start, end, TOKENS):
        tokens = first + offsets
        is_there = tokens < end
        block = tl.load(blocks + tokens // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        # a block's number times its size passes 2**31
        places = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + tokens % BLOCK_SIZE) * HEAD_DIM
        key = tl.load(
            keys + places[None, :] + dims[:, None], mask=is_there[None, :] & (dims < HEAD_DIM)[:, None], other=0.0
        )
        scores = dot(q, key) * (scale * LOG2E)
        is_seen = is_there[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (tokens[None, :] <= last_seen[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        # finite from the first tile on: every row sees its first token
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        shrink = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        value = tl.load(
            values + places[:, None] + dims[None, :], mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
        )
        # the sum is of the weights as the product sees them: the error of rounding them cancels out in the mean
        rounded = weights.to(value.dtype)
        weighted = weighted * shrink[:, None] + dot(rounded, value)
        total = total * shrink + tl.sum(rounded.to(tl.float32), 1)
        largest = new_largest
    return weighted / total[:, None], largest * LN2 + tl.log(total)
