"""The engine client for an engine in another process: a DEALER to its ROUTER. asyncio, no torch."""

import asyncio
import itertools
import logging
from collections.abc import Iterator, Sequence

import msgspec
import zmq
import zmq.asyncio

from engine.errors import EngineDeadError
from engine.protocol import (
    PROTOCOL_VERSION,
    AbortRequests,
    Acknowledge,
    AddRequest,
    EngineInfo,
    EngineReady,
    EngineStats,
    FromEngine,
    Hello,
    LastWords,
    Lease,
    PinTrunk,
    RequestOutput,
    Scope,
    SetTenants,
    StatsQuery,
    StatsReply,
    StepOutputs,
    TenantShare,
    ToEngine,
    TrunkState,
    UnpinTrunk,
    decode_from_engine,
    encode,
)
from engine.token_stream import TokenStream
from engine.trunk_pins import TrunkPins
from engine.zmq_connection import ZmqConnection

log = logging.getLogger(__name__)


class ProtocolFault(EngineDeadError):
    """What the engine said cannot be right; the connection is given up."""


class ZmqEngineClient:
    """Connects, and connects again whenever the engine has gone, until `close`.

    One socket per connection: when the connection is lost, which ZeroMQ's socket monitor tells at once, its streams
    fail and its socket is thrown away with whatever still waited in it, so that nothing old reaches a new engine.
    """

    def __init__(
        self,
        address: str,
        *,
        lease_s: float = 10.0,
        fingerprint: str | None = None,
        pause_after_fault_s: float = 1.0,
    ) -> None:
        """`lease_s` is the engine's. An engine that serves another model than `fingerprint` does not become ready.

        One that does not keep to the protocol is asked again no sooner than after `pause_after_fault_s`.
        """
        self._address = address
        self._lease_s = lease_s
        self._fingerprint = fingerprint
        self._pause_after_fault_s = pause_after_fault_s
        self._streams: dict[str, TokenStream] = {}
        self._queries: dict[int, asyncio.Future[EngineStats]] = {}
        self._query_ids: Iterator[int] = itertools.count(1)
        self._pins = TrunkPins(self._send_if_ready)
        self._shares: list[TenantShare] | None = None
        self._ready: EngineReady | None = None
        self._became_ready = asyncio.Event()
        self._reason = "it has not been reached yet"
        self._last_step_id = 0
        self._context: zmq.asyncio.Context | None = None
        self._connection: ZmqConnection | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begins to connect; returns without waiting for the engine."""
        if self._task is not None:
            raise RuntimeError("this engine client has been started already")
        self._context = zmq.asyncio.Context(io_threads=1)
        self._task = asyncio.create_task(self._run(self._context), name="engine-client")

    async def close(self) -> None:
        if self._task is None:
            return
        self._abort_all()
        self._pins.close("this client is closed")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._context is not None:
            self._context.term()  # at most LINGER: the aborts are on their way
        self._task = self._context = None

    # ---- EngineClient

    @property
    def info(self) -> EngineInfo:
        return self._need_ready().info

    @property
    def epoch(self) -> str:
        """New with each life of the engine. Raises EngineDeadError while it is not ready."""
        return self._need_ready().epoch

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    @property
    def num_running(self) -> int:
        return len(self._streams)

    async def wait_ready(self) -> None:
        await self._became_ready.wait()

    def submit(self, request: AddRequest) -> TokenStream:
        self._need_ready()
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        data = encode(request)  # before it is registered: what cannot be encoded leaves nothing behind
        stream = self._streams[request.request_id] = TokenStream(request.request_id, self._abort)
        self._send_bytes(data)
        return stream

    async def pin(self, trunk_id: str, token_ids: list[int], scopes: list[Scope]) -> TrunkState:
        return await self._pins.pin(trunk_id, token_ids, scopes)

    async def unpin(self, trunk_id: str) -> None:
        self._pins.unpin(trunk_id)

    def set_tenants(self, shares: Sequence[TenantShare]) -> None:
        self._shares = list(shares)
        self._send_if_ready(SetTenants(self._shares))

    async def stats(self) -> EngineStats:
        self._need_ready()
        query_id = next(self._query_ids)
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._queries[query_id] = answer
        try:
            self._send(StatsQuery(query_id))
            return await answer
        finally:
            del self._queries[query_id]

    def _need_ready(self) -> EngineReady:
        if self._ready is None:
            raise EngineDeadError(f"the engine is not ready: {self._reason}")
        return self._ready

    # ---- sending

    def _send(self, message: ToEngine) -> None:
        self._send_bytes(encode(message))

    def _send_bytes(self, data: bytes) -> None:
        """Never waits: there is no limit for the DEALER. A message is short, there are a few for each request."""
        if self._connection is not None:
            self._connection.send(data)

    def _send_if_ready(self, message: PinTrunk | UnpinTrunk | SetTenants) -> None:
        if self._ready is not None:
            self._send(message)

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._send(AbortRequests([request_id]))

    def _abort_all(self) -> None:
        if self._ready is not None and self._streams:
            self._send(AbortRequests(list(self._streams)))

    # ---- one connection after another

    async def _run(self, context: zmq.asyncio.Context) -> None:
        try:
            while True:
                try:
                    await self._serve_connection(context)
                except ProtocolFault as e:
                    log.error("engine at %s: %s", self._address, e)
                    self._lose(str(e), is_crash=False)
                    await asyncio.sleep(self._pause_after_fault_s)
        except Exception:
            log.exception("the client of the engine at %s broke", self._address)
            raise
        finally:
            self._pins.close("this client is closed")
            self._end("this client is closed", is_crash=False)

    async def _serve_connection(self, context: zmq.asyncio.Context) -> None:
        """From connecting to the loss of the connection. Raises ProtocolFault."""
        with ZmqConnection(context, self._address) as connection:
            await connection.connected()
            self._connection, self._last_step_id = connection, 0
            tasks: set[asyncio.Task[None]] = set()
            try:
                self._send(Hello())
                tasks = {
                    asyncio.create_task(work, name="engine-connection")
                    for work in (connection.receive(self._take), connection.disconnected(), self._renew_lease())
                }
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                # what came before the loss still counts: an answer that was complete stays complete
                for data in connection.take_arrived():
                    self._take(data)
            except ProtocolFault:
                self._abort_all()
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._connection = None
            self._lose("its connection was lost", is_crash=True)

    async def _renew_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if self._streams or len(self._pins):
                self._send(Lease())

    def _lose(self, reason: str, *, is_crash: bool) -> None:
        """All requests of the connection are gone."""
        if self._ready is not None:
            log.warning("lost the engine at %s: %s", self._address, reason)
        self._end(reason, is_crash=is_crash)

    def _end(self, reason: str, *, is_crash: bool) -> None:
        if self._ready is not None:
            self._reason = reason
        self._ready = None
        self._became_ready.clear()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(f"the engine is gone: {reason}", is_crash=is_crash))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(f"the engine is gone: {reason}"))

    # ---- receiving

    def _take(self, data: bytes) -> None:
        try:
            message: FromEngine = decode_from_engine(data)
        except msgspec.MsgspecError as e:
            raise ProtocolFault(f"a message of {len(data)} bytes cannot be read: {e}") from None
        if isinstance(message, StepOutputs):
            self._take_outputs(message)
        elif isinstance(message, EngineReady):
            self._take_ready(message)
        elif isinstance(message, StatsReply):
            answer = self._queries.get(message.query_id)
            if answer is not None and not answer.done():
                answer.set_result(message.stats)
        elif isinstance(message, TrunkState):
            self._pins.take(message)
        elif isinstance(message, LastWords):
            self._lose(message.reason, is_crash=message.is_crash)

    def _take_ready(self, ready: EngineReady) -> None:
        if ready.protocol_version != PROTOCOL_VERSION:
            raise ProtocolFault(f"it speaks protocol {ready.protocol_version}, expected {PROTOCOL_VERSION}")
        if self._fingerprint is not None and ready.info.fingerprint != self._fingerprint:
            raise ProtocolFault(f"it serves model {ready.info.fingerprint!r}, expected {self._fingerprint!r}")
        if self._ready is not None and self._ready.epoch != ready.epoch:
            self._lose(f"epoch {self._ready.epoch} ended, {ready.epoch} began", is_crash=True)
        is_new = self._ready is None
        self._ready = ready
        self._became_ready.set()
        if is_new:
            if self._shares is not None:
                self._send(SetTenants(self._shares))
            self._pins.resend()

    def _take_outputs(self, step: StepOutputs) -> None:
        if step.step_id != self._last_step_id + 1:
            raise ProtocolFault(f"expected step {self._last_step_id + 1}, got {step.step_id}: outputs are missing")
        self._last_step_id = step.step_id
        for output in step.outputs:
            self._deliver(output)
        self._send(Acknowledge(step.step_id))

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:  # aborted here while it was on its way
            return
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(output)
