"""The operations of a decoder step, and which backend does them.

Tensors: x [rows, features]; q [rows, num_heads, head_dim]; a layer's cache
[2 (K, V), num_blocks, num_kv_heads, block_size, head_dim], contiguous. Query head h reads KV head
h // (num_heads / num_kv_heads). Log-sum-exps are fp32 and natural.
"""

import logging
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.batch import AttentionBatch, KVShape
from kernels.cpu.backend import CpuKernels
from kernels.cpu.build import ElementType, Isa, NativeUnavailable, ensure_library
from kernels.cpu.native import NativeLibrary
from kernels.cpu.self_test import flash_attention_works, packed_linear_works
from kernels.reference.backend import ReferenceKernels

_log = logging.getLogger(__name__)


class Kernels(Protocol):
    """A backend. `Any` stands for what a backend makes for itself: packed weights, the plan of a step."""

    name: str

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        """weight [out, in], bias [out]; what comes back is given to `linear` and owns its memory."""

    def linear(self, x: torch.Tensor, packed: Any, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + bias + residual, [rows, out], in x's dtype."""

    def swiglu(self, x: torch.Tensor, gate: Any, up: Any) -> torch.Tensor:
        """silu(x gate^T) * (x up^T)."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension, in fp32, back in x's dtype."""

    def rope(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """x [rows, heads, head_dim]; tables fp32 [rows, 1, head_dim] as engine.models.rope makes them."""

    def plan(self, batch: AttentionBatch, shape: KVShape, dtype: torch.dtype) -> Any:
        """Index tensors of a step, made once and used by every layer. dtype is the cache's."""

    def write_kv(self, kv: torch.Tensor, key_value: torch.Tensor, plan: Any) -> None:
        """key_value [rows, 2 * num_kv_heads, head_dim], all K heads, then all V heads, to the slots of the rows."""

    def decode_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        """q and out: the decode rows, [num_decodes, num_heads, head_dim]. Nodes are read once for all their rows and
        merged with the tails by log-sum-exp. Unused slots may hold anything, NaN included."""

    def extend_attention(self, q: torch.Tensor, kv: torch.Tensor, plan: Any, out: torch.Tensor) -> None:
        """q and out: the rows of the extends. The step's K and V are written already."""


def select_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest backend that passes its self-tests here."""
    if device.type != "cpu":
        return ReferenceKernels(device)
    if not flash_attention_works(dtype):
        _log.warning("torch's flash attention for CPUs fails its self-test in %s: plain torch is used, slowly", dtype)
        return ReferenceKernels(device)
    packs = packed_linear_works(dtype)
    if not packs:
        _log.warning("oneDNN's packed linear fails its self-test in %s: unpacked weights are used", dtype)
    return CpuKernels(packs_linears=packs)


_ELEMENT_TYPES: dict[torch.dtype, ElementType] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def find_native_library(dtype: torch.dtype, cache_dir: Path, max_isa: Isa | None = None) -> NativeLibrary | None:
    """The decoder in C++ for this machine (`kernels.cpu.native`), compiled if it has not been yet, which takes seconds.

    None, and one warning that says why, where it cannot be had; and without a word for a dtype that it does not know.
    """
    element_type = _ELEMENT_TYPES.get(dtype)
    if element_type is None:
        return None
    try:
        return ensure_library(element_type, cache_dir, max_isa)
    except NativeUnavailable as e:
        _log.warning("the C++ decoder is not used, torch's operators are, two to four times slower: %s", e)
        return None
