"""Memory for keys and values, on the device and in the host tier."""

import mmap

import torch


def allocate_blocks(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, on this device."""
    if device.type != "cpu":
        return torch.zeros(sizes, dtype=dtype, device=device)
    # pages of an anonymous map are zero and taken only when they are touched, so that a start does not write
    # gigabytes; huge ones halve the cost of gathering blocks
    count = torch.Size(sizes).numel()
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(sizes)


def allocate_host_blocks(sizes: tuple[int, ...], dtype: torch.dtype, *, for_gpu: bool) -> torch.Tensor:
    """In host memory; pinned, so that a GPU moves data at full speed, and all of it taken at once, if for one."""
    if for_gpu:
        return torch.zeros(sizes, dtype=dtype, pin_memory=True)
    return allocate_blocks(sizes, dtype, torch.device("cpu"))
