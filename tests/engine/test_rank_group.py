"""Ranks that meet by a file and add up; here a thread each."""

import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from engine.models.shard import Shard
from engine.rank_group import RankLost, join_group

CPU = torch.device("cpu")


def each(size: int, run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_gets_the_sum(tmp_path: Path, dtype: torch.dtype) -> None:
    sums: list[torch.Tensor | None] = [None] * 3

    def run(rank: int) -> None:
        shard = join_group(rank, 3, CPU, tmp_path / "store")
        assert (shard.rank, shard.size) == (rank, 3)
        assert shard.all_reduce is not None
        x = torch.arange(10, dtype=dtype).view(2, 5) * (rank + 1)
        shard.all_reduce(x)
        sums[rank] = x

    each(3, run)
    assert all(x is not None and torch.equal(x, torch.arange(10, dtype=dtype).view(2, 5) * 6) for x in sums)


def test_nothing_listens_on_the_network(tmp_path: Path) -> None:
    def listeners() -> set[tuple[str, int]]:
        connections = psutil.Process().net_connections("inet")
        return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}

    shards: list[Shard] = []
    before = listeners()
    each(2, lambda rank: shards.append(join_group(rank, 2, CPU, tmp_path / "store")))
    assert {ip for ip, _ in listeners() - before} == {"127.0.0.1"}


def test_a_rank_that_has_gone_is_an_error(tmp_path: Path) -> None:
    shards: dict[int, Shard] = {}

    def run(rank: int) -> None:
        shards[rank] = join_group(rank, 2, CPU, tmp_path / "store")

    each(2, run)
    del shards[1]
    all_reduce = shards[0].all_reduce
    assert all_reduce is not None
    with pytest.raises(RankLost, match=r"^rank 0 of 2 lost another rank: "):
        all_reduce(torch.ones(1))
