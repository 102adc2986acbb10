"""What a rank behind the first does with its orders; here it is a thread, and this test its first rank."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch_tensors import BatchTensors
from engine.config import EngineConfig
from engine.models.prepare import prepare
from engine.prepared import PreparedModel
from engine.rank_follower import RankFollower, follow
from engine.rank_group import join_group
from engine.rank_messages import Channel, RankHere, RankLoad, RankLoaded, RankMemory, RankStart, RankStep, encode
from engine.scheduled_batch import NO_TRANSFERS, BlockCopy, Transfers
from kernels.batch import AttentionBatch, Extend
from tests.tiny_model import make_tiny

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    path: Path = tmp_path_factory.mktemp("model")
    return prepare(str(make_tiny(path / "tiny")), path / "state", "float32", lambda *_: None)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class Following:
    """A thread that follows, and this end of its channel."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        self.channel, self._other = Channel(own), Channel(other)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.channel.receive_answer() == RankHere()

    def _run(self) -> None:
        try:
            follow(self._other)
        except Exception as e:  # noqa: BLE001 the test looks at it
            self.error = e
            self._other.shut_down()

    def end(self) -> None:
        self.channel.shut_down()
        self._thread.join()
        self.channel.close()
        self._other.close()


def make_start(model: PreparedModel, store_path: Path, **changes: Any) -> RankStart:
    config = EngineConfig(model_dir="", block_size=8, threads=1, tensor_parallel=2, kernels="reference", check_kv=True)
    fields = {"rank": 1, "size": 2, "dtype": "float32", "device": "cpu", "model_dir": str(model.path)}
    return RankStart(**{**fields, "store_path": str(store_path), "config": config, **changes})


def test_it_ends_without_an_error_when_the_first_rank_has_gone() -> None:
    following = Following()
    following.end()
    assert following.error is None


def test_an_order_before_the_start_is_an_error() -> None:
    following = Following()
    following.channel.send(encode(RankStep()))
    assert following.channel.receive_answer() is None
    following.end()
    assert str(following.error) == "RankStep came before RankStart"


def test_it_computes_its_part_of_a_step(model: PreparedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes part in both sums of each of two layers, and writes its KV head's K and V where it is told."""
    made: list[RankFollower] = []
    load = RankFollower.load
    monkeypatch.setattr(RankFollower, "load", lambda self, order: (made.append(self), load(self, order)))
    following = Following()
    following.channel.send(encode(make_start(model, tmp_path / "store")))
    shard = join_group(0, 2, CPU, tmp_path / "store")
    memory = following.channel.receive_answer()
    assert isinstance(memory, RankMemory)
    assert 0 < memory.left_bytes < 2**50
    following.channel.send(encode(RankLoad(num_blocks=4, num_host_blocks=0, max_model_len=32)))
    assert following.channel.receive_answer() == RankLoaded()

    numbers = np.arange(3, dtype=np.int32)
    slots = numbers + 16
    tensors = BatchTensors(
        numbers + 5, numbers, slots, AttentionBatch(slots, extends=[Extend(3, 0, [2])]), [], None, []
    )
    following.channel.send(encode(RankStep.of(NO_TRANSFERS, tensors)))
    following.channel.send(encode(RankStep.of(Transfers(copies=(BlockCopy(2, 4),)))))
    assert shard.all_reduce is not None
    sums = [torch.zeros(3, 64) for _ in range(4)]
    for x in sums:
        shard.all_reduce(x)
    following.end()
    assert following.error is None
    assert all(x.any() for x in sums)
    kv = made[0]._blocks.kv
    assert kv.shape == (2, 2, 5, 1, 8, 16)
    assert kv[:, :, 2, :, :3].all()
    assert torch.equal(kv[:, :, 4], kv[:, :, 2])
    assert not kv[:, :, [0, 1, 3]].any()
    assert not kv[:, :, 2, :, 3:].any()
