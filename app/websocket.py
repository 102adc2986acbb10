"""The Responses API's websocket: a thin shell around `Conversation`, with one reader and one writer task per socket.

The writer takes events straight from the logs and mailboxes of the answers, where each answer has a cursor: nothing is
copied into a queue of the socket's own, and awaiting the send is all the flow control there is. A reader so slow that
its cursor leaves a log's window, or that takes nothing for `send_timeout_s`, is closed with 4008; its stored answers
go on and can be resumed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.callers import Caller, admit
from app.conversation import (
    CLOSE_GOING_AWAY,
    CLOSE_POLICY_VIOLATION,
    CLOSE_RESTART,
    CLOSE_SLOW_READER,
    Cancel,
    Close,
    Command,
    Conversation,
    Resume,
    SendError,
    Start,
    error_event,
    reconnect_event,
)
from app.disconnect import cancel_and_wait
from app.errors import ApiError, RateLimited
from app.event_log import CursorLost, EventsNotHeld
from app.events import LoggedEvent
from app.feed import Feed
from app.lifetime import Lifetime, LifetimeOver
from app.live_config import Configured
from app.lookup_errors import events_not_held
from app.response_service import ResponseService
from app.send_once import SendOnce
from app.services import Services
from app.socket_writer import SocketWriter
from app.sse import error_response
from app.started import Started
from app.unstored_lanes import UnstoredLanes

logger = logging.getLogger(__name__)

READ_EVENTS = 32
"""Of one answer at a time, so that lanes take turns."""
MAX_ERRORS = 1024
"""Error events that may wait for the client."""
MAX_COMMANDS = 512
"""Under way at once; then no further message is read until one has ended."""
MAX_RESUMED = 512
"""Answers on their way to the client because it resumed them."""


class Websockets:
    """The route."""

    def __init__(self, services: Services, service: ResponseService, sender: SendOnce) -> None:
        self._services = services
        self._service = service
        self._sender = sender

    def routes(self) -> list[WebSocketRoute]:
        return [WebSocketRoute("/v1/responses", self.connect)]

    async def connect(self, websocket: WebSocket) -> None:
        configured = self._services.current
        try:
            self._services.drain.check()
            caller = await admit(self._services, configured, websocket)
            place = await self._services.caps.take(caller.tenant, "connections")
        except ApiError as e:
            await websocket.send_denial_response(error_response(e))
            return
        connection = _Connection(websocket, self._services, self._service, self._sender, configured, caller)
        try:
            await websocket.accept(caller.subprotocol)
        except WebSocketDisconnect:
            return
        else:
            with self._services.drain.watched(connection.drain, connection.cut):
                await connection.run()
        finally:
            place.release()


class _Connection:
    def __init__(
        self,
        websocket: WebSocket,
        services: Services,
        service: ResponseService,
        sender: SendOnce,
        configured: Configured,
        caller: Caller,
    ) -> None:
        """`configured`: the configuration that knows the caller."""
        self._websocket = websocket
        self._services = services
        self._configured = configured
        self._service = service
        self._sender = sender
        self._caller = caller
        self._writer = SocketWriter(websocket, configured.limits.send_timeout_s)
        self._lifetime = Lifetime.of(configured.limits)
        self._conversation = Conversation()
        self._commands: set[asyncio.Task[None]] = set()
        self._feeds: set[Feed] = set()
        self._ready: dict[Feed, None] = {}
        """Feeds that may have events, in the order in which they were woken."""
        self._errors: deque[bytes] = deque()
        """And what else belongs to no answer."""
        self._close: Close | None = None
        self._close_at_rest: Close | None = None
        """When nothing is under way any more."""
        self._is_old = False
        """Nothing new is taken."""
        self._unstored = UnstoredLanes()
        self._news = asyncio.Event()
        self._writer_rests = False

    async def run(self) -> None:
        """Until the client goes or is closed. Stored answers run on; others end."""
        reader = asyncio.create_task(self._read(), name="websocket reader")
        writer = asyncio.create_task(self._write(), name="websocket writer")
        try:
            with self._lifetime.running(self._services.later, self._farewell, self.cut):
                await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(reader, writer, *self._commands)
            for feed in self._feeds:
                feed.stop_watching()
                if feed.started is not None and not feed.started.run.is_stored:
                    feed.started.run.stop()
        for task in (reader, writer):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def drain(self) -> None:
        """The gateway ends: the client is told to connect again; the socket is closed when its answers have ended."""
        self._send_event(reconnect_event("shutting_down"))
        self._close_at_rest = self._close_at_rest or Close(CLOSE_GOING_AWAY, "the server is shutting down")

    def _farewell(self) -> None:
        """The connection is old: as when the gateway ends."""
        self._is_old = True
        self._send_event(reconnect_event("lifetime"))
        self._close_at_rest = self._close_at_rest or Close(CLOSE_GOING_AWAY, "the connection is old")

    def cut(self) -> None:
        """There is no more time for what runs."""
        self._close_with(Close(CLOSE_RESTART, "the answers have not ended in time"))

    # ---- reading

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                logger.debug("websocket closed: %s %s", message.get("code"), message.get("reason"))
                return
            try:
                self._authenticate()
            except ApiError as e:
                self._send_event(error_event(e))
                continue
            text = message.get("text")
            self._do(self._conversation.receive_bytes() if text is None else self._conversation.receive_text(text))
            if len(self._commands) >= MAX_COMMANDS:
                await asyncio.wait(self._commands, return_when=asyncio.FIRST_COMPLETED)

    def _authenticate(self) -> Configured:
        """The configuration in force, which may be another one than at the last message.

        Raises ApiError for a key that is not the tenant's any more: then the connection takes nothing new, and ends
        when its answers have.
        """
        current = self._services.live.current
        if current is self._configured:
            return current
        try:
            caller = self._caller.again(current.tenants)
        except ApiError:
            self._close_at_rest = Close(CLOSE_POLICY_VIOLATION, "the API key is not valid any more")
            self._news.set()
            raise
        self._caller, self._configured = caller, current
        return current

    def _do(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Start(lane, body):
                    self._spawn(self._start(lane, body), lane=(lane,))
                case Cancel(response_id, stream_id):
                    self._spawn(self._cancel(response_id, stream_id))
                case Resume():
                    self._spawn(self._resume(command))
                case SendError(data):
                    self._send_event(data)
                case Close():
                    self._close_with(command)

    def _send_event(self, data: bytes) -> None:
        if len(self._errors) >= MAX_ERRORS:
            self._close_with(Close(CLOSE_SLOW_READER, "error events are not read"))
            return
        self._errors.append(data)
        self._news.set()

    def _close_with(self, close: Close) -> None:
        self._close = self._close or close
        self._news.set()

    # ---- commands

    def _spawn(self, command: Coroutine[Any, Any, None], lane: tuple[str | None] | None = None) -> None:
        task = asyncio.create_task(command)
        self._commands.add(task)
        task.add_done_callback(lambda task: self._command_ended(task, lane))

    def _command_ended(self, task: asyncio.Task[None], lane: tuple[str | None] | None) -> None:
        self._commands.discard(task)
        self._news.set()
        if task.cancelled() or (error := task.exception()) is None:
            return
        logger.error("a websocket command failed", exc_info=error)
        told = ApiError("The server failed to do this.")
        if lane is not None:
            self._do(self._conversation.refused(lane[0], told))
        else:
            self._send_event(error_event(told))

    async def _start(self, lane: str | None, body: dict[str, Any]) -> None:
        unstored = self._unstored.parents
        try:
            if self._is_old:
                raise LifetimeOver
            configured = self._authenticate()
            started = await self._sender.create(
                configured, self._caller.tenant, body, stream_id=lane, unstored=unstored
            )
        except ApiError as e:
            self._do(self._conversation.refused(lane, e))
            return
        own = started if isinstance(started, Started) else None
        self._feed(Feed(started.source, lane, lane=(lane,), started=own))

    async def _cancel(self, response_id: str, stream_id: str | None) -> None:
        try:
            await self._service.cancel(self._caller.tenant, response_id)
        except ApiError as e:
            self._send_event(error_event(e, stream_id))

    async def _resume(self, command: Resume) -> None:
        try:
            followed = await self._service.follow(self._caller.tenant, command.response_id, command.starting_after)
        except ApiError as e:
            self._send_event(error_event(e, command.stream_id))
            return
        if sum(feed.lane is None for feed in self._feeds) >= MAX_RESUMED:
            told = RateLimited(
                f"{MAX_RESUMED} resumed answers are on their way on this connection, which is the most there can be.",
                code="too_many_requests",
                retry_after_s=1,
            )
            self._send_event(error_event(told, command.stream_id))
            return
        self._feed(Feed(followed.source, command.stream_id or followed.stream_id))

    # ---- writing

    def _feed(self, feed: Feed) -> None:
        self._feeds.add(feed)
        feed.stop_watching = feed.source.watch(lambda: self._wake(feed))
        self._wake(feed)

    def _wake(self, feed: Feed) -> None:
        """What is there goes out at once; where that needs waiting, or something else is being sent, by the writer."""
        can_send = self._writer_rests and self._writer.can_send
        if not can_send or (found := feed.read_now(READ_EVENTS)) is None:
            self._leave_to_writer(feed)
            return
        if found[0]:
            self._writer.send_now(feed.texts(found[0]))
        self._were_sent(feed, *found)

    def _leave_to_writer(self, feed: Feed) -> None:
        self._ready[feed] = None
        self._news.set()

    async def _write(self) -> None:
        try:
            while self._close is None or self._errors:
                if self._errors:
                    await self._writer.send(self._errors.popleft())
                elif self._ready:
                    feed = next(iter(self._ready))
                    del self._ready[feed]
                    await self._write_some(feed)
                elif self._close_at_rest is not None and not self._feeds and not self._commands:
                    self._close = self._close_at_rest
                else:
                    self._news.clear()
                    self._writer_rests = True
                    await self._news.wait()
                    self._writer_rests = False
        except WebSocketDisconnect:
            return
        except TimeoutError:
            self._close_with(Close(CLOSE_SLOW_READER, f"nothing was read for {self._writer.timeout_s:g} s"))
        assert self._close is not None
        await self._writer.close(self._close)

    async def _write_some(self, feed: Feed) -> None:
        try:
            events, has_ended = await feed.source.read(READ_EVENTS)
        except CursorLost as e:
            self._close_with(Close(CLOSE_SLOW_READER, f"read too slowly: event {e.after + 1} is not held any more"))
            return
        except EventsNotHeld as e:
            self._send_event(error_event(events_not_held(e.response_id), feed.stream_id))
            events, has_ended = [], True
        for text in feed.texts(events):
            await self._writer.send(text)
        self._were_sent(feed, events, has_ended)

    def _were_sent(self, feed: Feed, events: Sequence[LoggedEvent], has_ended: bool) -> None:
        if has_ended:
            self._feed_ended(feed)
        elif len(events) == READ_EVENTS:
            self._leave_to_writer(feed)

    def _feed_ended(self, feed: Feed) -> None:
        self._feeds.discard(feed)
        self._ready.pop(feed, None)
        feed.stop_watching()
        if self._close_at_rest is not None:
            self._news.set()
        if feed.lane is None:
            return
        self._unstored.ended(feed.lane[0], feed.started)
        self._do(self._conversation.sent(feed.lane[0]))
