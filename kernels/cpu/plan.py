"""Index tensors of one step for the CPU backend, made once and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.batch import AttentionBatch, Extend, KVShape, Tail
from kernels.kv_format import KVFormat, find_format
from kernels.reference import functions

_CPU = torch.device("cpu")
MIN_ROWS = 4
"""Queries of one head. With fewer torch's products sum in another order, and a token would get other bits alone than
among the tokens of its prompt."""
MAX_GROUP_BLOCKS = 1024
"""About 12 MiB a layer with 3 KV heads of 64 in bf16."""


@dataclass(frozen=True, slots=True)
class Gather:
    """Copies blocks of a layer's cache into memory that is used by one gather after the other, in every layer; what is
    quantised it turns back into numbers of the model's dtype."""

    rows: torch.Tensor
    """int64, see functions.block_rows."""
    buffer: torch.Tensor
    """[2, num, num_kv_heads, blocks * block_size, head_dim]"""
    unused: torch.Tensor | None
    """int64: rows of the buffer seen as [slots, head_dim] that no token has been written to."""
    quantised: KVFormat | None

    def keys_and_values(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num, num_kv_heads, blocks * block_size, head_dim] each; unused slots are zero."""
        blocks, head_dim = kv.flatten(0, 2).flatten(1), self.buffer.shape[-1]
        if self.quantised is None:
            torch.index_select(blocks, 0, self.rows, out=self.buffer.view(-1, blocks.shape[1]))
        else:
            numbers = self.quantised.read(blocks.index_select(0, self.rows), head_dim)
            self.buffer.view(numbers.shape).copy_(numbers)
        if self.unused is not None:
            # the mask alone would not do: NaN times a weight of zero is NaN
            self.buffer.view(-1, head_dim).index_fill_(0, self.unused, 0.0)
        return self.buffer[0], self.buffer[1]


class Scratch:
    """Memory for gathers, kept between steps: fresh pages would cost more than the copies into them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def view(self, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised; overwritten by whoever asks next. A plan made before it grew keeps what it has."""
        num_bytes = torch.Size(sizes).numel() * dtype.itemsize
        if num_bytes > self._memory.numel():
            self._memory = torch.empty(num_bytes * 5 // 4, dtype=torch.uint8)
        return self._memory[:num_bytes].view(dtype).view(sizes)


@dataclass(frozen=True, slots=True)
class NodePlan:
    rows: torch.Tensor
    """int64 [readers], decode rows."""
    parts: torch.Tensor
    """int64 [readers]: the place of the node's result among the parts of each row, whose tail is part 0."""
    gather: Gather


@dataclass(frozen=True, slots=True)
class TailPlan:
    """Tails of about the same length, padded to the longest if they differ."""

    rows: torch.Tensor | None
    """int64, decode rows; None: all of them, in order."""
    gather: Gather
    num_tokens: int
    """Of the longest; attention looks no further."""
    mask: torch.Tensor | None
    """[num, 1, 1, num_tokens], 0 or -inf, in the model's dtype; None where all are as long."""


@dataclass(frozen=True, slots=True)
class ExtendPlan:
    extend: Extend
    first_row: int
    """Counted from the first extend's first row."""
    gather: Gather
    mask: torch.Tensor | None
    """[1, 1, max(num_rows, MIN_ROWS), num_tokens], 0 or -inf, in the model's dtype; None without a context: plain
    causal then."""


@dataclass(frozen=True, slots=True)
class CpuPlan:
    quantised: KVFormat | None
    kv_rows: torch.Tensor
    nodes: tuple[NodePlan, ...]
    num_parts: int
    """Of the row with the most nodes, its tail included."""
    tails: tuple[TailPlan, ...]
    extends: tuple[ExtendPlan, ...]


def make_plan(batch: AttentionBatch, shape: KVShape, dtype: torch.dtype, scratch: Scratch) -> CpuPlan:
    extends = []
    first_row = 0
    for extend in batch.extends:
        table = list(extend.block_ids[: -(-extend.num_tokens // shape.block_size)])
        gather = _gather([table], shape, dtype, scratch)
        extends.append(ExtendPlan(extend, first_row, gather, _causal_mask(extend, dtype)))
        first_row += extend.num_rows
    num_parts = [1] * batch.num_decodes
    nodes = []
    for node in batch.nodes:
        parts = torch.tensor([num_parts[row] for row in node.rows], dtype=torch.int64)
        rows = torch.tensor(node.rows, dtype=torch.int64)
        nodes.append(NodePlan(rows, parts, _gather([list(node.block_ids)], shape, dtype, scratch)))
        for row in node.rows:
            num_parts[row] += 1
    return CpuPlan(
        find_format(shape.quantisation),
        functions.kv_rows(batch.slots, shape, _CPU),
        tuple(nodes),
        max(num_parts, default=1),
        tuple(_tail_plan(rows, batch.tails, shape, dtype, scratch) for rows in group_tails(batch.tails)),
        tuple(extends),
    )


def group_tails(tails: Sequence[Tail]) -> list[list[int]]:
    """Rows of about the same number of blocks, so that little is padded; a group costs a call, so a few are better.

    A group is no larger than `MAX_GROUP_BLOCKS`, longest times rows, so that its copy stays small.
    """
    order = sorted(range(len(tails)), key=lambda row: -len(tails[row].block_ids))
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        length = len(tails[row].block_ids)
        if not groups or length * 2 + 8 < longest or (len(groups[-1]) + 1) * longest > MAX_GROUP_BLOCKS:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [sorted(group) for group in groups]


def _causal_mask(extend: Extend, dtype: torch.dtype) -> torch.Tensor | None:
    """One pass over context and new tokens alike gives a row the same bits however its prompt was cut into chunks."""
    if extend.num_context_tokens == 0:
        return None
    mask = torch.full((extend.num_rows, extend.num_tokens), float("-inf"), dtype=dtype)
    return filled_up(mask.triu_(extend.num_context_tokens + 1)[None, None])


def filled_up(rows: torch.Tensor) -> torch.Tensor:
    """[..., num, size] with the last row repeated until there are `MIN_ROWS`."""
    missing = MIN_ROWS - rows.shape[-2]
    if missing <= 0:
        return rows
    return torch.cat((rows, rows[..., -1:, :].expand(*rows.shape[:-2], missing, rows.shape[-1])), dim=-2)


def _tail_plan(
    rows: list[int], tails: Sequence[Tail], shape: KVShape, dtype: torch.dtype, scratch: Scratch
) -> TailPlan:
    tables = [tails[row].block_ids for row in rows]
    lengths = torch.tensor([tails[row].num_tokens for row in rows], dtype=torch.int64)
    num_tokens = int(lengths.max())
    num_slots = max(len(table) for table in tables) * shape.block_size
    mask = None
    unused_rows = None
    if bool((lengths < num_tokens).any()):
        unused = torch.arange(num_slots) >= lengths[:, None]
        mask = torch.zeros(len(rows), 1, 1, num_tokens, dtype=dtype)
        mask.masked_fill_(unused[:, None, None, :num_tokens], float("-inf"))
        everywhere = unused[None, :, None, :].expand(2, -1, shape.num_kv_heads, -1)
        unused_rows = everywhere.reshape(-1).nonzero().squeeze(1)
    gather = _gather(tables, shape, dtype, scratch, unused_rows)
    own_rows = None if len(rows) == len(tails) else torch.tensor(rows, dtype=torch.int64)
    return TailPlan(own_rows, gather, num_tokens, mask)


def _gather(
    tables: Sequence[Sequence[int]],
    shape: KVShape,
    dtype: torch.dtype,
    scratch: Scratch,
    unused: torch.Tensor | None = None,
) -> Gather:
    table = functions.padded(tables, _CPU)
    num_slots = table.shape[1] * shape.block_size
    buffer = scratch.view((2, len(tables), shape.num_kv_heads, num_slots, shape.head_dim), dtype)
    return Gather(functions.block_rows(table, shape), buffer, unused, find_format(shape.quantisation))
