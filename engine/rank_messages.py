"""What the first rank tells the others, and what they tell it, over a socket pair that only the two have. No torch.

Plain data: numbers and block tables of a step, not the sequences they come from.
"""

import select
import socket
import struct
from collections.abc import Sequence

import msgspec
import numpy as np

from engine.batch_tensors import BatchTensors
from engine.config import EngineConfig
from engine.scheduled_batch import BlockCopy, SwapIn, SwapOut, Transfers
from kernels.batch import Int32Array

BEAT_S = 1.0
_LENGTH = struct.Struct("<Q")


class RankStart(msgspec.Struct, tag="start", array_like=True, frozen=True, kw_only=True):
    """Join the group, and say what memory there is."""

    rank: int
    size: int
    model_dir: str
    dtype: str
    device: str
    """cpu or cuda."""
    store_path: str
    config: EngineConfig


class RankLoad(msgspec.Struct, tag="load", array_like=True, frozen=True, kw_only=True):
    """Load the weights and take memory for so many blocks."""

    num_blocks: int
    """The null block not counted."""
    num_host_blocks: int
    max_model_len: int


class RankStep(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """A step's moves of blocks, and then its rows, if it has any. Int32 arrays as bytes."""

    swap_outs: Sequence[SwapOut] = ()
    swap_ins: Sequence[SwapIn] = ()
    copies: Sequence[BlockCopy] = ()
    token_ids: bytes = b""
    positions: bytes = b""
    slots: bytes = b""
    tails: list[tuple[Sequence[int], int]] = []
    """Block ids and number of tokens."""
    nodes: list[tuple[Sequence[int], Sequence[int]]] = []
    """Block ids and rows."""
    extends: list[tuple[int, int, Sequence[int]]] = []
    """Rows, context tokens and block ids."""

    @classmethod
    def of(cls, transfers: Transfers, tensors: BatchTensors | None = None) -> "RankStep":
        if tensors is None:
            return cls(*transfers)
        attention = tensors.attention
        return cls(
            *transfers,
            tensors.token_ids.tobytes(),
            tensors.positions.tobytes(),
            tensors.slots.tobytes(),
            [(tail.block_ids, tail.num_tokens) for tail in attention.tails],
            [(node.block_ids, node.rows) for node in attention.nodes],
            [(extend.num_rows, extend.num_context_tokens, extend.block_ids) for extend in attention.extends],
        )


class RankAdvance(msgspec.Struct, tag="advance", array_like=True, frozen=True):
    """A step's moves of blocks, and then the last step's rows, decode rows all, a token further."""

    swap_outs: Sequence[SwapOut]
    swap_ins: Sequence[SwapIn]
    copies: Sequence[BlockCopy]
    token_ids: bytes
    new_blocks: list[tuple[int, int]]
    """Rows whose token is the first one of a block, and that block."""


class RankHere(msgspec.Struct, tag="here", array_like=True, frozen=True):
    """The program has been loaded and waits to be told to start."""


class RankMemory(msgspec.Struct, tag="memory", array_like=True, frozen=True):
    left_bytes: int
    """On this rank's device, once its weights are loaded."""


class RankLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """Steps may come."""


class RankBeat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The process still runs. Comes every `BEAT_S` once it is loaded, also while it computes."""


class RankFailed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The last words of a rank."""

    reason: str
    can_start: bool = True
    """False: it is no use to try again like this."""
    is_victim: bool = False
    """It lost another rank."""


ToRank = RankStart | RankLoad | RankStep | RankAdvance
FromRank = RankHere | RankMemory | RankLoaded | RankBeat | RankFailed

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def read_array(data: bytes) -> Int32Array:
    """A copy, which may be written to."""
    return np.frombuffer(data, dtype=np.int32).copy()


def read_transfers(step: RankStep | RankAdvance) -> Transfers:
    return Transfers(tuple(step.swap_outs), tuple(step.swap_ins), tuple(step.copies))


def encode(message: ToRank | FromRank) -> bytes:
    data = _encoder.encode(message)
    return _LENGTH.pack(len(data)) + data


class Channel:
    """One end of a socket pair: a length of eight bytes before each message."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, data: bytes) -> None:
        """What `encode` made. Raises OSError if the other end is gone."""
        self._socket.sendall(data)

    def has_come(self, timeout_s: float) -> bool:
        """Whether, within that time, there is something to receive or the other end is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def receive_order(self) -> ToRank | None:
        """At a rank; None: the first rank is gone."""
        data = self._receive()
        return None if data is None else _to_rank.decode(data)

    def receive_answer(self) -> FromRank | None:
        """At the first rank; None: the other is gone."""
        data = self._receive()
        return None if data is None else _from_rank.decode(data)

    def _receive(self) -> bytearray | None:
        head = self._read(_LENGTH.size)
        return None if head is None else self._read(*_LENGTH.unpack(head))

    def _read(self, num_bytes: int) -> bytearray | None:
        data = bytearray(num_bytes)
        rest = memoryview(data)
        while rest:
            try:
                num_read = self._socket.recv_into(rest)
            except ConnectionResetError:
                return None
            if num_read == 0:
                return None
            rest = rest[num_read:]
        return data

    def close(self) -> None:
        """Not while another thread waits here: `shut_down` wakes it."""
        self._socket.close()

    def shut_down(self) -> None:
        """The other end reads that there is no more, and so does whoever waits at this one. No error if it is closed
        or the other end is gone."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
