"""The engine as a process: one synchronous loop around the core, one ROUTER socket. No torch of its own.

    poll (only while there is nothing to do) → take what has come → core.step() → at most one message per gateway

A gateway is a connection of a DEALER. It may have `MAX_UNACKNOWLEDGED` step messages on their way; without that
credit the outputs of each request are merged here. A gateway whose connection is gone is noticed at the next message
to it, and one that is silent for `lease_s` although it has requests or pins counts as gone too: its requests are
aborted, and what only it had pinned is no longer kept.
"""

import contextlib
import gc
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Protocol

import msgspec
import zmq

from engine.errors import EngineDeadError
from engine.gateway import Gateway
from engine.protocol import (
    PROTOCOL_VERSION,
    AbortRequests,
    Acknowledge,
    AddRequest,
    EngineInfo,
    EngineReady,
    EngineStats,
    ErrorInfo,
    FinishReason,
    FromEngine,
    Hello,
    LastWords,
    PinTrunk,
    RequestOutput,
    SetTenants,
    StatsQuery,
    StatsReply,
    StepOutputs,
    TenantShare,
    TrunkPin,
    TrunkState,
    UnpinTrunk,
    decode_to_engine,
    encode,
)
from engine.trunk_holders import TrunkHolders

log = logging.getLogger(__name__)

MAX_MESSAGES_PER_STEP = 1024
"""Taken in before the next step, so that a flood of messages cannot stop the requests that run."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""A peer that sends more is disconnected; the longest prompt takes five bytes a token."""
POLLIN = int(zmq.POLLIN)
HEARTBEAT_MS = 2000
REST_MS = 1000
"""Idle for so long, the pool is checked: that walks over every block, and no request should wait for it."""


Listen = Callable[[Callable[[EngineDeadError], None]], None]
LEASE_EXPIRED = ErrorInfo("the gateway was silent for longer than its lease", "lease_expired")


class Core(Protocol):
    """What the loop needs of `engine.core.EngineCore`."""

    @property
    def has_work(self) -> bool: ...
    def add(self, request: AddRequest) -> RequestOutput | None: ...
    def abort(self, request_ids: Iterable[str]) -> None: ...
    def pin(self, message: PinTrunk) -> TrunkState | None: ...
    def unpin(self, trunk_id: str) -> None: ...
    def take_trunk_news(self) -> list[TrunkState]: ...
    def set_tenants(self, shares: Iterable[TenantShare]) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def check_integrity(self) -> None: ...


class EngineProcess:
    """Serves one core on one address until `stop`.

    An error that leaves `core.step()` is a fault of the engine, not of a request: gateways are told, `run` raises it.
    """

    def __init__(
        self,
        core: Core,
        info: EngineInfo,
        address: str,
        *,
        lease_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Binds `address`; raises zmq.ZMQError if that cannot be done."""
        self._core = core
        self._lease_s = lease_s
        self._clock = clock
        self._ready = EngineReady(PROTOCOL_VERSION, secrets.token_hex(8), info)
        self._gateways: dict[bytes, Gateway] = {}
        self._owners: dict[str, Gateway] = {}
        self._trunks: TrunkHolders[Gateway] = TrunkHolders(core)
        self._is_stopping = False
        self._failure: EngineDeadError | None = None
        self._was_busy = False
        # written by a signal handler through signal.set_wakeup_fd: a poll that blocks returns
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 200)
        if not address.startswith("ipc://"):  # a unix socket tells at once; a lost machine must be asked
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        self._socket.bind(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_reader, zmq.POLLIN)

    @property
    def epoch(self) -> str:
        return self._ready.epoch

    # ---- the loop

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._is_stopping:
                has_rested = not self._core.has_work and self._rest()
                self._drain()
                self._abort_expired()
                if self._core.has_work:
                    self._was_busy = True
                    self._route(self._core.step())
                elif self._was_busy and has_rested:
                    self._was_busy = False
                    self._core.check_integrity()
                for state in self._core.take_trunk_news():
                    for gateway in self._trunks.take_news(state):
                        self._send(gateway, state)
                self._flush()
            if self._failure is not None:
                raise self._failure
            self._say_last_words("the engine was told to stop", is_crash=False)
        except Exception as e:
            self._say_last_words(f"{type(e).__name__}: {e}", is_crash=True)
            raise
        finally:
            self._close()

    def stop(self, failure: EngineDeadError | None = None) -> None:
        """Ends `run` after the step that is under way; it raises the failure. For signal handlers and other threads."""
        self._failure = failure or self._failure
        self._is_stopping = True
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: it has ended
            self._wake_writer.send(b"\0")

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT call `stop`. From the main thread only."""

        def on_signal(number: int, frame: FrameType | None) -> None:
            self.stop()

        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)

    def _rest(self) -> bool:
        """Waits for something to come; True if nothing did."""
        has_rested = not self._poller.poll(self._poll_timeout_ms())
        with contextlib.suppress(BlockingIOError):
            self._wake_reader.recv(4096)
        return has_rested

    def _poll_timeout_ms(self) -> int | None:
        """Until the next lease ends, or the pool is to be checked; else None (block)."""
        leases = [g.last_seen + self._lease_s for g in self._gateways.values() if self._has_lease(g)]
        if not leases:
            return REST_MS if self._was_busy else None
        return max(0, int((min(leases) - self._clock()) * 1000) + 1)

    def _has_lease(self, gateway: Gateway) -> bool:
        return bool(gateway.request_ids) or gateway in self._trunks

    def _drain(self) -> None:
        for _ in range(MAX_MESSAGES_PER_STEP):
            if not int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN:
                return
            self._receive(self._socket.recv_multipart(zmq.NOBLOCK))

    def _receive(self, frames: list[bytes]) -> None:
        if len(frames) != 2:
            log.warning("ignored a message of %d frames, expected 2", len(frames))
            return
        identity, data = frames
        try:
            message = decode_to_engine(data)
        except msgspec.MsgspecError as e:
            log.warning("ignored a message of %d bytes: %s", len(data), e)
            return
        gateway = self._gateways.get(identity)
        if gateway is None:
            gateway = self._gateways[identity] = Gateway(identity, self._clock())
        gateway.last_seen = self._clock()
        if isinstance(message, AddRequest):
            self._add(gateway, message)
        elif isinstance(message, AbortRequests):
            self._abort(gateway, message.request_ids)
        elif isinstance(message, Acknowledge):
            # not past what was sent: credit cannot be forged
            gateway.acknowledged_step_id = max(gateway.acknowledged_step_id, min(message.step_id, gateway.last_step_id))
        elif isinstance(message, StatsQuery):
            self._send(gateway, StatsReply(message.query_id, self._core.stats()))
        elif isinstance(message, PinTrunk):
            state = self._trunks.pin(gateway, message)
            if state is not None:
                self._send(gateway, state)
        elif isinstance(message, UnpinTrunk):
            self._trunks.unpin(gateway, message.trunk_id)
        elif isinstance(message, SetTenants):
            self._core.set_tenants(message.shares)
        elif isinstance(message, Hello):
            self._welcome(gateway, message)

    def _welcome(self, gateway: Gateway, hello: Hello) -> None:
        if hello.protocol_version != PROTOCOL_VERSION:
            log.warning("a gateway speaks protocol %d, expected %d", hello.protocol_version, PROTOCOL_VERSION)
        # To all: the ROUTER tells us only when we send that a connection has gone. A gateway that comes after a crash
        # thereby frees what its predecessor had.
        for other in list(self._gateways.values()):
            self._send(other, self._ready)

    # ---- requests

    def _add(self, gateway: Gateway, request: AddRequest) -> None:
        if request.request_id in self._owners or request.request_id in gateway.pending:
            log.warning("refused a request: its id %r is in use", request.request_id)
            if request.request_id not in gateway.request_ids and request.request_id not in gateway.pending:
                error = ErrorInfo("the request's id is in use", "invalid_request", "request_id")
                gateway.pending[request.request_id] = _failed(request.request_id, error)
            return
        self._owners[request.request_id] = gateway
        gateway.request_ids.add(request.request_id)
        refusal = self._core.add(request)
        if refusal is not None:
            self._route([refusal])

    def _abort(self, gateway: Gateway, request_ids: Iterable[str]) -> None:
        """Unknown ids and those of other gateways are passed over."""
        own = [request_id for request_id in request_ids if request_id in gateway.request_ids]
        for request_id in own:
            gateway.request_ids.discard(request_id)
            gateway.pending.pop(request_id, None)
            del self._owners[request_id]
        if own:
            self._core.abort(own)
            self._was_busy = True

    def _abort_expired(self) -> None:
        now = self._clock()
        for gateway in list(self._gateways.values()):
            if self._has_lease(gateway) and now - gateway.last_seen >= self._lease_s:
                log.warning("a gateway was silent for %.1f s: aborting its requests", now - gateway.last_seen)
                for trunk_id in self._trunks.drop(gateway):
                    self._send(gateway, TrunkState(trunk_id, TrunkPin.FAILED, 0, 0))
                expired = list(gateway.request_ids)
                self._abort(gateway, expired)
                # It may only have been stopped for a while: then its streams must learn of it.
                gateway.pending |= {request_id: _failed(request_id, LEASE_EXPIRED) for request_id in expired}

    def _drop(self, gateway: Gateway) -> None:
        del self._gateways[gateway.identity]
        self._trunks.drop(gateway)
        self._abort(gateway, list(gateway.request_ids))
        gateway.pending.clear()

    def _route(self, outputs: Iterable[RequestOutput]) -> None:
        """Sorts outputs by gateway. A request may have been aborted while its output was made: dropped."""
        for output in outputs:
            gateway = self._owners.get(output.request_id)
            if gateway is None:
                continue
            if output.finish_reason is not None:
                del self._owners[output.request_id]
                gateway.request_ids.discard(output.request_id)
            earlier = gateway.pending.get(output.request_id)
            if earlier is None:
                gateway.pending[output.request_id] = output
            else:
                earlier.merge(output)

    # ---- sending

    def _flush(self) -> None:
        for gateway in list(self._gateways.values()):
            if gateway.pending and gateway.has_credit:
                gateway.last_step_id += 1
                outputs, gateway.pending = list(gateway.pending.values()), {}
                self._send(gateway, StepOutputs(gateway.last_step_id, outputs))

    def _send(self, gateway: Gateway, message: FromEngine) -> None:
        try:
            self._socket.send_multipart([gateway.identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as e:
            if e.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            # EAGAIN: so much waits for it that it does not read at all. Credit keeps step messages far below that.
            if gateway.request_ids:
                log.warning("a gateway has gone: aborting its %d requests", len(gateway.request_ids))
            if gateway.identity in self._gateways:
                self._drop(gateway)

    def _say_last_words(self, reason: str, *, is_crash: bool) -> None:
        for gateway in list(self._gateways.values()):
            self._send(gateway, LastWords(reason, is_crash))

    def _close(self) -> None:
        self._socket.close()
        self._context.term()
        self._wake_reader.close()
        self._wake_writer.close()


def _failed(request_id: str, error: ErrorInfo) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=error)


def serve(core: Core, info: EngineInfo, address: str, *, lease_s: float, listen: Listen = lambda _: None) -> None:
    """Serves in the main thread until SIGTERM or SIGINT; `listen` is given what ends it with a failure."""
    process = EngineProcess(core, info, address, lease_s=lease_s)
    process.handle_signals()
    listen(process.stop)
    gc.collect()
    gc.freeze()  # what was built at the start stays: no collection needs to walk over it
    process.run()
