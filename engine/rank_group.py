"""The sums between the ranks of a replica, all of them processes of one machine: gloo on CPUs, NCCL on GPUs.

The ranks find one another by a file, and nothing listens but on the loopback interface.
"""

import os
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import Backend, FileStore, ProcessGroupGloo, Store

from engine.errors import EngineError
from engine.models.shard import Shard

TIMEOUT = timedelta(seconds=300)
"""As long as the supervisor waits for an engine that does not answer. A rank that dies is noticed at once."""


class RankLost(EngineError):
    """A sum between the ranks failed: another rank has gone."""


def join_group(rank: int, size: int, device: torch.device, store_path: Path) -> Shard:
    """Returns when all have joined; each rank calls it with the same path, of a file that no earlier group has used.

    Raises RuntimeError if they do not come together.
    """
    store = FileStore(str(store_path), size)
    store.set_timeout(TIMEOUT)
    group = _make_nccl(store, rank, size) if device.type == "cuda" else _make_gloo(store, rank, size)

    def all_reduce(x: torch.Tensor) -> None:
        try:
            group.allreduce([x]).wait()  # type: ignore[attr-defined]
        except RuntimeError as e:
            raise RankLost(f"rank {rank} of {size} lost another rank: {e}") from e

    # NCCL connects only now
    all_reduce(torch.zeros(1, device=device))
    return Shard(rank, size, all_reduce)


def _make_gloo(store: Store, rank: int, size: int) -> Backend:
    # not by init_process_group: its group is a global of the process, and its interface that of the host's name
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = TIMEOUT
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, size, options)


def _make_nccl(store: Store, rank: int, size: int) -> Backend:
    # builds of torch for CPUs do not have it
    from torch._C._distributed_c10d import ProcessGroupNCCL

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = ProcessGroupNCCL.Options()
    options._timeout = TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)
