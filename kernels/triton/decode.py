"""Attention of decode rows: each piece of a tail or of a node gives one part, and a merge combines a row's parts.

A piece is PIECE tokens, counted from where its tail or node begins, so that how a row is cut does not depend on who
else is in the batch. Parts lie in one list, a row's own one after the other from the first token to the last: values
fp32 [parts, NUM_HEADS, HEAD_DIM], lse fp32 [parts, NUM_HEADS].

Each launch works off a list of items whose length is read on the device: programs beyond it end at once, so that a
captured graph may have a grid for the most that can come.
"""

import triton
import triton.language as tl

from kernels.triton.attention import attend


@triton.jit
def attend_tails(
    q,
    keys,
    values,
    blocks,
    item_rows,
    item_pieces,
    num_items,
    tail_blocks,
    tail_tokens,
    tail_parts,
    part_values,
    part_lse,
    scale,
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

    tail_blocks [rows]: where a tail's table begins in `blocks`; tail_tokens [rows]; tail_parts [rows]: the part of its
    first piece.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(num_items):
        return
    GROUP: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    row = tl.load(item_rows + item)
    piece = tl.load(item_pieces + item)
    start = piece * PIECE
    end = tl.minimum(start + PIECE, tl.load(tail_tokens + row))
    dims = tl.arange(0, WIDTH)
    members = tl.arange(0, ROWS)
    heads = kv_head * GROUP + members
    is_head = members < GROUP
    is_value = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        q + row.to(tl.int64) * Q_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0
    )
    mean, lse = attend(
        query,
        members,
        keys,
        values,
        blocks + tl.load(tail_blocks + row),
        kv_head,
        start,
        end,
        scale,
        ROWS,
        False,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        TOKENS,
    )
    places = (tl.load(tail_parts + row) + piece).to(tl.int64) * NUM_HEADS + heads
    tl.store(part_values + places[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_value)
    tl.store(part_lse + places, lse, mask=is_head)


@triton.jit
def attend_nodes(
    q,
    keys,
    values,
    blocks,
    item_nodes,
    item_tiles,
    item_pieces,
    num_items,
    node_blocks,
    node_tokens,
    node_readers,
    reader_rows,
    reader_parts,
    part_values,
    part_lse,
    scale,
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
    readers are where in reader_rows, the decode row of each, and reader_parts, the part of its first piece.
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
    row = tl.load(reader_rows + readers, mask=is_row, other=0)
    part = tl.load(reader_parts + readers, mask=is_row, other=0) + piece
    heads = kv_head * GROUP + places % GROUP
    dims = tl.arange(0, WIDTH)
    is_value = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        q + row.to(tl.int64)[:, None] * Q_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :], mask=is_value, other=0.0
    )
    mean, lse = attend(
        query,
        places,
        keys,
        values,
        blocks + tl.load(node_blocks + node),
        kv_head,
        start,
        end,
        scale,
        ROWS,
        False,
        NUM_KV_HEADS,
        BLOCK_SIZE,
        HEAD_DIM,
        WIDTH,
        TOKENS,
    )
    targets = part.to(tl.int64) * NUM_HEADS + heads
    tl.store(part_values + targets[:, None] * HEAD_DIM + dims[None, :], mean, mask=is_value)
    tl.store(part_lse + targets, lse, mask=is_row)


@triton.jit
def merge_parts(
    part_values,
    part_lse,
    row_parts,
    out,
    out_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    WRITES_LSE: tl.constexpr,
):
    """Grid (rows, tiles of HEADS heads). out [rows, NUM_HEADS, HEAD_DIM], out_lse fp32 [rows, NUM_HEADS].

    row_parts [rows + 1]: row r's parts are row_parts[r] up to row_parts[r + 1], added in that order, whatever their
    number.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = heads < NUM_HEADS
    dims = tl.arange(0, WIDTH)
    is_value = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    first = tl.load(row_parts + row)
    end = tl.load(row_parts + row + 1)
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
    targets = row * NUM_HEADS + heads
    tl.store(out + targets[:, None] * HEAD_DIM + dims[None, :], mean.to(out.dtype.element_ty), mask=is_value)
    if WRITES_LSE:
        tl.store(
            out_lse + targets,
            tl.where(is_any, largest + tl.log(tl.where(is_any, total, 1.0)), float("-inf")),
            mask=is_head,
        )
