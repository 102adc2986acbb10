"""A decoder of random weights on the device: whole decode steps, eager and from a graph, and prompts."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.document import Document
from benchmarks.gpu_attention import decode_batch
from benchmarks.gpu_cache import BLOCK_SIZE, Cache
from benchmarks.gpu_device import Clock, Device
from benchmarks.gpu_failure import note
from benchmarks.gpu_work import DecodeCase, ModelShape, Sizes, decode_cases
from engine.decode_graphs import ROW_TOKENS, DecodeGraphs, GraphStep
from engine.models.decoder import Decoder
from engine.models.shard import WHOLE
from engine.models.weights import expected_shapes
from kernels.batch import AttentionBatch, DrawBatch, Extend, Int32Array
from kernels.triton.backend import TritonKernels
from kernels.triton.draw import draw


class RandomWeights:
    """In place of `engine.models.weights.Weights`: such shapes, and such sizes that activations keep theirs."""

    def __init__(self, device: Device, model: ModelShape) -> None:
        self.shard = WHOLE
        self._device = device
        self._shapes = expected_shapes(model)

    def tensor(self, name: str) -> torch.Tensor:
        weight = torch.empty(self._shapes[name], dtype=torch.bfloat16, device=self._device.device)
        if name.endswith("norm.weight"):
            return weight.fill_(1.0)
        return self._device.fill(weight, scale=1.0 if "embed" in name else weight.shape[-1] ** -0.5)

    def find(self, name: str) -> torch.Tensor | None:
        return self.tensor(name) if name in self._shapes else None


class Model:
    def __init__(self, device: Device, sizes: Sizes) -> None:
        self.device = device
        self.sizes = sizes
        self.shape = sizes.llama
        kernels = TritonKernels(device.device, self.shape.num_heads)
        num_positions = max(max(sizes.trunks) + sizes.own_tokens, sizes.prompt_tokens)
        weights: Any = RandomWeights(device, self.shape)
        config: Any = self.shape
        self.decoder = Decoder(config, weights, kernels, device.device, num_positions)


class DecodeSteps:
    """One case: from the newest tokens' ids to the next ones', the largest logit taken, as the engine's graphs do it
    and by the same launches one by one."""

    def __init__(self, model: Model, case: DecodeCase) -> None:
        self._model = model
        self._case = case
        num_blocks = (case.trunk_tokens + case.num_rows * (case.own_tokens + BLOCK_SIZE)) // BLOCK_SIZE
        self._cache = Cache(model.device, case.model, num_blocks)
        self._trunk = self._cache.blocks(case.trunk_tokens)
        self._own = [self._cache.blocks(case.own_tokens) for _ in range(case.num_rows)]
        self._ids = np.arange(case.num_rows, dtype=np.int32)
        self._greedy = _greedy(case.num_rows)

    def measure(self) -> Document:
        case, device = self._case, self._model.device
        graphs, flat_graphs = self._capture(ROW_TOKENS), self._capture((case.trunk_tokens + case.own_tokens,))
        start = time.perf_counter()
        step = self._write(graphs, self._ids, case.own_tokens)
        plan_ms = (time.perf_counter() - start) * 1000
        flat_step = self._write(flat_graphs, self._ids, case.own_tokens, is_grouped=False)
        eager = self._eager_step()
        expected = eager()[0].tolist()
        step.launch()
        is_equal = step.wait()[0] == expected
        calls = {"eager": eager, "graph": step.launch, "flat_graph": flat_step.launch}
        times = device.times(calls, seconds=0.6)
        decode_s = self._decode(graphs)
        steps = self._model.sizes.decode_steps
        return {
            "plan_ms": plan_ms,
            **{name: timing.document() for name, timing in times.items()},
            "graph_gives_the_eager_tokens": is_equal,
            "decode": {"steps": steps, "s": decode_s, "tok_s": case.num_rows * steps / decode_s},
        }

    def _capture(self, row_tokens: tuple[int, ...]) -> DecodeGraphs:
        case, model = self._case, self._model
        return DecodeGraphs(
            model.decoder,
            self._cache.kv,
            self._cache.shape,
            model.device.graph_capture(),
            row_counts=[case.num_rows],
            max_tokens=case.trunk_tokens + case.own_tokens,
            row_tokens=row_tokens,
        )

    def _batch(self, own_tokens: int, *, is_grouped: bool) -> AttentionBatch:
        return decode_batch(self._trunk, self._own, own_tokens, is_grouped=is_grouped)

    def _write(self, graphs: DecodeGraphs, ids: Int32Array, own_tokens: int, *, is_grouped: bool = True) -> GraphStep:
        step = graphs.try_write(
            ids, self._positions(own_tokens), self._batch(own_tokens, is_grouped=is_grouped), self._greedy
        )
        assert step is not None
        return step

    def _positions(self, own_tokens: int) -> Int32Array:
        return np.full(self._case.num_rows, self._case.trunk_tokens + own_tokens - 1, dtype=np.int32)

    def _eager_step(self) -> Callable[[], torch.Tensor]:
        case, decoder = self._case, self._model.decoder
        plan = decoder.plan(self._batch(case.own_tokens, is_grouped=True), self._cache.shape)
        positions = self._positions(case.own_tokens)

        def step() -> torch.Tensor:
            hidden = decoder.forward(self._ids, positions, self._cache.kv, plan, case.num_rows)
            return draw(decoder.logits(hidden), self._greedy)

        return step

    def _decode(self, graphs: DecodeGraphs) -> float:
        """Seconds of real steps up to the case's length, each planned anew and its tokens waited for, as they are what
        the next one reads."""
        case, device = self._case, self._model.device
        steps, ids = self._model.sizes.decode_steps, self._ids
        device.synchronize()
        start = time.perf_counter()
        for own_tokens in range(case.own_tokens - steps + 1, case.own_tokens + 1):
            step = self._write(graphs, ids, own_tokens)
            step.launch()
            ids = np.array(step.wait()[0], dtype=np.int32)
        return time.perf_counter() - start


def _greedy(num_rows: int) -> DrawBatch:
    zeros = np.zeros(num_rows, dtype=np.int64)
    return DrawBatch(
        temperatures=zeros.astype(np.float32),
        top_ks=zeros.astype(np.int32),
        top_ps=np.ones(num_rows),
        min_ps=np.zeros(num_rows),
        seeds=zeros,
        choices=zeros.astype(np.int32),
        positions=zeros,
    )


def measure_decode(model: Model, clock: Clock, found: Document) -> None:
    for case in decode_cases(model.sizes):
        clock.check()
        note(model.device, found, case.name, lambda c=case: DecodeSteps(model, c).measure())
        model.device.release()


def measure_prompts(model: Model, clock: Clock, found: Document) -> None:
    """Milliseconds from a prompt's ids on the host to its first token there; a median."""
    sizes, device = model.sizes, model.device
    cache = Cache(device, model.shape, sizes.prompt_tokens // BLOCK_SIZE + 1)
    blocks = cache.blocks(sizes.prompt_tokens)
    token_ids = np.random.default_rng(1).integers(model.shape.vocab_size, size=sizes.prompt_tokens, dtype=np.int32)
    chunk = sizes.chunk_tokens
    chunks = [chunk] * (sizes.prompt_tokens // chunk) + [sizes.prompt_tokens % chunk] * bool(
        sizes.prompt_tokens % chunk
    )
    cases = {
        "cold": (0, [sizes.prompt_tokens]),
        f"cold in chunks of {chunk}": (0, chunks),
        "hot": (sizes.prompt_tokens - sizes.hot_tokens, [sizes.hot_tokens]),
    }
    for name, (num_cached, lengths) in cases.items():
        clock.check()

        def first_token(num_cached: int = num_cached, lengths: list[int] = lengths) -> int:
            context, hidden = num_cached, None
            for num in lengths:
                rows = slice(context, context + num)
                slots = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(rows.start, rows.stop)]
                batch = AttentionBatch(slots, (), (), [Extend(num, context, blocks)])
                plan = model.decoder.plan(batch, cache.shape)
                positions = np.arange(rows.start, rows.stop, dtype=np.int32)
                hidden = model.decoder.forward(token_ids[rows], positions, cache.kv, plan, 0)
                context += num
            assert hidden is not None
            return int(model.decoder.logits(hidden[-1:]).argmax())

        # the hot one reads what the cold ones have written
        token = first_token()
        times = [device.wall_ms(first_token) for _ in range(sizes.prompt_rounds)]
        found[name] = {
            "chunks": lengths,
            "cached": num_cached,
            "ms": statistics.median(times),
            "token": token,
        }
