"""Rotary position embeddings: the frequencies of each kind and the table of cosines and sines."""

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    # for the types alone: the models run where msgspec is not installed
    from engine.config import RopeConfig


def inverse_frequencies(rope: "RopeConfig", head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2], radians per position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / torch.pow(torch.tensor(rope.theta, dtype=torch.float32), exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: "RopeConfig", frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by the factor, short ones are kept, those between are interpolated."""
    wavelengths = 2 * math.pi / frequencies
    original = rope.original_max_position_embeddings
    smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def rope_table(rope: "RopeConfig", head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, fp32 [num_positions, head_dim]: the halves repeat, and the first half of the sines is
    negated, so that x * cos + swapped halves of x * sin rotates x."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)
