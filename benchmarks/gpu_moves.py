"""What the machine can do at best, and moves of whole blocks beside it: copies, and swaps to the host and back."""

import torch

from benchmarks.document import Document
from benchmarks.gpu_cache import BLOCK_SIZE, Cache
from benchmarks.gpu_device import Clock, Device
from benchmarks.gpu_work import Sizes
from kernels.triton import blocks


def measure_ceilings(device: Device, sizes: Sizes, clock: Clock, found: Document) -> None:
    """Bytes a second, read and written together, of a large copy; operations a second of a large bf16 product. All of
    random numbers."""
    found["copy"] = _copy(device, sizes.copy_bytes)
    device.release()
    clock.check()
    found["product"] = _product(device, sizes.product_size)


def _copy(device: Device, num_bytes: int) -> Document:
    source = device.fill(torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device.device))
    target = torch.empty_like(source)
    timing = device.times({"copy": lambda: target.copy_(source)})["copy"]
    return {"bytes_per_s": 2 * num_bytes / timing.ms * 1000, **timing.document()}


def _product(device: Device, size: int) -> Document:
    a, b = device.random(size, size), device.random(size, size)
    out = torch.empty_like(a)
    timing = device.times({"product": lambda: torch.mm(a, b, out=out)}, seconds=0.5)["product"]
    return {"flops_per_s": 2 * size**3 / timing.ms * 1000, "size": size, **timing.document()}


def measure_moves(device: Device, sizes: Sizes, clock: Clock, found: Document) -> None:
    """Of many blocks on the device, bytes read and written counted; then of a prompt's, to the host and back."""
    num_swapped = -(-sizes.prompt_tokens // BLOCK_SIZE)
    cache = Cache(device, sizes.llama, max(2 * sizes.moved_blocks, num_swapped))
    ids = [cache.blocks(BLOCK_SIZE)[0] for _ in range(2 * sizes.moved_blocks)]
    found |= _moves(device, cache, ids[: sizes.moved_blocks], ids[sizes.moved_blocks :])
    device.release()
    clock.check()
    found |= _swaps(device, cache, ids[:num_swapped])


def _moves(device: Device, cache: Cache, sources: list[int], targets: list[int]) -> Document:
    source_ids, target_ids = (torch.tensor(each, device=device.device) for each in (sources, targets))
    moved = blocks.gather_blocks(cache.kv, source_ids)
    num_bytes = moved.numel() * moved.element_size()
    times = device.times(
        {
            "copy_blocks": lambda: blocks.copy_blocks(cache.kv, sources, targets),
            "gather": device.capture(lambda: blocks.gather_blocks(cache.kv, source_ids, moved)),
            "scatter": device.capture(lambda: blocks.scatter_blocks(cache.kv, target_ids, moved)),
        }
    )
    rates = {
        name: {"bytes": num_bytes, "bytes_per_s": 2 * num_bytes / timing.ms * 1000, **timing.document()}
        for name, timing in times.items()
    }
    return {**rates, "right": {"holds": torch.equal(cache.kv[:, :, target_ids], cache.kv[:, :, source_ids])}}


def _swaps(device: Device, cache: Cache, block_ids: list[int]) -> Document:
    ids = torch.tensor(block_ids, device=device.device)
    staged = blocks.gather_blocks(cache.kv, ids)
    before = staged.clone()
    host = torch.empty(staged.shape, dtype=staged.dtype, pin_memory=not device.is_dry)

    def swap_out() -> None:
        host.copy_(blocks.gather_blocks(cache.kv, ids, staged), non_blocking=True)

    def swap_in() -> None:
        staged.copy_(host, non_blocking=True)
        blocks.scatter_blocks(cache.kv, ids, staged)

    times = device.times({"swap_out": swap_out, "swap_in": swap_in})
    num_bytes = staged.numel() * staged.element_size()
    rates = {
        name: {"bytes": num_bytes, "bytes_per_s": num_bytes / timing.ms * 1000, **timing.document()}
        for name, timing in times.items()
    }
    return {**rates, "swapped_right": {"holds": torch.equal(blocks.gather_blocks(cache.kv, ids), before)}}
