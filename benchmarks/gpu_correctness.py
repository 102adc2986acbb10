"""Every Triton kernel at the shapes of real models, on the device, against float64; unused slots hold NaN.

Also what an interpreter cannot tell: that a kernel gives the same bits twice, and a row the same in any company.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from benchmarks.document import Document
from benchmarks.gpu_cache import BLOCK_SIZE, Cache, exact_attention
from benchmarks.gpu_device import Clock, Device
from benchmarks.gpu_failure import note
from benchmarks.gpu_work import ModelShape, Sizes
from engine.models.rope import rope_table
from kernels.batch import AttentionBatch, Extend, Node, Tail
from kernels.triton import blocks
from kernels.triton.backend import TritonKernels

ATTENTION_TOLERANCE = {torch.float32: (1e-5, 5e-6), torch.float16: (2e-3, 1e-3), torch.bfloat16: (1.6e-2, 5e-3)}
"""The largest difference, values being of unit variance; and the norm of all differences to that of the result."""
OTHER_TOLERANCE = {torch.float32: (1e-4, 5e-6), torch.float16: (4e-3, 1e-3), torch.bfloat16: (3.2e-2, 5e-3)}
"""Likewise; of what may be several times as large as 1."""
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
Check = Callable[[], Document]


class Correctness:
    def __init__(self, device: Device, sizes: Sizes) -> None:
        self._device = device
        self._sizes = sizes
        self._lengths = (
            [1, 17, 33] if device.is_dry else [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 511, 1000, 4097]
        )
        self._extends = [(0, 5), (17, 3)] if device.is_dry else [(0, 1), (0, 257), (16, 16), (37, 5), (2048, 64)]
        self._node_blocks, self._num_readers = (1, 3) if device.is_dry else (70, 24)

    def measure(self, clock: Clock, found: Document) -> None:
        """Everything that was checked comes into `found`, by name; what could not be has its traceback there."""
        for name, check in self._checks():
            clock.check()
            note(self._device, found, name, check)

    def _checks(self) -> Iterator[tuple[str, Check]]:
        llama, qwen = self._sizes.llama, self._sizes.qwen
        yield "merge", lambda: self.merge(llama)
        yield "moves of blocks", lambda: self.moves(llama)
        # fp32 comes last: nobody serves in it, and it takes longest to compile
        cases = [(llama, torch.bfloat16), (qwen, torch.bfloat16), (qwen, torch.float16), (llama, torch.float32)]
        for model, dtype in cases[:1] if self._device.is_dry else cases:
            where = f"{model.name} {NAMES[dtype]}"
            yield f"tails, {where}", lambda m=model, d=dtype: self.tails(m, d)
            yield f"nodes, {where}", lambda m=model, d=dtype: self.nodes(m, d)
            yield f"extends, {where}", lambda m=model, d=dtype: self.extends(m, d)
            if dtype != torch.bfloat16:
                continue
            yield f"rotation and write, {where}", lambda m=model, d=dtype: self.rotation(m, d)
            yield f"norms, {where}", lambda m=model, d=dtype: self.norms(m, d)
            yield f"swiglu, {where}", lambda m=model, d=dtype: self.swiglu(m, d)

    def tails(self, model: ModelShape, dtype: torch.dtype) -> Document:
        """Rows of any length; each alone gives the bits that it has in company."""
        lengths = self._lengths
        cache = self._cache(model, dtype, sum(lengths) // BLOCK_SIZE + 2 * len(lengths))
        tails = [Tail(cache.blocks(num), num) for num in lengths]
        q = self._device.random(len(tails), model.num_heads, model.head_dim, dtype=dtype)
        expected = torch.cat([self._exact_row(q, cache, row, tail) for row, tail in enumerate(tails)])
        kernels = TritonKernels(self._device.device, model.num_heads)
        batch = AttentionBatch(range(len(tails)), tails)
        out, again = self._decode(kernels, q, cache, batch), self._decode(kernels, q, cache, batch)
        alone = [self._decode(kernels, q[i : i + 1], cache, AttentionBatch([0], [t])) for i, t in enumerate(tails)]
        return {
            **compared(out, expected, *ATTENTION_TOLERANCE[dtype]),
            "same_bits_twice": torch.equal(out, again),
            "same_bits_alone": torch.equal(out, torch.cat(alone)),
        }

    def nodes(self, model: ModelShape, dtype: torch.dtype) -> Document:
        """A trunk of all, two documents behind it, tails; the same as without nodes, and in other company."""
        num = self._num_readers
        cache = self._cache(model, dtype, 2 * self._node_blocks + 3 * num + 8)
        trunk = cache.blocks(self._node_blocks * BLOCK_SIZE)
        documents = [cache.blocks(2 * BLOCK_SIZE), cache.blocks(3 * BLOCK_SIZE)]
        rows = [range(0, num, 2), range(1, num, 2)]
        tails = [Tail(cache.blocks(1 + i % 20), 1 + i % 20) for i in range(num)]
        nodes = [Node(trunk, range(num)), *(Node(ids, r) for ids, r in zip(documents, rows, strict=True))]
        whole = []
        for i, tail in enumerate(tails):
            shared = [*trunk, *documents[i % 2]]
            whole.append(Tail([*shared, *tail.block_ids], len(shared) * BLOCK_SIZE + tail.num_tokens))
        q = self._device.random(num, model.num_heads, model.head_dim, dtype=dtype)
        kernels = TritonKernels(self._device.device, model.num_heads)
        grouped = AttentionBatch(range(num), tails, nodes)
        out, again = self._decode(kernels, q, cache, grouped), self._decode(kernels, q, cache, grouped)
        flat = self._decode(kernels, q, cache, AttentionBatch(range(num), whole))
        pair = AttentionBatch(
            [0, 1], tails[:2], [Node(trunk, [0, 1]), Node(documents[0], [0]), Node(documents[1], [1])]
        )
        few = self._decode(kernels, q[:2], cache, pair)
        expected = torch.cat([self._exact_row(q, cache, row, tail) for row, tail in enumerate(whole)])
        return {
            **compared(out, expected, *ATTENTION_TOLERANCE[dtype]),
            "same_bits_twice": torch.equal(out, again),
            "bits_in_other_company": "same" if torch.equal(out[:2], few) else "different",
            "largest_difference_to_flat": (out.double() - flat.double()).abs().max().item(),
        }

    def extends(self, model: ModelShape, dtype: torch.dtype) -> Document:
        """And the last one in two pieces: the same rows."""
        cache = self._cache(model, dtype, sum(sum(e) // BLOCK_SIZE + 1 for e in self._extends))
        extends = [Extend(new, context, cache.blocks(context + new)) for context, new in self._extends]
        num = sum(extend.num_rows for extend in extends)
        q = self._device.random(num, model.num_heads, model.head_dim, dtype=dtype)
        expected = []
        first = 0
        for extend in extends:
            rows = q[first : first + extend.num_rows]
            tokens = cache.tokens(extend.block_ids, extend.num_tokens)
            expected.append(exact_attention(rows, tokens, extend.num_context_tokens))
            first += extend.num_rows
        kernels = TritonKernels(self._device.device, model.num_heads)
        out, again = self._extend(kernels, q, cache, extends), self._extend(kernels, q, cache, extends)
        last = extends[-1]
        half = last.num_rows // 2
        pieces = [
            Extend(half, last.num_context_tokens, last.block_ids),
            Extend(last.num_rows - half, last.num_context_tokens + half, last.block_ids),
        ]
        chunked = self._extend(kernels, q[-last.num_rows :], cache, pieces)
        return {
            **compared(out, torch.cat(expected), *ATTENTION_TOLERANCE[dtype]),
            "same_bits_twice": torch.equal(out, again),
            "largest_difference_in_pieces": (out[-last.num_rows :].double() - chunked.double()).abs().max().item(),
        }

    def rotation(self, model: ModelShape, dtype: torch.dtype) -> Document:
        """V is copied, and nothing but the slots of the rows is written."""
        heads, kv_heads, half = model.num_heads, model.num_kv_heads, model.head_dim // 2
        num = 5 if self._device.is_dry else 130
        cache = self._cache(model, dtype, num)
        slots = [BLOCK_SIZE * (1 + i) + (7 * i) % BLOCK_SIZE for i in range(num)]
        given = self._device.random(num, heads + 2 * kv_heads, model.head_dim, dtype=dtype)
        tables = [table.to(self._device.device) for table in rope_table(model.rope, model.head_dim, num)]
        cosines, sines = (table.flip(0).unsqueeze(1) for table in tables)
        wide = given.double()
        exact = wide * cosines.double() + wide.roll(half, -1) * sines.double()
        kernels = TritonKernels(self._device.device, heads)
        plan = kernels.plan(AttentionBatch(slots, (), (), [Extend(num, 0, [1])]), cache.shape, dtype)
        kv = cache.kv[0]
        q = kernels.rope_and_write_kv(given.clone(), cosines, sines, kv, plan)
        where = torch.tensor(slots, device=self._device.device)
        keys, values = kv[:, where // BLOCK_SIZE, :, where % BLOCK_SIZE].unbind(1)
        is_elsewhere = kv.isnan().all(-1).all(2).sum().item() == 2 * (cache.shape.num_blocks * BLOCK_SIZE - num)
        found = compared(torch.cat((q, keys), 1), exact[:, : heads + kv_heads], *OTHER_TOLERANCE[dtype])
        is_copied = torch.equal(values, given[:, heads + kv_heads :])
        return {**found, "values_equal": is_copied, "nothing_else_written": is_elsewhere}

    def norms(self, model: ModelShape, dtype: torch.dtype) -> Document:
        """Alone, and behind a product with its residual."""
        num = 3 if self._device.is_dry else 130
        hidden = model.hidden_size
        x, residual = (self._device.random(num, hidden, dtype=dtype) for _ in range(2))
        weight = self._device.random(hidden, dtype=dtype)
        square = self._device.random(hidden, hidden, dtype=dtype, scale=hidden**-0.5)
        kernels = TritonKernels(self._device.device, model.num_heads)
        normed = kernels.rms_norm(x, weight, 1e-5)
        summed, behind = kernels.linear_and_norm(x, kernels.pack_linear(square), residual, weight, 1e-5)
        exact_sum = x.double() @ square.double().T + residual.double()
        got, exact = torch.cat((normed, behind)), torch.cat((_norm(x, weight), _norm(summed, weight)))
        largest, relative = OTHER_TOLERANCE[dtype]
        sums = compared(summed, exact_sum, 2 * largest, 2 * relative)
        return {**compared(got, exact, largest, relative), "sum": sums}

    def swiglu(self, model: ModelShape, dtype: torch.dtype) -> Document:
        num, size = (3, 16) if self._device.is_dry else (130, 256)
        x = self._device.random(num, size, dtype=dtype)
        gate, up = (self._device.random(model.intermediate_size, size, dtype=dtype, scale=size**-0.5) for _ in range(2))
        kernels = TritonKernels(self._device.device, model.num_heads)
        # of the products as they are rounded: those are torch's
        exact = F.silu(F.linear(x, gate).double()) * F.linear(x, up).double()
        got = kernels.swiglu(x, kernels.pack_linear(gate), kernels.pack_linear(up))
        return compared(got, exact, *OTHER_TOLERANCE[dtype])

    def merge(self, model: ModelShape) -> Document:
        """Of rows some parts of which are empty and hold NaN, and of the last row all."""
        rows, heads, parts = (3, 2, 4) if self._device.is_dry else (130, model.num_heads, 33)
        values = self._device.random(rows, heads, parts, model.head_dim, dtype=torch.float32)
        lse = self._device.random(rows, heads, parts, dtype=torch.float32, scale=2.0)
        is_empty = self._device.random(rows, heads, parts, dtype=torch.float32) < -0.5
        is_empty[:-1, :, -1], is_empty[-1] = False, True
        lse[is_empty], values[is_empty] = -math.inf, math.nan
        weights = lse[:-1].double().softmax(-1).unsqueeze(-1)
        exact = (weights * values[:-1].nan_to_num().double()).sum(-2)
        kernels = TritonKernels(self._device.device, heads)
        merged, merged_lse = kernels.merge(values, lse)
        sums = compared(merged_lse[:-1], lse[:-1].double().logsumexp(-1), 1e-5, 1e-6)
        is_nothing = bool((merged[-1] == 0).all() and (merged_lse[-1] == -math.inf).all())
        return {**compared(merged[:-1], exact, 1e-5, 1e-6), "lse": sums, "empty_is_nothing": is_nothing}

    def moves(self, model: ModelShape) -> Document:
        """Exact; a block may be source and target at once."""
        cache = Cache(self._device, model, 8, is_poisoned=False)
        before = cache.kv.clone()
        blocks.copy_blocks(cache.kv, [1, 2], [2, 5])
        expected = before.clone()
        expected[:, :, [2, 5]] = before[:, :, [1, 2]]
        is_copied = torch.equal(cache.kv, expected)
        blocks.copy_blocks(cache.kv, [3], [4])
        expected[:, :, 4] = expected[:, :, 3]
        is_copied &= torch.equal(cache.kv, expected)
        ids = torch.tensor([7, 1, 4], device=self._device.device)
        gathered = blocks.gather_blocks(cache.kv, ids)
        is_gathered = torch.equal(gathered, expected[:, :, ids])
        cache.kv[:, :, ids] = 0
        blocks.scatter_blocks(cache.kv, ids, gathered)
        is_scattered = torch.equal(cache.kv, expected)
        holds = is_copied and is_gathered and is_scattered
        return {"holds": holds, "copied": is_copied, "gathered": is_gathered, "scattered": is_scattered}

    def _cache(self, model: ModelShape, dtype: torch.dtype, num_blocks: int) -> Cache:
        return Cache(self._device, model, num_blocks, num_layers=1, dtype=dtype, is_poisoned=True)

    def _exact_row(self, q: torch.Tensor, cache: Cache, row: int, tail: Tail) -> torch.Tensor:
        tokens = cache.tokens(tail.block_ids, tail.num_tokens)
        return exact_attention(q[row : row + 1], tokens, tail.num_tokens - 1)

    def _decode(self, kernels: TritonKernels, q: torch.Tensor, cache: Cache, batch: AttentionBatch) -> torch.Tensor:
        out = torch.full_like(q, math.nan)
        kernels.decode_attention(q, cache.kv[0], kernels.plan(batch, cache.shape, cache.dtype), out)
        return out

    def _extend(self, kernels: TritonKernels, q: torch.Tensor, cache: Cache, extends: list[Extend]) -> torch.Tensor:
        out = torch.full_like(q, math.nan)
        plan = kernels.plan(AttentionBatch(range(len(q)), (), (), extends), cache.shape, cache.dtype)
        kernels.extend_attention(q, cache.kv[0], plan, out)
        return out


def _norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def compared(got: torch.Tensor, expected: torch.Tensor, largest: float, relative: float) -> Document:
    """The largest difference, where the result is above 1 as a share of it, and the norm of all; NaN never holds."""
    difference = got.double() - expected
    found_largest = (difference.abs() / expected.abs().clamp(min=1.0)).max().item()
    found_relative = (difference.norm() / expected.norm()).item()
    return {
        "holds": found_largest <= largest and found_relative <= relative,
        "largest": found_largest,
        "relative": found_relative,
        "allowed": [largest, relative],
    }
