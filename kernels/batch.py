"""What attention has to read in one step, as plain numbers: the input that each backend plans its own indices from.

The rows of a step are the decode rows first, one token each, then the extends, a run of rows each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
KVQuantisation = Literal["int8", "fp8"]
"""See `kernels.kv_format`."""


@dataclass(frozen=True, slots=True)
class Node:
    """Blocks that several decode rows share: all full, wholly before each row's last token.

    A row may be in several: the first holds its first tokens, the next those that follow, and so on.
    """

    block_ids: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tail:
    """One decode row's blocks after its nodes' (all its blocks if it has none); at least one token."""

    block_ids: Sequence[int]
    num_tokens: int
    """Tokens in these blocks, the row's own included."""


@dataclass(frozen=True, slots=True)
class Extend:
    """Several new tokens of one sequence: each sees the context and the new ones up to itself."""

    num_rows: int
    num_context_tokens: int
    block_ids: Sequence[int]
    """Of context and new tokens, from position 0."""
    num_asked: int | None = None
    """Of so many of its last rows the hidden states behind the last layer are asked for; None: of all."""

    @property
    def num_outputs(self) -> int:
        return self.num_rows if self.num_asked is None else self.num_asked

    @property
    def num_tokens(self) -> int:
        return self.num_context_tokens + self.num_rows


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    slots: Sequence[int] | Int32Array
    """For each row where its K and V go: block_id * block_size + offset."""
    tails: Sequence[Tail] = ()
    """One for each decode row."""
    nodes: Sequence[Node] = ()
    """In each row's order: a trunk before a document that follows it."""
    extends: Sequence[Extend] = field(default=())

    @property
    def num_decodes(self) -> int:
        return len(self.tails)


@dataclass(frozen=True, slots=True)
class DrawBatch:
    """What the draw of the next tokens needs to know, an entry for each row."""

    temperatures: npt.NDArray[np.float32]
    """0: the largest logit."""
    top_ks: Int32Array
    """0: off."""
    top_ps: npt.NDArray[np.float64]
    """1: off."""
    min_ps: npt.NDArray[np.float64]
    """0: off."""
    seeds: npt.NDArray[np.int64]
    """Their 64 bits."""
    choices: Int32Array
    positions: npt.NDArray[np.int64]
    """Of the tokens that are drawn."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Of one layer's cache, [2, num_blocks, num_kv_heads, block_size, head_dim] in the model's dtype; of bytes,
    [2, num_blocks, num_kv_heads, block_bytes], if it is quantised (`kernels.kv_format`). The null block is counted."""

    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    quantisation: KVQuantisation | None = None
