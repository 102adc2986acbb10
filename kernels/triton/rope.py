"""Rotation of q and K, and the write of K and V to the cache, in one pass over what the projection gave."""

import triton
import triton.language as tl

from kernels.triton.quantised import int8_scale, to_fp8, to_int8


@triton.jit(do_not_specialize=["num_rows"])
def rotate_and_write(
    heads,
    cosines,
    sines,
    keys,
    values,
    key_scales,
    value_scales,
    slots,
    num_rows,
    QUANTISATION: tl.constexpr,
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
    keys, values and their scales as for `kernels.triton.attention.attend`. HALF: a power of two from HEAD_DIM / 2 on.
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
    VALUES: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    RECORD: tl.constexpr = VALUES + 2 * BLOCK_SIZE if QUANTISATION == "int8" else VALUES
    records = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * RECORD
    target = (records + slot % BLOCK_SIZE * HEAD_DIM)[:, None] + dims[None, :]
    writes = is_pair & (slot >= 0)
    writes_key = writes & (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    writes_value = writes & (head >= NUM_HEADS + NUM_KV_HEADS)
    is_key = writes_key[:, None] & is_dim
    is_value = writes_value[:, None] & is_dim
    if QUANTISATION is None:
        tl.store(keys + target, turned_left.to(element), mask=is_key)
        tl.store(keys + target + MIDDLE, turned_right.to(element), mask=is_key)
        tl.store(values + target, raw_left, mask=is_value)
        tl.store(values + target + MIDDLE, raw_right, mask=is_value)
    else:
        # a row is K or V, never both
        is_turned_row = (head < NUM_HEADS + NUM_KV_HEADS)[:, None]
        new_left = tl.where(is_turned_row, turned_left.to(element).to(tl.float32), wide_left)
        new_right = tl.where(is_turned_row, turned_right.to(element).to(tl.float32), wide_right)
        if QUANTISATION == "int8":
            scale = int8_scale(new_left, new_right)
            code_left, code_right = to_int8(new_left, scale), to_int8(new_right, scale)
            scale_places = (records + VALUES) // 2 + slot % BLOCK_SIZE
            # as bits, as a device may have another NaN than the format's
            stored = (scale.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
            tl.store(key_scales + scale_places, stored, mask=writes_key)
            tl.store(value_scales + scale_places, stored, mask=writes_value)
        else:
            code_left, code_right = to_fp8(new_left), to_fp8(new_right)
        tl.store(keys + target, code_left, mask=is_key)
        tl.store(keys + target + MIDDLE, code_right, mask=is_key)
        tl.store(values + target, code_left, mask=is_value)
        tl.store(values + target + MIDDLE, code_right, mask=is_value)
