"""Compiled decoders for tests: every kind that this machine can run, compiled once into the runs' state folder."""

from functools import cache
from pathlib import Path

import pytest
import torch

from engine.prepared import default_state_dir
from kernels.batch import KVQuantisation
from kernels.cpu import build
from kernels.cpu.build import ElementType, Isa
from kernels.cpu.native import DecoderShape, NativeDecoder, NativeLibrary
from tests import needs

ELEMENT_TYPES: dict[torch.dtype, ElementType] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_HERE = [isa for isa in build.ISAS if build.usable_isa(isa) == isa]
KINDS = [(dtype, isa) for dtype in ELEMENT_TYPES for isa in _HERE if dtype == torch.bfloat16 or "bf16" not in isa]
"""Those that this processor can run."""
BEST = [(dtype, None) for dtype in ELEMENT_TYPES]


def cache_dir() -> Path:
    return default_state_dir() / "kernels"


def compiler() -> Path:
    return needs.program("c++", "g++", "clang++")


@cache
def library(dtype: torch.dtype, isa: Isa | None) -> NativeLibrary:
    """`isa` None: the best that the processor has."""
    if build.usable_isa(isa) is None:
        pytest.skip("this processor has no instructions that anything is compiled for")
    compiler()
    return build.ensure_library(ELEMENT_TYPES[dtype], cache_dir(), isa)


def decoder(
    dtype: torch.dtype,
    isa: Isa | None = None,
    *,
    num_threads: int = 1,
    hidden_size: int = 32,
    num_heads: int = 1,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    intermediate_size: int = 16,
    block_size: int = 16,
    vocab_size: int = 32,
    quantisation: KVQuantisation | None = None,
) -> NativeDecoder:
    """One layer without weights yet."""
    shape = DecoderShape(
        num_layers=1,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        vocab_size=vocab_size,
        rms_norm_eps=1e-5,
        block_size=block_size,
        quantisation=quantisation,
    )
    return NativeDecoder(library(dtype, isa), shape, num_threads, huge_pages=False)
