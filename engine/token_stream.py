"""The answer of one request as it arrives: a mailbox with one place, in which what nobody fetched yet is merged."""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from engine.errors import EngineDeadError
from engine.protocol import RequestOutput


class TokenStream:
    """Outputs of one request, for one reader on one event loop.

    A reader that is slow gets fewer and longer outputs, never other ones: the mailbox holds at most one merged output,
    so it is bounded by the answer itself. Use it as a context manager: leaving it before the end aborts the request.

    `put` and `fail` belong to the engine client and are called on the reader's event loop.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        """`abort(request_id)` is called once if the stream is left before its end; it must not block."""
        self.request_id = request_id
        self._abort = abort
        self._pending: RequestOutput | None = None
        self._error: EngineDeadError | None = None
        self._has_last = False  # the output with the finish reason has been put
        self._is_closed = False  # left by its reader: what still comes is dropped
        self._waiter: asyncio.Future[None] | None = None
        self._on_arrival: Callable[[], None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be put: the engine ended the request, or the engine died."""
        return self._has_last or self._error is not None

    # ---- for the engine client

    def put(self, output: RequestOutput) -> None:
        """Raises ValueError if the output is another request's, or if the request has ended already."""
        if self._is_closed or self._error is not None:
            return
        if output.request_id != self.request_id:
            raise ValueError(f"expected an output of {self.request_id!r}, got one of {output.request_id!r}")
        if self._has_last:
            raise ValueError(f"{self.request_id!r} has ended, got more")
        if self._pending is None:
            self._pending = output
        else:
            self._pending.merge(output)
        self._has_last = output.finish_reason is not None
        self._wake()

    def fail(self, error: EngineDeadError) -> None:
        """The engine has gone. What had arrived can still be read; a request that had ended stays ended."""
        if not self.is_finished:
            self._error = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self._on_arrival is not None:
            self._on_arrival()

    # ---- for the reader

    def notify(self, on_arrival: Callable[[], None]) -> None:
        """`on_arrival()` is called whenever there may be something to take, and at once if there is by now.

        So one reader waits for many streams. It must not block, nor raise.
        """
        self._on_arrival = on_arrival
        if self._pending is not None or self.is_finished:
            on_arrival()

    def try_take(self) -> RequestOutput | None:
        """All that has arrived since the last call, merged; None if that is nothing.

        Raises EngineDeadError if nothing is left and the engine died before the end.
        """
        output, self._pending = self._pending, None
        if output is None and self._error is not None:
            raise self._error
        return output

    async def next(self) -> RequestOutput:
        """All that has arrived since the last call, merged; waits for the first of it.

        Raises StopAsyncIteration after the end, EngineDeadError if the engine died before the end. Cancelling it
        loses nothing: the next call returns what arrived meanwhile.
        """
        while (output := self.try_take()) is None:
            if self._has_last or self._is_closed:
                raise StopAsyncIteration
            if self._waiter is not None:
                raise RuntimeError(f"{self.request_id!r} has a reader already, got a second one")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return output

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        return await self.next()

    def close(self) -> None:
        """Aborts the request at the engine if it has not ended. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        self._pending = None
        self._wake()
        if not self.is_finished:
            self._abort(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
