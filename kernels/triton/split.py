"""How extends of few rows behind long contexts are cut along their tokens, so that they are enough programs to fill a
device."""

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.attention_rule import AttentionRule
from kernels.batch import Extend
from kernels.triton.starts import starts_of
from kernels.triton.tiles import Tiles


@dataclass(frozen=True, slots=True)
class ExtendSize:
    num_tiles: int
    """Of rows."""
    num_tokens: int
    """That its rows see."""


def find_piece_tokens(extends: Sequence[ExtendSize], num_kv_heads: int, tiles: Tiles) -> list[int]:
    """For each extend how many tokens one program reads: all that its rows see, if it is not cut.

    All that the step reads is dealt out to `split_programs` of them, in multiples of `piece_tokens`. Who has less than
    two shares is not cut, so that a step of that many programs anyway stays whole, but for extends that are much longer
    than the others. Pieces are at the most half as many again as `split_programs`, so that their parts are few
    megabytes.
    """
    work = sum(extend.num_tiles * extend.num_tokens for extend in extends) * num_kv_heads
    share = max(1, -(-work // (tiles.split_programs * tiles.piece_tokens))) * tiles.piece_tokens
    return [extend.num_tokens if extend.num_tokens < 2 * share else share for extend in extends]


@dataclass(frozen=True, slots=True)
class ExtendCuts:
    """Lists as `kernels.triton.extend` has them."""

    items: list[tuple[int, int, int]]
    """(extend, tile, piece); the tiles of a piece follow one another, as they read the same tokens."""
    firsts: list[int]
    piece_tokens: list[int]
    num_pieces: list[int]
    parts: list[int]
    row_parts: list[int]
    merged_rows: list[int]


def cut_extends(
    extends: Sequence[Extend], num_kv_heads: int, group: int, tiles: Tiles, rule: AttentionRule
) -> ExtendCuts:
    """group: query heads of one KV head."""
    firsts = [rule.first_seen(extend.num_context_tokens) for extend in extends]
    sizes = [
        ExtendSize(-(-extend.num_rows * group // tiles.extend_rows), extend.num_tokens - first)
        for extend, first in zip(extends, firsts, strict=True)
    ]
    piece_tokens = find_piece_tokens(sizes, num_kv_heads, tiles)
    num_pieces = [-(-size.num_tokens // num) for size, num in zip(sizes, piece_tokens, strict=True)]
    merged_rows: list[int] = []
    merged_pieces: list[int] = []
    parts: list[int] = []
    first_row = 0
    for extend, pieces in zip(extends, num_pieces, strict=True):
        is_cut = pieces > 1
        parts.append(sum(merged_pieces) if is_cut else -1)
        if is_cut:
            merged_rows += range(first_row, first_row + extend.num_rows)
            merged_pieces += [pieces] * extend.num_rows
        first_row += extend.num_rows
    items = [
        (i, tile, piece)
        for i, (size, pieces) in enumerate(zip(sizes, num_pieces, strict=True))
        for piece in range(pieces)
        for tile in range(size.num_tiles)
    ]
    return ExtendCuts(items, firsts, piece_tokens, num_pieces, parts, starts_of(merged_pieces), merged_rows)
