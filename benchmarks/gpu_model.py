"""A decoder of random weights on the device: whole decode steps, eager and from a graph, and prompts."""

import statistics
import time
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.document import Document
from benchmarks.gpu_attention import decode_batch
from benchmarks.gpu_cache import BLOCK_SIZE, Cache
from benchmarks.gpu_device import Clock, Device
from benchmarks.gpu_failure import note
from benchmarks.gpu_work import DecodeCase, ModelShape, Sizes, decode_cases
from engine.models.decoder import Decoder
from engine.models.shard import WHOLE
from engine.models.weights import expected_shapes
from kernels.batch import AttentionBatch, Extend
from kernels.triton.backend import TritonKernels


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

    def numbers(self, values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device.device)


class DecodeSteps:
    """One case: from the newest tokens' ids to the next ones', the largest logit taken."""

    def __init__(self, model: Model, case: DecodeCase) -> None:
        self._model = model
        self._case = case
        num_blocks = (case.trunk_tokens + case.num_rows * (case.own_tokens + BLOCK_SIZE)) // BLOCK_SIZE
        self._cache = Cache(model.device, case.model, num_blocks)
        self._trunk = self._cache.blocks(case.trunk_tokens)
        self._own = [self._cache.blocks(case.own_tokens) for _ in range(case.num_rows)]
        self._ids = model.numbers(range(case.num_rows))
        self._positions = model.numbers([case.trunk_tokens + case.own_tokens - 1] * case.num_rows)

    def measure(self) -> Document:
        case, device = self._case, self._model.device
        start = time.perf_counter()
        plan = self._plan(case.own_tokens, is_grouped=True)
        plan_ms = (time.perf_counter() - start) * 1000
        flat_plan = self._plan(case.own_tokens, is_grouped=False)
        drawn = torch.empty_like(self._ids)
        eager, flat = (lambda p=p: self._step(p, drawn) for p in (plan, flat_plan))
        flat()
        eager()
        expected = drawn.clone()
        graph, flat_graph = device.capture(eager), device.capture(flat)
        drawn.zero_()
        graph()
        is_equal = torch.equal(drawn, expected)
        calls = {"eager": eager, "graph": graph, "flat_graph": flat_graph}
        times = device.times(calls, seconds=0.6)
        decode_s = self._decode(plan, drawn, graph)
        steps = self._model.sizes.decode_steps
        return {
            "plan_ms": plan_ms,
            **{name: timing.document() for name, timing in times.items()},
            "graph_gives_the_eager_tokens": is_equal,
            "decode": {"steps": steps, "s": decode_s, "tok_s": case.num_rows * steps / decode_s},
        }

    def _plan(self, own_tokens: int, *, is_grouped: bool) -> Any:
        batch = decode_batch(self._trunk, self._own, own_tokens, is_grouped=is_grouped)
        return self._model.decoder.plan(batch, self._cache.shape)

    def _step(self, plan: Any, drawn: torch.Tensor) -> None:
        decoder, num_rows = self._model.decoder, self._case.num_rows
        hidden = decoder.forward_on_device(self._ids, self._positions, self._cache.kv, plan, num_rows)
        torch.argmax(decoder.logits(hidden), -1, out=drawn)

    def _decode(self, plan: Any, drawn: torch.Tensor, graph: Any) -> float:
        """Seconds of real steps up to the case's length, each planned anew, its numbers brought to where the graph
        reads them; no token is waited for."""
        case, device = self._case, self._model.device
        steps = self._model.sizes.decode_steps
        device.synchronize()
        start = time.perf_counter()
        for own_tokens in range(case.own_tokens - steps + 1, case.own_tokens + 1):
            refresh(plan, self._plan(own_tokens, is_grouped=True))
            self._positions.fill_(case.trunk_tokens + own_tokens - 1)
            graph()
            self._ids.copy_(drawn)
        device.synchronize()
        return time.perf_counter() - start


def refresh(plan: Any, fresh: Any) -> None:
    """A captured plan gets the numbers of another one of the same sizes."""
    for each in fields(plan):
        old, new = getattr(plan, each.name), getattr(fresh, each.name)
        if isinstance(old, torch.Tensor):
            assert old.shape == new.shape, f"{each.name}: expected {tuple(old.shape)}, got {tuple(new.shape)}"
            old.copy_(new)
        elif is_dataclass(old):
            refresh(old, new)
        else:
            assert old == new, f"{each.name}: expected {old}, got {new}"


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
