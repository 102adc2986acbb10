"""Arrays that the host writes and a device reads, all brought there by one copy."""

from collections.abc import Mapping
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
    """One piece of memory on the host, pinned for a GPU, and one on the device. Zeros at first, on both sides."""

    def __init__(self, sizes: Mapping[str, tuple[int, npt.DTypeLike]], device: torch.device) -> None:
        """sizes: elements and dtype of each array, in the order in which they lie."""
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        self._ends: dict[str, int] = {}
        dtypes = {name: np.dtype(dtype) for name, (_, dtype) in sizes.items()}
        starts, end = {}, 0
        for name, (count, _) in sizes.items():
            starts[name] = -(-end // ALIGNMENT) * ALIGNMENT
            end = self._ends[name] = starts[name] + count * dtypes[name].itemsize
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        for name, start in starts.items():
            here, there = self._host[start : self._ends[name]], self._device[start : self._ends[name]]
            self.host[name] = here.numpy().view(dtypes[name])
            self.device[name] = there.view(_TYPES[dtypes[name]])

    def upload(self, last: str, count: int) -> None:
        """All arrays before `last`, and its first `count` elements. Nobody waits for the copy: the host's side may not
        be written to before it is over."""
        array = self.host[last]
        end = self._ends[last] - (len(array) - count) * array.itemsize
        self._device[:end].copy_(self._host[:end], non_blocking=True)
