"""Attention of decode rows: each piece of a tail or of a node gives one part, and a merge combines a row's parts.

A piece is PIECE tokens, counted from where its tail or node begins, so that how a row is cut does not depend on who
else is in the batch. Parts lie in one list, a row's own one after the other from the first token to the last: values
fp32 [parts, NUM_HEADS, HEAD_DIM], lse fp32 [parts, NUM_HEADS].

Each launch works off a list of items whose length is read on the device: programs beyond it end at once, so that a
captured graph may have a grid for the most that can come.
"""

import triton
import triton.language as tl

from kernels.triton.attention import attend, store_rows


@triton.jit
def attend_tails(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    blocks,
    item_rows,
    item_pieces,
    num_items,
    tail_blocks,
    tail_first,
    tail_tokens,
    tail_parts,
    part_values,
    part_lse,
    scale,
    SOFT_CAP: tl.constexpr,
    QUANTISATION: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (items, KV heads): one piece of one row's tail, for the heads of one group.

    tail_blocks [rows]: where a tail's table begins in `blocks`; tail_first [rows]: the first of its tokens that the row
    sees; tail_tokens [rows]; tail_parts [rows]: the part that its first piece has, or would have.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.load(item_rows + item)
    piece = tl.load(item_pieces + item)
    start = tl.maximum(piece * PIECE, tl.load(tail_first + row))
    end = tl.minimum((piece + 1) * PIECE, tl.load(tail_tokens + row))
    members = tl.arange(0, ROWS)
    heads = kv_head * GROUP + members
    is_head = members < GROUP
    no_rows = tl.zeros([ROWS], tl.int32)
    mean, lse = attend(
        q,
        row + no_rows,
        heads,
        is_head,
        no_rows,
        no_rows,
        keys,
        values,
        key_scales,
        value_scales,
        blocks + tl.load(tail_blocks + row),
        kv_head,
        start,
        end,
        scale,
        ROWS,
        False,
        False,
        SOFT_CAP,
        QUANTISATION,
        Q_STRIDE,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        TOKENS,
    )
    part = tl.load(tail_parts + row) + piece
    store_rows(part_values, mean, part + no_rows, heads, is_head, NUM_HEADS, HEAD_DIM, WIDTH)
    tl.store(part_lse + part.to(tl.int64) * NUM_HEADS + heads, lse, mask=is_head)


@triton.jit
def attend_nodes(
    q,
    keys,
    values,
    key_scales,
    value_scales,
    blocks,
    item_nodes,
    item_tiles,
    item_pieces,
    num_items,
    node_blocks,
    node_tokens,
    node_readers,
    reader_rows,
    reader_first,
    reader_parts,
    part_values,
    part_lse,
    scale,
    IS_WINDOWED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    QUANTISATION: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (items, KV heads): one piece of one node, for ROWS of its rows: (reader, head of the group).

    node_blocks [nodes]: where a node's table begins in `blocks`; node_tokens [nodes]; node_readers [nodes + 1]: whose
    readers are where in reader_rows, the decode row of each, reader_first, the first of the node's tokens that it sees,
    and reader_parts, the part that its first piece has, or would have. If not IS_WINDOWED, readers see all tokens.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    node = tl.load(item_nodes + item)
    piece = tl.load(item_pieces + item)
    start = piece * PIECE
    end = tl.minimum(start + PIECE, tl.load(node_tokens + node))
    first_reader = tl.load(node_readers + node)
    places = tl.load(item_tiles + item) * ROWS + tl.arange(0, ROWS)
    is_row = places < (tl.load(node_readers + node + 1) - first_reader) * GROUP
    readers = first_reader + places // GROUP
    first_seen = places
    if IS_WINDOWED:
        first_seen = tl.load(reader_first + readers, mask=is_row, other=end)
        is_row = is_row & (first_seen < end)
        start = tl.maximum(start, tl.min(first_seen, 0))
    row = tl.load(reader_rows + readers, mask=is_row, other=0)
    heads = kv_head * GROUP + places % GROUP
    mean, lse = attend(
        q,
        row,
        heads,
        is_row,
        first_seen,
        places,
        keys,
        values,
        key_scales,
        value_scales,
        blocks + tl.load(node_blocks + node),
        kv_head,
        start,
        end,
        scale,
        ROWS,
        False,
        IS_WINDOWED,
        SOFT_CAP,
        QUANTISATION,
        Q_STRIDE,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        TOKENS,
    )
    # read here, as registers are short in the loop
    part = tl.load(reader_parts + readers, mask=is_row, other=0) + piece
    store_rows(part_values, mean, part, heads, is_row, NUM_HEADS, HEAD_DIM, WIDTH)
    tl.store(part_lse + part.to(tl.int64) * NUM_HEADS + heads, lse, mask=is_row)


@triton.jit
def merge_parts(
    part_values,
    part_lse,
    row_parts,
    merged_rows,
    out,
    out_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    WRITES_LSE: tl.constexpr,
):
    """Grid (merged rows, tiles of HEADS heads). out [rows, NUM_HEADS, HEAD_DIM], out_lse fp32 [rows, NUM_HEADS].

    merged_rows [merged rows]: which rows of out; row_parts [merged rows + 1]: the parts of the i-th of them are
    row_parts[i] up to row_parts[i + 1], added in that order, whatever their number.
    """
    merged = tl.program_id(0)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    dims = tl.arange(0, WIDTH)
    is_value = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    first = tl.load(row_parts + merged)
    end = tl.load(row_parts + merged + 1)
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, WIDTH], tl.float32)
    for part in range(first, end):
        places = tl.cast(part, tl.int64) * NUM_HEADS + heads
        lse = tl.load(part_lse + places, mask=is_head, other=float("-inf"))
        counts = lse > float("-inf")
        value = tl.load(
            part_values + places[:, None] * HEAD_DIM + dims[None, :], mask=is_value & counts[:, None], other=0.0
        )
        new_largest = tl.maximum(largest, lse)
        # no difference of two infinities is taken
        base = tl.where(new_largest > float("-inf"), new_largest, 0.0)
        shrink = tl.exp(largest - base)
        weight = tl.exp(lse - base)
        weighted = weighted * shrink[:, None] + value * weight[:, None]
        total = total * shrink + weight
        largest = new_largest
    is_any = total > 0.0
    mean = weighted / tl.where(is_any, total, 1.0)[:, None]
    row = tl.load(merged_rows + merged)
    store_rows(out, mean, row + tl.zeros([HEADS], tl.int32), heads, is_head, NUM_HEADS, HEAD_DIM, WIDTH)
    if WRITES_LSE:
        tl.store(
            out_lse + row.to(tl.int64) * NUM_HEADS + heads,
            tl.where(is_any, largest + tl.log(tl.where(is_any, total, 1.0)), float("-inf")),
            mask=is_head,
        )
