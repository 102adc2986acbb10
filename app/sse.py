"""Event streams over HTTP: frames that every reader cuts the same way, comments while nothing comes, and an end that
is clean whoever goes first."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.disconnect import cancel_and_wait, wait_for_disconnect
from app.errors import ApiError

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    # nginx and those that follow it buffer an answer unless they are told not to
    "X-Accel-Buffering": "no",
}
PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"
_RAW_HEADERS = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))

logger = logging.getLogger(__name__)


def escape_separators(data: bytes) -> bytes:
    """JSON in which no line ends: readers that use `splitlines` also break at U+2028, U+2029 and U+0085.

    Other such characters are control characters, which JSON escapes anyway.
    """
    if not data.isascii():
        for character, escaped in _SEPARATORS:
            data = data.replace(character, escaped)
    return data


def frame(data: bytes, event: str | None = None) -> bytes:
    """One event. `data` is JSON on one line."""
    data = escape_separators(data)
    return b"data: %b\n\n" % data if event is None else b"event: %b\ndata: %b\n\n" % (event.encode(), data)


def error_frames(error: ApiError) -> bytes:
    """How Chat Completions ends when something fails after the first byte."""
    return frame(error.envelope_bytes()) + DONE


class SlowReader(Exception):
    """The client took nothing for the time allowed."""


class SseWriter:
    """Writes one stream. The headers go with the first bytes, so that until then an error can have a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._lock = asyncio.Lock()
        self._now = asyncio.get_running_loop().time
        self.is_started = False
        self.last_change = self._now()
        """When the write under way began, else when the last one ended; of the loop's clock."""

    @property
    def is_writing(self) -> bool:
        return self._lock.locked()

    @property
    def unchanged_s(self) -> float:
        return self._now() - self.last_change

    async def write(self, frames: bytes) -> None:
        """Sends whole frames; waits while the client's buffer is full."""
        await self._write(frames, more=True)

    async def close(self) -> None:
        await self._write(b"", more=False)

    async def _write(self, frames: bytes, *, more: bool) -> None:
        async with self._lock:
            self.last_change = self._now()
            if not self.is_started:
                self.is_started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _RAW_HEADERS})
            await self._send({"type": "http.response.body", "body": frames, "more_body": more})
            self.last_change = self._now()


class SseResponse(Response):
    """A response that `produce(writer)` writes. It runs until it returns or the client goes, or takes nothing for
    `send_timeout_s`.

    An ApiError before the first frame is a plain error response with its status; later it is the frames that
    `on_error` makes of it.
    """

    def __init__(
        self,
        produce: Callable[[SseWriter], Awaitable[None]],
        *,
        ping_interval_s: float = 10.0,
        send_timeout_s: float = 60.0,
        on_error: Callable[[ApiError], bytes] = error_frames,
    ) -> None:
        super().__init__()
        self._produce = produce
        self._ping_interval_s = ping_interval_s
        self._send_timeout_s = send_timeout_s
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = SseWriter(send)
        work = asyncio.create_task(self._work(writer))
        gone = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await self._watch(writer, work, gone)
            if work.done():
                await work
        except SlowReader as e:
            logger.warning("a stream was dropped: %s", e)
        except ApiError as e:
            await error_response(e)(scope, receive, send)
        finally:
            await cancel_and_wait(work, gone)

    async def _watch(self, writer: SseWriter, *ends: asyncio.Task[None]) -> None:
        """Returns when one of `ends` has come. Sends comments meanwhile. Raises SlowReader."""
        patience_s = min(self._ping_interval_s, self._send_timeout_s)
        while not any(task.done() for task in ends):
            if writer.is_writing and writer.unchanged_s >= self._send_timeout_s:
                raise SlowReader(f"nothing was read for {self._send_timeout_s:g} s")
            if not writer.is_writing and writer.unchanged_s >= self._ping_interval_s:
                try:
                    async with asyncio.timeout(self._send_timeout_s):
                        await writer.write(PING)
                except TimeoutError:
                    raise SlowReader(f"nothing was read for {self._send_timeout_s:g} s") from None
            limit_s = self._send_timeout_s if writer.is_writing else self._ping_interval_s
            # a write may begin while this waits: look again soon enough to notice that it does not end
            timeout = min(max(limit_s - writer.unchanged_s, 0.001), patience_s)
            await asyncio.wait(ends, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    async def _work(self, writer: SseWriter) -> None:
        try:
            await self._produce(writer)
        except ApiError as e:
            if not writer.is_started:
                raise
            await writer.write(self._on_error(e))
        except Exception:
            if writer.is_started:
                await writer.write(self._on_error(ApiError("The server failed while it answered.")))
                await writer.close()
            raise
        await writer.close()


def error_response(error: ApiError) -> Response:
    """The envelope as a plain response."""
    return Response(error.envelope_bytes(), error.status, headers=error.headers, media_type="application/json")
