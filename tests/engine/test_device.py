"""What ranks compute on: a GPU each, or a share of the processors and of the memory."""

from collections.abc import Iterator

import pytest
import torch

from engine import device
from engine.device import available_bytes, check_devices, resolve_device, take_device
from engine.errors import ModelNotSupported

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def six_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize(
    ("threads", "num_ranks", "expected"), [(None, 1, 6), (None, 2, 4), (None, 3, 2), (None, 16, 1), (5, 2, 5)]
)
def test_ranks_divide_the_processors(
    monkeypatch: pytest.MonkeyPatch, threads: int | None, num_ranks: int, expected: int
) -> None:
    monkeypatch.setattr(device, "available_cpus", lambda: 8)
    assert take_device("cpu", threads, num_ranks - 1, num_ranks) == CPU
    assert torch.get_num_threads() == expected


def test_ranks_divide_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "available_memory_bytes", lambda: 1000)
    assert (available_bytes(CPU), available_bytes(CPU, 4)) == (1000, 250)


def test_each_rank_has_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert take_device("cuda", None) == torch.device("cuda")
    assert take_device("cuda", None, 1, 2) == torch.device("cuda", 1)
    assert taken == [1]


def test_too_few_gpus_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    check_devices(torch.device("cuda"), 1)
    check_devices(CPU, 8)
    with pytest.raises(ModelNotSupported, match=r"^tensor parallel 2 needs 2 GPUs, torch finds 1$"):
        check_devices(torch.device("cuda"), 2)


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == "cuda"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(ModelNotSupported, match="torch finds no CUDA device"):
        resolve_device("cuda")
