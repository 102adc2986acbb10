"""The first rank of a tensor-parallel replica: starts the others, tells them each step, and ends with them.

There is one scheduler, in the first rank's process. The others, its children, execute what they are told: they never
schedule and never draw. A rank that ends takes the replica with it, as none can compute alone.
"""

import contextlib
import logging
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from engine.batch_tensors import BatchTensors
from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineError
from engine.memory_plan import MemoryPlan
from engine.models.shard import Shard
from engine.rank_group import RankLost, join_group
from engine.rank_messages import (
    Channel,
    FromRank,
    RankFailed,
    RankHere,
    RankLoad,
    RankLoaded,
    RankMemory,
    RankStart,
    encode,
)
from engine.rank_rows import ToldRows
from engine.rank_watch import FollowingRank, RankWatch
from engine.scheduled_batch import ScheduledBatch

log = logging.getLogger(__name__)

DEATH_NEWS_S = 5.0
"""A connection breaks before the process behind it has been waited for."""
END_S = 5.0
"""Told that there is no more, a rank has this long to end, then it is killed."""

Answer = TypeVar("Answer", bound=FromRank)


class RankLeader:
    """Starts the ranks behind the first and joins their group. `close` ends them; so does the end of this process,
    however it comes, of this object, and of the thread that made it.

    Raises EngineError if one of them can never start like this, EngineDeadError if one ended while it started.
    """

    def __init__(self, model_dir: Path, config: EngineConfig, dtype: str, device: torch.device) -> None:
        self._size = size = config.tensor_parallel
        self._rows = ToldRows(config.block_size)
        self._watch = RankWatch()
        self._watchers: list[threading.Thread] = []
        self._followers: list[FollowingRank] = []
        # NCCL looks into it now and then, as long as there is the group
        folder = tempfile.TemporaryDirectory(prefix="ranks-", dir=config.runtime_dir)
        self.close = weakref.finalize(self, _end, self._followers, self._watch, self._watchers, folder)
        store_path = Path(folder.name) / "store"
        try:
            self._followers += [_start(rank, size) for rank in range(1, size)]
            self._receive(RankHere)
            for follower in self._followers:
                start = RankStart(
                    rank=follower.rank,
                    size=size,
                    model_dir=str(model_dir),
                    dtype=dtype,
                    device=device.type,
                    store_path=str(store_path),
                    config=config,
                )
                follower.channel.send(encode(start))
            self.shard: Shard = join_group(0, size, device, store_path)
            """Of the first rank."""
        except BaseException:
            self.close()
            raise

    def find_least_memory(self, left_bytes: int) -> int:
        """Bytes that every rank has left, `left_bytes` being those of the first."""
        return min(left_bytes, *(answer.left_bytes for answer in self._receive(RankMemory)))

    def load(self, plan: MemoryPlan) -> None:
        """Returns at once: they load beside the first."""
        order = RankLoad(
            num_blocks=plan.num_blocks, num_host_blocks=plan.num_host_blocks, max_model_len=plan.max_model_len
        )
        for follower in self._followers:
            follower.channel.send(encode(order))

    def wait_loaded(self) -> None:
        """From now on a rank that ends is noticed at once. Raises EngineError if one could not load."""
        self._receive(RankLoaded)
        for follower in self._followers:
            # the thread must not keep this object alive
            thread = threading.Thread(target=self._watch.watch, args=(follower,), name=f"rank {follower.rank}")
            thread.daemon = True
            thread.start()
            self._watchers.append(thread)

    def listen(self, listener: Callable[[EngineDeadError], None]) -> None:
        """Called once, from another thread, when a rank has ended; the error says which."""
        self._watch.listen(listener)

    @contextlib.contextmanager
    def step(self, batch: ScheduledBatch, tensors: BatchTensors | None = None) -> Iterator[None]:
        """What all ranks compute together; without tensors moves of blocks alone. Raises EngineDeadError if it cannot
        be, now or ever again: whatever goes wrong within, the others would wait for sums that do not come."""
        self._watch.check()
        data = encode(self._rows.tell(batch, tensors))
        try:
            for follower in self._followers:
                follower.channel.send(data)
            yield
        except Exception as error:
            reason = None
            if isinstance(error, (RankLost, OSError)):
                reason = self._watch.wait_for_reason(DEATH_NEWS_S)
            if reason is None:
                reason = f"rank 0 of {self._size} failed: {type(error).__name__}: {error}"
            self._give_up(reason)
            raise EngineDeadError(reason, is_crash=True) from error
        except BaseException as error:  # an interrupt
            self._give_up(f"rank 0 of {self._size} was stopped within a step by {type(error).__name__}")
            raise

    def _give_up(self, reason: str) -> None:
        log.error("no further step can work: %s", reason)
        self._watch.say(reason)
        for follower in self._followers:
            follower.process.kill()  # it may wait for a sum that does not come
        self.close()

    def _receive(self, kind: type[Answer]) -> list[Answer]:
        """What each says next, while they start."""
        return [self._receive_one(follower, kind) for follower in self._followers]

    def _receive_one(self, follower: FollowingRank, kind: type[Answer]) -> Answer:
        message = follower.channel.receive_answer()
        if isinstance(message, kind):
            return message
        if isinstance(message, RankFailed) and not message.can_start:
            raise EngineError(f"rank {follower.rank} of {self._size}: {message.reason}")
        words = message if isinstance(message, RankFailed) else None
        raise EngineDeadError(f"{follower.describe_end(words)} while it started", is_crash=True)


def _start(rank: int, size: int) -> FollowingRank:
    own, other = socket.socketpair()
    with other:
        # -P: as the supervisor starts us
        command = [sys.executable, "-P", "-m", "engine.rank_follower", str(other.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(other.fileno(),))
    return FollowingRank(rank, size, process, Channel(own))


def _end(
    followers: list[FollowingRank],
    watch: RankWatch,
    watchers: list[threading.Thread],
    folder: tempfile.TemporaryDirectory[str],
) -> None:
    watch.is_closing = True
    for follower in followers:
        follower.channel.shut_down()
    for follower in followers:
        try:
            follower.process.wait(END_S)
        except subprocess.TimeoutExpired:
            follower.process.kill()
            follower.process.wait()
    for watcher in watchers:
        if watcher is not threading.current_thread():
            watcher.join()
    for follower in followers:
        follower.channel.close()
    folder.cleanup()
