"""Attention of a sequence's new tokens over its context and over themselves up to each one.

Few new tokens behind a long context are few programs: their tokens are cut into pieces then, each gives a part, and
`kernels.triton.decode.merge_parts` combines a row's parts. The plan decides which extends are cut, and how.
"""

import triton
import triton.language as tl

from kernels.triton.attention import attend, store_rows


@triton.jit
def attend_extends(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    blocks,
    item_extends,
    item_tiles,
    item_pieces,
    num_items,
    extend_blocks,
    extend_context,
    extend_rows,
    extend_first,
    extend_piece_tokens,
    extend_pieces,
    extend_parts,
    out,
    part_values,
    part_lse,
    scale,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTISATION: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (items, KV heads): ROWS of one extend's rows, (new token, head of the group), over one piece of the tokens
    they see, which is all of them if the extend is not cut.

    extend_blocks [extends]: where a table begins in `blocks`; extend_context [extends]: tokens before the new ones;
    extend_rows [extends + 1]: whose rows are where in q and out, [rows, NUM_HEADS, HEAD_DIM]; extend_first,
    extend_piece_tokens, extend_pieces [extends]: where the first piece begins, how long each is and how many there are;
    extend_parts [extends]: the part of its first row's first piece, or -1 if it is not cut. Every row of an extend that
    is cut has a part of each piece, side by side, empty ones too. WINDOW: how many tokens a row sees, itself counted;
    0: all.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    extend = tl.load(item_extends + item)
    piece = tl.load(item_pieces + item)
    first_row = tl.load(extend_rows + extend)
    num_rows = tl.load(extend_rows + extend + 1) - first_row
    context = tl.load(extend_context + extend)
    piece_tokens = tl.load(extend_piece_tokens + extend)
    first_place = tl.load(item_tiles + item) * ROWS
    places = first_place + tl.arange(0, ROWS)
    is_row = places < num_rows * GROUP
    token = tl.minimum(places // GROUP, num_rows - 1)
    heads = kv_head * GROUP + places % GROUP
    start = tl.load(extend_first + extend) + piece * piece_tokens
    end = tl.minimum(start + piece_tokens, context + tl.minimum((first_place + ROWS - 1) // GROUP, num_rows - 1) + 1)
    if WINDOW > 0:
        start = tl.maximum(start, context + first_place // GROUP + 1 - WINDOW)
    mean, lse = attend(
        q,
        first_row + token,
        heads,
        is_row,
        context + token + 1 - WINDOW,
        context + token,
        keys,
        values,
        key_scales,
        value_scales,
        blocks + tl.load(extend_blocks + extend),
        kv_head,
        start,
        end,
        scale,
        ROWS,
        True,
        WINDOW > 0,
        SOFT_CAP,
        QUANTISATION,
        Q_STRIDE,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        TOKENS,
    )
    first_part = tl.load(extend_parts + extend)
    if first_part < 0:
        store_rows(out, mean, first_row + token, heads, is_row, NUM_HEADS, HEAD_DIM, WIDTH)
    else:
        parts = first_part + token * tl.load(extend_pieces + extend) + piece
        store_rows(part_values, mean, parts, heads, is_row, NUM_HEADS, HEAD_DIM, WIDTH)
        tl.store(part_lse + parts.to(tl.int64) * NUM_HEADS + heads, lse, mask=is_row)
