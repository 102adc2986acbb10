"""Which form of the decoder computes here: one C++ call a step, or torch's operators one by one."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import EngineError
from engine.models.decoder import Decoder
from engine.models.packed_decoder import PackedDecoder
from engine.models.sharded_kernels import ShardedKernels
from engine.models.weights import Weights
from engine.prepared import default_state_dir
from kernels import blocks
from kernels.checked import CheckedKernels
from kernels.cpu.native import MAX_HEAD_DIM
from kernels.interface import (
    BlockMoves,
    DecodeStep,
    Kernels,
    TokenDraw,
    TritonUnavailable,
    find_native_library,
    make_triton_kernels,
    select_kernels,
)
from kernels.reference.backend import ReferenceKernels

if TYPE_CHECKING:
    # for the types alone: the models run where msgspec is not installed
    from engine.config import EngineConfig, ModelConfig

_log = logging.getLogger(__name__)
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def choose_decoder(
    shape: "ModelConfig",
    weights: Weights,
    config: "EngineConfig",
    device: torch.device,
    dtype: torch.dtype,
    num_positions: int,
) -> DecodeStep:
    """What `config.kernels` and `config.max_isa` ask for; each thing that is missing costs a warning and some speed.

    shape: of the part of the model that `weights` are.
    Raises EngineError if the device or this machine has no such kernels, and if none that can be had are deterministic.
    """
    decoder = _choose(shape, weights, config, device, dtype, num_positions)
    if config.deterministic and not isinstance(decoder, PackedDecoder):
        raise EngineError(
            "deterministic mode needs the C++ decoder: device cpu, bfloat16 or float32, kernels auto or cpu, and a C++ "
            f"compiler; what can be had here is {decoder.backend} in {str(dtype).removeprefix('torch.')} on {device}"
        )
    return decoder


def _choose(
    shape: "ModelConfig",
    weights: Weights,
    config: "EngineConfig",
    device: torch.device,
    dtype: torch.dtype,
    num_positions: int,
) -> DecodeStep:
    if config.kernels == "cpu" and device.type != "cpu":
        raise EngineError(f"the cpu kernels compute on device cpu, not on {device.type}")
    if config.kernels == "triton":
        try:
            kernels = make_triton_kernels(device, shape.num_heads)
        except TritonUnavailable as e:
            raise EngineError(f"the triton kernels were asked for, but {e}") from e
        return _of_operations(kernels, shape, weights, config, device, num_positions)
    if config.kernels == "reference":
        return _of_operations(ReferenceKernels(device), shape, weights, config, device, num_positions)
    if device.type == "cpu":
        warn_of_one_thread(torch.get_num_threads())
    if device.type == "cpu" and not _is_split(weights) and _fits(shape):
        library = find_native_library(dtype, find_kernels_dir(config), config.max_isa)
        if library is not None:
            return PackedDecoder(
                shape,
                weights,
                library,
                num_positions,
                config.block_size,
                num_threads=torch.get_num_threads(),
                huge_pages=has_huge_pages(),
                quantisation=config.kv_quantisation,
            )
    return _of_operations(select_kernels(device, dtype, shape.num_heads), shape, weights, config, device, num_positions)


def _of_operations(
    kernels: Kernels,
    shape: "ModelConfig",
    weights: Weights,
    config: "EngineConfig",
    device: torch.device,
    num_positions: int,
) -> Decoder:
    shard = weights.shard
    if shard.all_reduce is not None:
        kernels = ShardedKernels(kernels, is_first=shard.is_first, all_reduce=shard.all_reduce)
    return Decoder(shape, weights, CheckedKernels(kernels) if config.check_kv else kernels, device, num_positions)


def choose_moves(decoder: DecodeStep) -> BlockMoves:
    """Of blocks, for the device that the decoder computes on."""
    if not _is_triton(decoder):
        return blocks
    from kernels.triton import blocks as triton_blocks

    return triton_blocks


def choose_draw(decoder: DecodeStep) -> TokenDraw | None:
    """None: the engine's own, by torch's operators or numpy."""
    if not _is_triton(decoder):
        return None
    from kernels.triton.draw import draw

    return draw


def _is_triton(decoder: DecodeStep) -> bool:
    return isinstance(decoder, Decoder) and decoder.kernels_name == "triton"


def _is_split(weights: Weights) -> bool:
    """Warns if so: the C++ decoder is one call a step, and in each layer the ranks' sums come between."""
    shard = weights.shard
    if shard.size > 1 and shard.is_first:
        _log.warning("tensor parallel: the C++ decoder takes whole models only, torch's operators serve, slower")
    return shard.size > 1


def find_kernels_dir(config: "EngineConfig") -> Path:
    return default_state_dir() / "kernels" if config.kernels_dir is None else Path(config.kernels_dir)


def _fits(shape: "ModelConfig") -> bool:
    """Warns where the C++ decoder does not know such heads."""
    fits = shape.head_dim % 2 == 0 and shape.head_dim <= MAX_HEAD_DIM
    if not fits:
        _log.warning("the C++ decoder takes even head sizes up to %s, not %s", MAX_HEAD_DIM, shape.head_dim)
    return fits


def warn_of_one_thread(num_threads: int) -> None:
    if num_threads == 1:
        _log.warning("one thread computes: steps take up to twice as long as with two")


def has_huge_pages(setting: Path | None = None) -> bool:
    """Whether a program may ask for them. Warns if not."""
    try:
        is_off = "[never]" in (setting or _HUGE_PAGES).read_text()
    except OSError:
        is_off = True
    if is_off:
        _log.warning("this system has no transparent huge pages: steps take 10 to 20% longer")
    return not is_off
