"""Taking pages leaves what is written in them."""

import mmap

import numpy as np
import torch

from tests.kernels.libraries import library


def test_touched_memory_keeps_its_bytes() -> None:
    with mmap.mmap(-1, 3 * 4096) as memory:
        bytes_ = np.frombuffer(memory, np.uint8)
        bytes_[:] = np.arange(3 * 4096) % 251
        before = bytes_.copy()
        library(torch.float32, None).touch(bytes_.ctypes.data + 64, 2 * 4096)
        assert np.array_equal(bytes_, before)
        del bytes_
