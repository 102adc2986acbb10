"""Arrays that the host writes and a device reads, all brought there by one copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 128
"""Bytes. Pointers are always aligned alike, so that no kernel is compiled twice."""
_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class MirroredArrays:
    """One piece of memory on the device, and two on the host, pinned for a GPU, which are written in turn: one may be
    written while the other one is on its way. Zeros at first."""

    def __init__(self, sizes: Mapping[str, tuple[int, npt.DTypeLike]], device: torch.device) -> None:
        """sizes: elements and dtype of each array, in the order in which they lie."""
        self._sides: list[_HostSide] = []
        self.device: dict[str, torch.Tensor] = {}
        self._ends: dict[str, int] = {}
        dtypes = {name: np.dtype(dtype) for name, (_, dtype) in sizes.items()}
        starts, end = {}, 0
        for name, (count, _) in sizes.items():
            starts[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = self._ends[name] = starts[name] + count * dtypes[name].itemsize
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        for name, start in starts.items():
            self.device[name] = self._device[start : self._ends[name]].view(_TYPES[dtypes[name]])
        for _ in range(2):
            is_gpu = device.type == "cuda"
            memory = torch.zeros(end, dtype=torch.uint8, pin_memory=is_gpu)
            flat = memory.numpy()
            arrays = {name: flat[start : self._ends[name]].view(dtypes[name]) for name, start in starts.items()}
            uploaded = torch.cuda.Event() if is_gpu else None  # type: ignore[no-untyped-call]
            self._sides.append(_HostSide(memory, arrays, uploaded))

    def begin(self) -> dict[str, npt.NDArray[Any]]:
        """What is to be written next, once the upload before the last one is over. What is not written is what it was
        then."""
        side = self._sides[0]
        if side.uploaded is not None:
            side.uploaded.synchronize()
        return side.arrays

    def upload(self, last: str, count: int) -> None:
        """All arrays before `last`, and its first `count` elements. Nobody waits for the copy."""
        side = self._sides[0]
        array = side.arrays[last]
        end = self._ends[last] - (len(array) - count) * array.itemsize
        self._device[:end].copy_(side.memory[:end], non_blocking=True)
        if side.uploaded is not None:
            side.uploaded.record()
        self._sides.reverse()


@dataclass(frozen=True, slots=True)
class _HostSide:
    memory: torch.Tensor
    arrays: dict[str, npt.NDArray[Any]]
    uploaded: torch.cuda.Event | None
