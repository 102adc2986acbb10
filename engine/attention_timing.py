"""What shared nodes save here: measured with the model's own attention at the first start, and kept for later ones."""

import hashlib
import logging
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from engine.config import ModelConfig
from engine.shared_attention import NodeCost, NodeTiming, fit_cost
from kernels.batch import AttentionBatch, KVShape, Node, Tail
from kernels.cpu.build import cpu_flags
from kernels.interface import DecodeStep
from kernels.kv_format import find_format, layer_sizes

log = logging.getLogger(__name__)

SIZES = [(1, tokens, readers) for tokens in (16, 64, 192, 512) for readers in (2, 8, 32)] + [(8, 64, 4)]
"""Nodes, tokens of each (filled up to whole blocks), readers of each. Short ones tell what a node costs at all."""
OWN_TOKENS = 40
"""Of each row's tail."""
BUDGET_S = 0.5
MAX_LAYERS = 4
"""In turn, so that not all of K and V is in the nearest cache."""


def ensure_node_cost(decoder: DecodeStep, config: ModelConfig, kv_shape: KVShape, folder: Path) -> NodeCost:
    """What was measured when this machine first computed such attention. A file that is of no use costs a warning."""
    path = folder / f"node-cost-{_digest(decoder, config, kv_shape)}.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=NodeCost)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, msgspec.MsgspecError) as e:
        log.warning("%s is measured again: %s", path, e)
    cost = fit_cost(measure_nodes(decoder, config, kv_shape))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
        unfinished.write_bytes(msgspec.json.encode(cost))
        os.replace(unfinished, path)
    except OSError as e:
        log.warning("what shared nodes save cannot be kept, each start measures it: %s", e)
    return cost


def _digest(decoder: DecodeStep, config: ModelConfig, kv_shape: KVShape) -> str:
    """Of all that decides what is measured."""
    heads = (config.num_heads, config.num_kv_heads, config.head_dim, kv_shape.block_size, kv_shape.quantisation)
    facts = (decoder.backend, str(decoder.dtype), torch.get_num_threads(), heads, SIZES, sorted(cpu_flags()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:20]


def measure_nodes(decoder: DecodeStep, config: ModelConfig, kv_shape: KVShape) -> list[NodeTiming]:
    """For one layer. Nodes and flat in turn, as often as a size's share of the time allows.

    Processor time, and the least of each: on a busy machine the clock measures the others.
    """
    bench = _Bench(decoder, config, kv_shape)
    timings = []
    for num_nodes, wanted_tokens, num_readers in SIZES:
        size = num_nodes, -(-wanted_tokens // kv_shape.block_size) * kv_shape.block_size, num_readers
        attends = bench.prepare(*size, with_nodes=True), bench.prepare(*size, with_nodes=False)
        for attend in attends:  # the first time of each is no measure: memory is taken, caches are filled
            attend()
        least_s = [math.inf, math.inf]
        end = time.perf_counter() + BUDGET_S / len(SIZES)
        while math.isinf(least_s[0]) or time.perf_counter() < end:
            for i, attend in enumerate(attends):
                start = time.process_time()
                attend()
                least_s[i] = min(least_s[i], (time.process_time() - start) / bench.num_layers)
        timings.append(NodeTiming(*size, *least_s))
    return timings


class _Bench:
    """K and V of a few layers, with random contents: pages that were never written are all one page."""

    @torch.inference_mode()
    def __init__(self, decoder: DecodeStep, config: ModelConfig, kv_shape: KVShape) -> None:
        self._decoder = decoder
        self._first_own = 1 + max(nodes * tokens for nodes, tokens, _ in SIZES) // kv_shape.block_size
        self._own_blocks = -(-OWN_TOKENS // kv_shape.block_size)
        num_rows = max(nodes * readers for nodes, _, readers in SIZES)
        self._shape = replace(kv_shape, num_blocks=self._first_own + num_rows * self._own_blocks)
        self.num_layers = min(config.num_layers, MAX_LAYERS)
        sizes = (self.num_layers, *layer_sizes(replace(self._shape, quantisation=None)))
        generator = torch.Generator().manual_seed(0)
        plain, quantised = torch.randn(sizes, generator=generator).to(decoder.dtype), find_format(kv_shape.quantisation)
        self._kv = plain if quantised is None else quantised.pack(plain)
        q_sizes = (num_rows, config.num_heads, kv_shape.head_dim)
        self._q = torch.randn(q_sizes, generator=generator).to(decoder.dtype)
        self._out = torch.empty_like(self._q)

    def prepare(self, num_nodes: int, num_tokens: int, num_readers: int, *, with_nodes: bool) -> Callable[[], None]:
        """What computes the attention of all layers."""
        size = self._shape.block_size
        num_rows, num_blocks = num_nodes * num_readers, num_tokens // size
        nodes, tails = [], []
        for node in range(num_nodes):
            shared = range(1 + node * num_blocks, 1 + (node + 1) * num_blocks)
            rows = range(node * num_readers, (node + 1) * num_readers)
            nodes.append(Node(shared, rows))
            for row in rows:
                own = range(self._first_own + row * self._own_blocks, self._first_own + (row + 1) * self._own_blocks)
                tails.append(Tail(own, OWN_TOKENS) if with_nodes else Tail([*shared, *own], num_tokens + OWN_TOKENS))
        slots = [(tail.block_ids[-1]) * size for tail in tails]
        plan = self._decoder.plan(AttentionBatch(slots, tails, nodes if with_nodes else []), self._shape)

        @torch.inference_mode()
        def attend() -> None:
            for layer in range(self.num_layers):
                self._decoder.decode_attention(layer, self._q[:num_rows], self._kv, plan, self._out[:num_rows])

        return attend
