"""The engine client for an engine in this process: the core runs in a thread of its own. Imports no torch itself."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from engine.errors import EngineDeadError
from engine.process import Core
from engine.protocol import (
    AddRequest,
    EngineInfo,
    EngineStats,
    PinTrunk,
    RequestOutput,
    Scope,
    TenantShare,
    TrunkState,
    UnpinTrunk,
)
from engine.token_stream import TokenStream
from engine.trunk_pins import TrunkPins

log = logging.getLogger(__name__)

REST_S = 1.0
"""As in engine.process: idle for so long, the pool is checked."""


class InprocEngineClient:
    """For tests and for embedding: a core behind the same protocol as an engine in another process.

    Everything is called on one event loop; the thread is the only one that touches the core. Ready from `start` until
    `close`, or until an error leaves `core.step()`: then the core is given up, as the process would be.
    """

    def __init__(self, core: Core, info: EngineInfo) -> None:
        self._core = core
        self._info = info
        self._streams: dict[str, TokenStream] = {}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pins = TrunkPins(self._send_pin)
        self._lock = threading.Lock()
        self._arrived: dict[
            str, RequestOutput
        ] = {}  # under the lock: merged, one for each request, until the loop runs
        self._queries: set[asyncio.Future[EngineStats]] = set()
        self._is_stopping = False
        self._became_ready = asyncio.Event()
        self._reason = "it has not been started yet"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    async def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("this engine client has been started already")
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()
        self._became_ready.set()
        self._pins.resend()

    # ---- EngineClient

    @property
    def info(self) -> EngineInfo:
        self._need_ready()
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._became_ready.is_set()

    @property
    def num_running(self) -> int:
        return len(self._streams)

    async def wait_ready(self) -> None:
        await self._became_ready.wait()

    def submit(self, request: AddRequest) -> TokenStream:
        self._need_ready()
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        stream = TokenStream(request.request_id, self._abort)
        self._streams[request.request_id] = stream
        self._commands.put(lambda: self._add(request))
        return stream

    async def pin(self, trunk_id: str, token_ids: list[int], scopes: list[Scope]) -> TrunkState:
        return await self._pins.pin(trunk_id, token_ids, scopes)

    async def unpin(self, trunk_id: str) -> None:
        self._pins.unpin(trunk_id)

    def set_tenants(self, shares: Sequence[TenantShare]) -> None:
        taken = list(shares)
        self._commands.put(lambda: self._core.set_tenants(taken))

    async def stats(self) -> EngineStats:
        self._need_ready()
        answer: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._queries.add(answer)
        try:
            self._commands.put(lambda: self._answer(answer))
            return await answer
        finally:
            self._queries.discard(answer)

    async def close(self) -> None:
        """Waits for the step that is under way."""
        if self._thread is None:
            return
        thread, self._thread, self._is_stopping = self._thread, None, True
        self._lose("this client is closed", is_crash=False)
        self._commands.put(lambda: None)  # wakes it
        await asyncio.to_thread(thread.join)

    def _need_ready(self) -> None:
        if not self.is_ready:
            raise EngineDeadError(f"the engine is not ready: {self._reason}")

    def _send_pin(self, message: PinTrunk | UnpinTrunk) -> None:
        if self.is_ready:
            self._commands.put(lambda: self._take_pin(message))

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._commands.put(lambda: self._core.abort([request_id]))

    def _lose(self, reason: str, *, is_crash: bool) -> None:
        self._became_ready.clear()
        self._reason = reason
        self._pins.close(reason)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDeadError(f"the engine is gone: {reason}", is_crash=is_crash))
        for answer in self._queries:
            if not answer.done():
                answer.set_exception(EngineDeadError(f"the engine is gone: {reason}"))

    def _deliver(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, {}
        for request_id, output in arrived.items():
            stream = self._streams.get(request_id)
            if stream is None:  # aborted while it was on its way
                continue
            if output.finish_reason is not None:
                del self._streams[request_id]
            stream.put(output)

    # ---- in the thread

    def _run(self) -> None:
        was_busy = False
        try:
            while not self._is_stopping:
                timeout_s = 0.0 if self._core.has_work else REST_S if was_busy else None
                has_rested = not self._take_commands(timeout_s)
                if self._core.has_work:
                    was_busy = True
                    self._hand_over(self._core.step())
                    for state in self._core.take_trunk_news():
                        self._tell(state)
                elif was_busy and has_rested:
                    was_busy = False
                    self._core.check_integrity()
        except Exception as e:
            log.exception("the engine broke")
            reason = f"{type(e).__name__}: {e}"
            self._call_loop(lambda: self._lose(reason, is_crash=True))

    def _take_commands(self, timeout_s: float | None) -> bool:
        """All that are there; waits for the first of them so long, None: as long as it takes. Whether one came."""
        num_taken = 0
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get(timeout_s != 0.0, timeout_s)
                command()
                num_taken, timeout_s = num_taken + 1, 0.0
        return num_taken > 0

    def _add(self, request: AddRequest) -> None:
        refusal = self._core.add(request)
        if refusal is not None:
            self._hand_over([refusal])

    def _take_pin(self, message: PinTrunk | UnpinTrunk) -> None:
        if isinstance(message, UnpinTrunk):
            self._core.unpin(message.trunk_id)
            return
        state = self._core.pin(message)
        if state is not None:
            self._tell(state)

    def _tell(self, state: TrunkState) -> None:
        self._call_loop(lambda: self._pins.take(state))

    def _answer(self, answer: asyncio.Future[EngineStats]) -> None:
        stats = self._core.stats()

        def answer_in_loop() -> None:
            if not answer.done():
                answer.set_result(stats)

        self._call_loop(answer_in_loop)

    def _hand_over(self, outputs: list[RequestOutput]) -> None:
        """A loop that is busy finds everything merged; so what waits for it is bounded by the answers."""
        with self._lock:
            is_first = not self._arrived
            for output in outputs:
                earlier = self._arrived.get(output.request_id)
                if earlier is None:
                    self._arrived[output.request_id] = output
                else:
                    earlier.merge(output)
            is_called = is_first and bool(self._arrived)
        if is_called:
            self._call_loop(self._deliver)

    def _call_loop(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                self._loop.call_soon_threadsafe(call)
