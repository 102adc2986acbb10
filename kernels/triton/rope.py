"""Rotation of q and K, and the write of K and V to the cache, in one pass over what the projection gave."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rotate_and_write(
    heads,
    cosines,
    sines,
    keys,
    values,
    slots,
    num_rows,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Grid (tiles of PAIRS pairs): a pair is (row, head) of q, K and V together.

    heads [num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_DIM]: q is rotated in place, K and V only read. Tables fp32
    [num_rows, HEAD_DIM], the first half of the sines negated. slots [num_rows]; nothing is written to one below 0.
    HALF: a power of two from HEAD_DIM / 2 on.
    """
    ALL: tl.constexpr = NUM_HEADS + 2 * NUM_KV_HEADS
    MIDDLE: tl.constexpr = HEAD_DIM // 2
    pairs = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    rows = pairs // ALL
    head = pairs % ALL
    is_pair = rows < num_rows
    dims = tl.arange(0, HALF)
    is_dim = (dims < MIDDLE)[None, :]
    is_there = is_pair[:, None] & is_dim
    left = pairs.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    raw_left = tl.load(heads + left, mask=is_there, other=0.0)
    raw_right = tl.load(heads + left + MIDDLE, mask=is_there, other=0.0)
    is_turned = is_there & (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
    angle = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    wide_left = raw_left.to(tl.float32)
    wide_right = raw_right.to(tl.float32)
    turned_left = wide_left * tl.load(cosines + angle, mask=is_turned, other=0.0)
    turned_left += wide_right * tl.load(sines + angle, mask=is_turned, other=0.0)
    turned_right = wide_right * tl.load(cosines + angle + MIDDLE, mask=is_turned, other=0.0)
    turned_right += wide_left * tl.load(sines + angle + MIDDLE, mask=is_turned, other=0.0)
    element: tl.constexpr = heads.dtype.element_ty

    is_q = is_there & (head < NUM_HEADS)[:, None]
    tl.store(heads + left, turned_left.to(element), mask=is_q)
    tl.store(heads + left + MIDDLE, turned_right.to(element), mask=is_q)

    slot = tl.load(slots + rows, mask=is_pair, other=-1).to(tl.int64)
    kv_head = (head - NUM_HEADS) % NUM_KV_HEADS
    places = ((slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    target = places[:, None] + dims[None, :]
    is_written = is_there & (slot >= 0)[:, None]
    is_key = is_written & ((head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS))[:, None]
    tl.store(keys + target, turned_left.to(element), mask=is_key)
    tl.store(keys + target + MIDDLE, turned_right.to(element), mask=is_key)
    is_value = is_written & (head >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    tl.store(values + target, raw_left, mask=is_value)
    tl.store(values + target + MIDDLE, raw_right, mask=is_value)
