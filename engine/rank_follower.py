"""`python -m engine.rank_follower FD`: a rank behind the first. It executes what the first rank tells it.

It schedules nothing, draws nothing and knows no requests: steps come as numbers and block tables. It ends with code 0
when the socket pair FD does, with 1 after its last words if a step fails, and at once when its parent dies.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.device import available_bytes, take_device
from engine.errors import EngineError
from engine.kv_tensors import KVTensors
from engine.memory_plan import check_weights_fit
from engine.models.choose import choose_decoder, choose_moves
from engine.models.shard import split_config
from engine.models.weights import Weights
from engine.parent_death import die_with_parent
from engine.prepared import PreparedModel
from engine.rank_group import RankLost, join_group
from engine.rank_messages import (
    BEAT_S,
    Channel,
    RankAdvance,
    RankBeat,
    RankFailed,
    RankHere,
    RankLoad,
    RankLoaded,
    RankMemory,
    RankStart,
    RankStep,
    encode,
    read_transfers,
)
from engine.rank_rows import KnownRows
from kernels.batch import KVShape

log = logging.getLogger(__name__)


class RankFollower:
    """One rank's part of the model, first its weights' place, then with `load` all of it.

    Raises EngineError for what can never work like this, RuntimeError if the ranks do not come together.
    """

    def __init__(self, start: RankStart) -> None:
        config = start.config
        self._config = config
        self._dtype: torch.dtype = getattr(torch, start.dtype)
        self._rows = KnownRows(config.block_size)
        self._device = take_device(start.device, config.threads, start.rank, start.size)
        shard = join_group(start.rank, start.size, self._device, Path(start.store_path))
        model = PreparedModel.load(start.model_dir)
        self._shape = split_config(model.manifest.config, start.size)
        self._weights = Weights(model.weights_path(start.dtype), model.manifest.config, shard)
        available = available_bytes(self._device, start.size)
        check_weights_fit(self._weights.num_bytes, available)
        self.left_bytes = available - self._weights.num_bytes

    @torch.inference_mode()
    def load(self, order: RankLoad) -> None:
        shape, config = self._shape, self._config
        self._decoder = choose_decoder(shape, self._weights, config, self._device, self._dtype, order.max_model_len)
        kv_shape = KVShape(
            order.num_blocks + 1, shape.num_kv_heads, config.block_size, shape.head_dim, config.kv_quantisation
        )
        self._blocks = KVTensors(
            shape.num_layers, kv_shape, self._dtype, self._device, choose_moves(self._decoder), order.num_host_blocks
        )

    @torch.inference_mode()
    def execute(self, step: RankStep | RankAdvance) -> None:
        """Raises RankLost if another rank has gone."""
        self._blocks.move(read_transfers(step))
        if step.token_ids:
            token_ids, positions, attention = self._rows.take(step)
            plan = self._decoder.plan(attention, self._blocks.shape)
            self._decoder.forward(token_ids, positions, self._blocks.kv, plan, attention.num_decodes)


def follow(channel: Channel) -> None:
    """Until the first rank is gone. Raises what `RankFollower` does."""
    channel.send(encode(RankHere()))
    follower: RankFollower | None = None
    with contextlib.ExitStack() as stack:
        while (order := channel.receive_order()) is not None:
            if isinstance(order, RankStart):
                follower = RankFollower(order)
                channel.send(encode(RankMemory(follower.left_bytes)))
                continue
            assert follower is not None, f"{type(order).__name__} came before RankStart"
            if isinstance(order, RankLoad):
                follower.load(order)
                channel.send(encode(RankLoaded()))
                stack.enter_context(beating(channel))
            else:
                follower.execute(order)


@contextlib.contextmanager
def beating(channel: Channel) -> Iterator[None]:
    """Says every `BEAT_S` that the process runs, from a thread of its own: steps may be long, and a sum may wait."""
    over = threading.Event()
    beat = encode(RankBeat())  # so small that it goes in one piece: no other thread's message comes between

    def run() -> None:
        with contextlib.suppress(OSError):  # the first rank is gone, which the main thread notices by itself
            while not over.wait(BEAT_S):
                channel.send(beat)

    thread = threading.Thread(target=run, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def main(arguments: list[str]) -> int:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the first rank's to hear
    logging.basicConfig(
        format=f"rank (pid {os.getpid()}): %(message)s", level=logging.ERROR
    )  # rank 0 gives the same warnings
    channel = Channel(socket.socket(fileno=int(arguments[0])))
    try:
        follow(channel)
    except Exception as e:
        log.error("no further step can work", exc_info=e)
        reason = str(e) if isinstance(e, EngineError) else f"{type(e).__name__}: {e}"
        is_victim = isinstance(e, RankLost)
        words = RankFailed(reason, can_start=not isinstance(e, EngineError) or is_victim, is_victim=is_victim)
        with contextlib.suppress(OSError):  # it may be the first rank that has gone
            channel.send(encode(words))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
