"""Attention of some query rows over a run of tokens: what tails, shared nodes and extends have in common.

Rows are (query, head of a group): all heads that read one KV head lie in one tile, so K and V are read once for them.
Scores are kept in units of log2 and become natural where a log-sum-exp is written.
"""

import triton
import triton.language as tl

from kernels.triton.arithmetic import dot, round_to
from kernels.triton.quantised import as_operand

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    q,
    rows,
    heads,
    is_row,
    first_seen,
    last_seen,
    keys,
    values,
    key_scales,
    value_scales,
    blocks,
    kv_head,
    start,
    end,
    scale,
    ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    IS_WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTISATION: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Over tokens [start, end) of the table `blocks`, TOKENS at a time; no others are read.

    q: its row `rows` [ROWS], Q_STRIDE apart, of head `heads` [ROWS], where `is_row`; elsewhere zeros. A row sees tokens
    from first_seen [ROWS] on if IS_WINDOWED, and up to last_seen [ROWS] if IS_CAUSAL; without either there has to be a
    token. SOFT_CAP, if it is above 0: what scores are bent to stay within. keys, values
    [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM]; with a QUANTISATION records of bytes, and for int8 the same memory
    once more as bf16, as scales (`kernels.kv_format`).

    Returns fp32: the weighted mean of the values [ROWS, WIDTH] and the natural log-sum-exp [ROWS]; zeros and -inf for a
    row that sees none of the tokens.
    """
    MAY_SEE_NONE: tl.constexpr = IS_CAUSAL or IS_WINDOWED
    dtype: tl.constexpr = q.dtype.element_ty
    # times a scale, weights would leave the range of fp16; bfloat16 holds the whole numbers of int8 as well
    value_dtype: tl.constexpr = tl.bfloat16 if QUANTISATION == "int8" and dtype == tl.float16 else dtype
    VALUES: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    RECORD: tl.constexpr = VALUES + 2 * BLOCK_SIZE if QUANTISATION == "int8" else VALUES
    dims = tl.arange(0, WIDTH)
    offsets = tl.arange(0, TOKENS)
    is_value = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        q + rows.to(tl.int64)[:, None] * Q_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0
    )
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(start, end, TOKENS):
        tokens = first + offsets
        is_there = tokens < end
        block = tl.load(blocks + tokens // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        # a block's number times its size passes 2**31
        records = (block * NUM_KV_HEADS + kv_head) * RECORD
        places = records + tokens % BLOCK_SIZE * HEAD_DIM
        scale_places = (records + VALUES) // 2 + tokens % BLOCK_SIZE
        key = tl.load(
            keys + places[None, :] + dims[:, None], mask=is_there[None, :] & (dims < HEAD_DIM)[:, None], other=0.0
        )
        scores = dot(query, as_operand(key, dtype, QUANTISATION))
        if QUANTISATION == "int8":
            # whole numbers up to 127 are exact in 16 bits, so that products stay those of 16 bits: a token's scale is
            # multiplied onto its score here, and V's onto the weights below
            scores *= tl.load(key_scales + scale_places, mask=is_there, other=0.0).to(tl.float32)[None, :]
        if SOFT_CAP > 0:
            scores = bend(scores * (scale / SOFT_CAP)) * (SOFT_CAP * LOG2E)
        else:
            scores *= scale * LOG2E
        is_seen = is_there[None, :]
        if IS_CAUSAL:
            is_seen = is_seen & (tokens[None, :] <= last_seen[:, None])
        if IS_WINDOWED:
            is_seen = is_seen & (tokens[None, :] >= first_seen[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        base = new_largest
        if MAY_SEE_NONE:
            # no difference of two infinities is taken
            base = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        value = tl.load(
            values + places[:, None] + dims[None, :], mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
        )
        value = as_operand(value, value_dtype, QUANTISATION)
        if QUANTISATION == "int8":
            total = total * shrink + tl.sum(weights, 1)
            weights *= tl.load(value_scales + scale_places, mask=is_there, other=0.0).to(tl.float32)[None, :]
            rounded = round_to(weights, value_dtype)
        else:
            # the sum is of the weights as the product sees them: the error of rounding them cancels out in the mean
            rounded = round_to(weights, value_dtype)
            total = total * shrink + tl.sum(rounded.to(tl.float32), 1)
        weighted = weighted * shrink[:, None] + dot(rounded, value)
        largest = new_largest
    if MAY_SEE_NONE:
        # the largest score is -inf where nothing is seen; a NaN is not 0, and stays
        total = tl.where(total != 0.0, total, 1.0)
    return weighted / total[:, None], largest * LN2 + tl.log(total)


@triton.jit
def bend(x):
    """The hyperbolic tangent, within 2**-23 of it."""
    shrunk = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def store_rows(out, mean, rows, heads, is_row, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """mean [tile, WIDTH] to the rows and heads of out [..., NUM_HEADS, HEAD_DIM], where `is_row`."""
    dims = tl.arange(0, WIDTH)
    targets = (rows.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + targets, round_to(mean, out.dtype.element_ty), mask=is_row[:, None] & (dims < HEAD_DIM)[None, :])
