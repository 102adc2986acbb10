"""Attention of decode rows over one trunk: each row with its own copy of it, all with the same blocks, and grouped.

With the same blocks but without a node, rows of one moment find in the L2 what others of them have read: that is what
grouping has to be compared with. Of a model's layers so many are measured, one after the other, as fit the memory with
a copy for each row; the figures are those of all layers.
"""

from dataclasses import dataclass, replace

import torch

from benchmarks.document import Document
from benchmarks.gpu_cache import BLOCK_SIZE, Cache, exact_attention
from benchmarks.gpu_correctness import ATTENTION_TOLERANCE, compared
from benchmarks.gpu_device import Call, Clock, Device
from benchmarks.gpu_failure import note
from benchmarks.gpu_work import DecodeCase, ModelShape, Sizes, attention_cases
from kernels.batch import AttentionBatch, Node, Tail
from kernels.triton.backend import TritonKernels
from kernels.triton.tiles import Launch, Tiles, tiles_for

NODE_SIZES = tuple((tokens, readers) for tokens in (16, 64, 256, 1024, 4096) for readers in (2, 8, 32))
"""Tokens of a node and its readers."""


@dataclass(frozen=True, slots=True)
class Tables:
    """Of one case in one cache."""

    private: AttentionBatch
    shared: AttentionBatch
    grouped: AttentionBatch


def decode_batch(trunk: list[int], own: list[list[int]], own_tokens: int, *, is_grouped: bool) -> AttentionBatch:
    """The next token of each row, over `trunk` and `own_tokens` of its own blocks."""
    newest = own_tokens - 1
    slots = [ids[newest // BLOCK_SIZE] * BLOCK_SIZE + newest % BLOCK_SIZE for ids in own]
    if is_grouped:
        return AttentionBatch(slots, [Tail(ids, own_tokens) for ids in own], [Node(trunk, range(len(own)))])
    return AttentionBatch(slots, [Tail([*trunk, *ids], len(trunk) * BLOCK_SIZE + own_tokens) for ids in own])


def make_tables(cache: Cache, case: DecodeCase, *, with_copies: bool = True) -> Tables:
    assert case.trunk_tokens % BLOCK_SIZE == 0
    trunk = cache.blocks(case.trunk_tokens)
    own = [cache.blocks(case.own_tokens) for _ in range(case.num_rows)]
    shared = decode_batch(trunk, own, case.own_tokens, is_grouped=False)
    total = case.trunk_tokens + case.own_tokens
    copies = [Tail([*cache.blocks(case.trunk_tokens), *ids], total) for ids in own] if with_copies else shared.tails
    grouped = decode_batch(trunk, own, case.own_tokens, is_grouped=True)
    return Tables(private=AttentionBatch(shared.slots, copies), shared=shared, grouped=grouped)


def blocks_of(case: DecodeCase, *, with_copies: bool) -> int:
    """That `make_tables` takes."""
    trunks = 1 + case.num_rows * with_copies
    return trunks * case.trunk_tokens // BLOCK_SIZE + case.num_rows * -(-case.own_tokens // BLOCK_SIZE)


class AttentionTimes:
    def __init__(self, device: Device, sizes: Sizes) -> None:
        self._device = device
        self._sizes = sizes

    def measure(self, clock: Clock, found: Document) -> None:
        for case in attention_cases(self._sizes):
            clock.check()
            note(self._device, found, case.name, lambda c=case: self._case(c))
            self._device.release()

    def _case(self, case: DecodeCase) -> Document:
        model = case.model
        layer_bytes = blocks_of(case, with_copies=True) * BLOCK_SIZE * model.kv_bytes // model.num_layers
        num_layers = max(1, min(model.num_layers, self._sizes.private_bytes // layer_bytes))
        cache = Cache(self._device, model, blocks_of(case, with_copies=True), num_layers=num_layers)
        tables = make_tables(cache, case)
        kernels = TritonKernels(self._device.device, model.num_heads)
        q = self._device.random(case.num_rows, model.num_heads, model.head_dim)
        batches = {"private": tables.private, "shared": tables.shared, "grouped": tables.grouped}
        outs = {name: torch.empty_like(q) for name in batches}
        eager = {name: attention_call(kernels, cache, batch, q, outs[name]) for name, batch in batches.items()}
        self._device.warm_up(eager.values())
        calls = {name: self._device.capture(call) for name, call in eager.items()}
        times = self._device.times(calls, seconds=0.4)
        scale = model.num_layers / num_layers
        rows = [0, case.num_rows - 1]
        exact = []
        for row in rows:
            tail = tables.shared.tails[row]
            tokens = cache.tokens(tail.block_ids, tail.num_tokens, num_layers - 1)
            exact.append(exact_attention(q[row : row + 1], tokens, tail.num_tokens - 1))
        return {
            "layers_measured": num_layers,
            "flat_bytes": case.flat_bytes,
            "shared_bytes": case.shared_bytes,
            **{name: {"ms": timing.ms * scale, "spread": timing.spread} for name, timing in times.items()},
            "grouped_right": compared(outs["grouped"][rows], torch.cat(exact), *ATTENTION_TOLERANCE[torch.bfloat16]),
            "grouped_to_shared": (outs["grouped"].double() - outs["shared"].double()).abs().max().item(),
        }


def attention_call(
    kernels: TritonKernels, cache: Cache, batch: AttentionBatch, q: torch.Tensor, out: torch.Tensor
) -> Call:
    """Of all layers of the cache."""
    plan = kernels.plan(batch, cache.shape, cache.dtype)

    def call() -> None:
        for layer in cache.kv:
            kernels.decode_attention(q, layer, plan, out)

    return call


class NodeTimes:
    """What a node saves, or costs, by its size: the figures that the planner's rule is fitted to."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self._device = device
        self._sizes = sizes

    def measure(self, clock: Clock, found: Document) -> None:
        model = self._sizes.llama
        sizes = ((16, 2),) if self._device.is_dry else NODE_SIZES
        for tokens, readers in sizes:
            clock.check()
            note(self._device, found, f"{readers} x {tokens}", lambda t=tokens, r=readers: self._node(model, t, r))

    def _node(self, model: ModelShape, tokens: int, readers: int) -> Document:
        case = DecodeCase(model, tokens, readers, self._sizes.own_tokens)
        cache = Cache(self._device, model, blocks_of(case, with_copies=False))
        tables = make_tables(cache, case, with_copies=False)
        q = self._device.random(readers, model.num_heads, model.head_dim)
        return {
            "tokens": tokens,
            "readers": readers,
            "layers": model.num_layers,
            "saved_bytes": (readers - 1) * tokens * model.kv_bytes,
            **flat_and_grouped(self._device, TritonKernels(self._device.device, model.num_heads), cache, tables, q),
        }


def flat_and_grouped(device: Device, kernels: TritonKernels, cache: Cache, tables: Tables, q: torch.Tensor) -> Document:
    """Times of the same blocks without a node and with one."""
    batches = {"flat": tables.shared, "grouped": tables.grouped}
    eager = {name: attention_call(kernels, cache, batch, q, torch.empty_like(q)) for name, batch in batches.items()}
    device.warm_up(eager.values())
    times = device.times({name: device.capture(call) for name, call in eager.items()}, 0.15)
    return {name: timing.document() for name, timing in times.items()}


class TileTimes:
    """Other cuts of the same attention: which sizes of tiles a device wants."""

    def __init__(self, device: Device, sizes: Sizes) -> None:
        self._device = device
        self._sizes = sizes

    def measure(self, clock: Clock, found: Document) -> None:
        """Of the middle batch, over the long trunk."""
        model = self._sizes.llama
        case = DecodeCase(model, self._sizes.trunks[1], self._sizes.attention_rows[1], self._sizes.own_tokens)
        cache = Cache(self._device, model, blocks_of(case, with_copies=False))
        tables = make_tables(cache, case, with_copies=False)
        q = self._device.random(case.num_rows, model.num_heads, model.head_dim)
        for name, tiles in self._variants().items():
            clock.check()
            kernels = TritonKernels(self._device.device, model.num_heads, tiles)
            note(self._device, found, name, lambda k=kernels: flat_and_grouped(self._device, k, cache, tables, q))

    def _variants(self) -> dict[str, Tiles]:
        base = tiles_for(self._device.device)
        if self._device.is_dry:
            return {"as they are": base, "pieces of 64": replace(base, piece_tokens=64)}
        return {
            "as they are": base,
            "pieces of 512": replace(base, piece_tokens=512),
            "pieces of 1024": replace(base, piece_tokens=1024),
            "nodes of 128 rows, 8 warps": replace(base, max_node_rows=128, nodes=Launch(8, 2)),
            "nodes with 3 stages": replace(base, nodes=Launch(4, 3)),
            "nodes of 128 rows, 8 warps, pieces of 1024": replace(
                base, max_node_rows=128, nodes=Launch(8, 3), piece_tokens=1024
            ),
            "tails with 3 stages": replace(base, tails=Launch(4, 3)),
            "tails of 2 warps": replace(base, tails=Launch(2, 3)),
            "tiles of 128 tokens": replace(base, tile_tokens=128, tails=Launch(4, 2), nodes=Launch(8, 2)),
            "merge of 8 heads, 4 warps": replace(base, merge_heads=8, merge=Launch(4, 1)),
        }
