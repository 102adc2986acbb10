"""Attention of a sequence's new tokens over its context and over themselves up to each one."""

import triton
import triton.language as tl

from kernels.triton.attention import attend


@triton.jit
def attend_extends(
    q,
    keys,
    values,
    blocks,
    item_extends,
    item_tiles,
    num_items,
    extend_blocks,
    extend_context,
    extend_rows,
    out,
    scale,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (items, KV heads): ROWS of one extend's rows, (new token, head of the group), over all tokens they see.

    extend_blocks [extends]: where a table begins in `blocks`; extend_context [extends]: tokens before the new ones;
    extend_rows [extends + 1]: whose rows are where in q and out, [rows, NUM_HEADS, HEAD_DIM].
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    extend = tl.load(item_extends + item)
    first_row = tl.load(extend_rows + extend)
    num_rows = tl.load(extend_rows + extend + 1) - first_row
    context = tl.load(extend_context + extend)
    first_place = tl.load(item_tiles + item) * ROWS
    places = first_place + tl.arange(0, ROWS)
    is_row = places < num_rows * GROUP
    # places behind the last row see what the last one sees, so that they stay finite
    token = tl.minimum(places // GROUP, num_rows - 1)
    heads = kv_head * GROUP + places % GROUP
    end = context + tl.minimum((first_place + ROWS - 1) // GROUP, num_rows - 1) + 1
    dims = tl.arange(0, WIDTH)
    is_value = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    row = (first_row + token).to(tl.int64)
    query = tl.load(q + row[:, None] * Q_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0)
    mean, _ = attend(
        query,
        context + token,
        keys,
        values,
        blocks + tl.load(extend_blocks + extend),
        kv_head,
        0,
        end,
        scale,
        ROWS,
        True,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        TOKENS,
    )
    targets = (row * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + targets, mean.to(out.dtype.element_ty), mask=is_value)
