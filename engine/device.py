"""What a process computes on, and how much of its memory it may take."""

import torch

from engine.errors import ModelNotSupported
from engine.machine import available_cpus, available_memory_bytes


def resolve_device(device: str) -> torch.device:
    """auto: cuda where there is one. Raises ModelNotSupported if cuda was asked for and is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ModelNotSupported("device cuda was asked for, but torch finds no CUDA device")
    return torch.device(device)


def check_devices(device: torch.device, num_ranks: int) -> None:
    """Raises ModelNotSupported if there is not a GPU for each rank."""
    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise ModelNotSupported(
            f"tensor parallel {num_ranks} needs {num_ranks} GPUs, torch finds {torch.cuda.device_count()}"
        )


def take_device(kind: str, threads: int | None, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """This rank's device, of the kind that all ranks have: a GPU of its own, or its share of the processors."""
    if kind == "cuda":
        if num_ranks > 1:
            torch.cuda.set_device(rank)
        return torch.device("cuda", rank) if num_ranks > 1 else torch.device("cuda")
    torch.set_num_threads(threads or max(1, min(torch.get_num_threads(), available_cpus() // num_ranks)))
    return torch.device(kind)


def available_bytes(device: torch.device, num_ranks: int = 1) -> int:
    """For one rank: ranks on CPUs share the machine's memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_memory_bytes() // num_ranks
