"""The operations of a decoder step, and which backend does them.

`Kernels` are the operations one by one; `DecodeStep` is all of them as one whole, which a backend may have beside or
instead. Moves of blocks (copy-on-write, swaps) are `kernels.blocks`, or what a backend has in its place. What the
docstrings say of shapes, dtypes and layouts is asserted by `kernels.checked`.

Tensors: x [rows, features], the decode rows first, then those of the extends; dtype that of the weights unless it is
named. A layer's cache: kv [2 (K, V), num_blocks, num_kv_heads, block_size, head_dim] in that dtype, or, if the shape
has a quantisation, uint8 [2, num_blocks, num_kv_heads, block_bytes] as `kernels.kv_format` lays it out; contiguous.
Query head h reads KV head h // (num_heads / num_kv_heads). Log-sum-exps are fp32, natural, [rows, heads, parts].
"""

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from kernels.batch import AttentionBatch, DrawBatch, Int32Array, KVShape
from kernels.cpu.backend import CpuKernels
from kernels.cpu.build import ElementType, Isa, NativeUnavailable, ensure_library, usable_isa
from kernels.cpu.native import NativeLibrary
from kernels.cpu.self_test import flash_attention_works, packed_linear_works
from kernels.fixed_step import FixedStep, StepLimits
from kernels.reference.backend import ReferenceKernels

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """A backend. `Any` stands for what a backend makes for itself: packed weights, the plan of a step."""

    name: str

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """weight [out, in], bias [out]; what comes back is given to `linear` and owns its memory."""

    def linear(self, x: torch.Tensor, packed: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias + residual; x [rows, in], residual and result [rows, out]."""

    def linear_and_norm(
        self, x: torch.Tensor, packed: Any, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`linear` with a residual, and the RMSNorm of that: two of [rows, out]; weight [out]."""

    def swiglu(self, x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
        """silu(x gate^T) * (x up^T); x [rows, in], result [rows, out]."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., size], weight [size]; over the last dimension, in fp32, back in x's dtype. Of two dimensions, or of
        three, x[0] is contiguous."""

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> Any:
        """Index tensors of a step, made once and used by every layer. dtype is that of weights and rows; the
        cache's too unless the shape has a quantisation. No slot comes twice."""

    def fixed_step(self, limits: StepLimits, shape: KVShape, dtype: torch.dtype, vocab_size: int) -> FixedStep | None:
        """Memory for decode steps whose launches are to be captured. None: this backend's cannot be. Make the largest
        first: memory that all of them share is as large as it gets then."""

    def rope_and_write_kv(
        self, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, kv: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        """Rotates q and K, and writes K and V to the slots of their rows, quantised if the cache is: after they were
        rounded to the rows' dtype, so that the bytes are those of `kernels.kv_format` for what would have been written.

        heads [rows, num_heads + 2 * num_kv_heads, head_dim], contiguous: q, K, V; its contents are undefined
        afterwards. Tables fp32 [rows, 1, head_dim] as engine.models.rope makes them, the first half of the sines
        negated. Returns the rotated q, [rows, num_heads, head_dim], each row contiguous.
        """

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        """q and out: the decode rows, [num_decodes, num_heads, head_dim], out contiguous. Nodes are read once for all
        their rows and merged with the tails by log-sum-exp. Unused slots may hold anything, NaN included. A quantised
        value is value * scale in fp32, which may be rounded to the rows' dtype where that is what products take."""

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        """q and out: the rows of the extends, as above. The step's K and V are written already."""

    def merge(self, values: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over parts of the tokens to attention over all of them.

        values fp32 [rows, heads, parts, head_dim], lse [rows, heads, parts]; a part whose lse is -inf counts nothing,
        whatever its values hold. Returns [rows, heads, head_dim] and [rows, heads]; zeros and -inf where no part
        counts.
        """


class DecodeStep(Protocol):
    """The whole step, from token ids to logits, over weights that the backend packed for itself."""

    @property
    def backend(self) -> str:
        """Which one it is, and in which version: another text may take another time."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and of a cache that is not quantised."""

    def plan(self, batch: AttentionBatch, shape: KVShape) -> Any:
        """What `forward` takes as its plan; shape is that of one layer's cache."""

    def forward(
        self, token_ids: Int32Array, positions: Int32Array, kv: torch.Tensor, plan: Any, num_decodes: int
    ) -> torch.Tensor:
        """Writes K and V of the rows and returns the residual stream, [rows, hidden], before the last norm; valid until
        the next step.

        token_ids, positions: [rows], the decode rows first. kv [num_layers, 2, num_blocks, num_kv_heads,
        block_size, head_dim], contiguous, or what a quantised one has in place of the last two.
        """

    def decode_attention(self, layer: int, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        """Of decode rows alone. q, out [rows, num_heads, head_dim], kv as for `forward`, K and V written already."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: rows of what `forward` returned. fp32 [rows, vocab_size], valid until the next call."""


class BlockMoves(Protocol):
    """The module `kernels.blocks`, which says what these do, or another one with the same functions."""

    def copy_blocks(self, kv: torch.Tensor, sources: Sequence[int], targets: Sequence[int]) -> None: ...

    def gather_blocks(
        self, kv: torch.Tensor, block_ids: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor: ...

    def scatter_blocks(self, kv: torch.Tensor, block_ids: torch.Tensor, blocks: torch.Tensor) -> None: ...


class TokenDraw(Protocol):
    def __call__(self, logits: torch.Tensor, batch: DrawBatch) -> torch.Tensor:
        """logits fp32 [rows, vocab_size]. int64 [2, rows]: ids, and 1, or 0 where the largest logit is not finite and
        the id says nothing. By the rules of `engine.cpu_draw`."""


class TritonUnavailable(Exception):
    """Says why in half a sentence."""


def select_kernels(device: torch.device, dtype: torch.dtype, num_heads: int) -> Kernels:
    """The fastest backend that passes its self-tests here."""
    if device.type != "cpu":
        try:
            return make_triton_kernels(device, num_heads)
        except TritonUnavailable as e:
            _log.warning("plain torch is used instead of the triton kernels, slowly: %s", e)
            return ReferenceKernels(device)
    if not flash_attention_works(dtype):
        _log.warning("torch's flash attention for CPUs fails its self-test in %s: plain torch is used, slowly", dtype)
        return ReferenceKernels(device)
    packs = packed_linear_works(dtype)
    if not packs:
        _log.warning("oneDNN's packed linear fails its self-test in %s: unpacked weights are used", dtype)
    return CpuKernels(packs_linears=packs)


def make_triton_kernels(device: torch.device, num_heads: int) -> Kernels:
    """For a model of `num_heads` query heads. Raises TritonUnavailable without triton, and on a device that it does not
    compute on, which is a CPU unless TRITON_INTERPRET=1 was set before triton was imported."""
    if find_spec("triton") is None:
        raise TritonUnavailable("the package triton is not installed; GPU builds of torch bring it along")
    # an engine on a CPU never loads it
    from kernels.triton.arithmetic import INTERPRETED
    from kernels.triton.backend import TritonKernels

    if device.type != ("cpu" if INTERPRETED else "cuda"):
        how = "interpreted on device cpu" if INTERPRETED else "compiled for device cuda"
        hint = "" if INTERPRETED else " (without a GPU they can be checked on a cpu, under TRITON_INTERPRET=1)"
        raise TritonUnavailable(f"they are {how}, and the device is {device.type}{hint}")
    return TritonKernels(device, num_heads)


_ELEMENT_TYPES: dict[torch.dtype, ElementType] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}
_TIMES_AS_LONG: dict[ElementType, dict[Isa, str]] = {
    "bfloat16": {"amx_bf16": "", "avx512_bf16": "1 to 3.5", "avx512": "1 to 3.5", "avx2": "1.3 to 7"},
    "float32": {"avx512": "", "avx2": "1.3 to 2.2"},
}
"""Best first: how many times as long a step of 1 to 32 rows takes as with the best."""


def find_native_library(
    dtype: torch.dtype, cache_dir: Path, max_isa: Isa | Literal["none"] | None = None
) -> NativeLibrary | None:
    """The decoder in C++ for this machine (`kernels.cpu.native`), compiled if it has not been yet, which takes seconds.

    One warning where it cannot be had (None then), is not wanted, or has to do with less than the best instructions;
    and without a word None for a dtype that it does not know.
    """
    element_type = _ELEMENT_TYPES.get(dtype)
    if element_type is None:
        return None
    try:
        if max_isa == "none":
            raise NativeUnavailable("max_isa is none")
        library = ensure_library(element_type, cache_dir, max_isa)
    except NativeUnavailable as e:
        _log.warning("the C++ decoder is not used, torch's operators are, two to four times slower: %s", e)
        return None
    isa, best_here = usable_isa(max_isa, element_type), usable_isa(None, element_type)
    best, *_ = times_as_long = _TIMES_AS_LONG[element_type]
    if isa is not None and isa != best:
        why = "the best that this processor has" if isa == best_here else "as max_isa says"
        times = times_as_long[isa]
        _log.warning("the C++ decoder uses %s, %s: steps take %s times as long as with %s", isa, why, times, best)
    return library
