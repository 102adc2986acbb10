"""One websocket of the Responses API, without the socket: messages in, commands and error events out.

Lanes: requests with the same `stream_id` (none is a lane too) are answered one after the other, in order; lanes run
side by side. A lane's next request starts when everything of its last one has been sent, so that a slow reader holds
up its own work only. A message that is wrong gives one error event and changes nothing.

Whoever drives it carries out the commands and reports back with `refused` and `sent`.
"""

import secrets
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.errors import ApiError, BadRequest, RateLimited
from app.events import to_json
from app.json_body import parse_json
from app.request_params import unsupported

MAX_LANES = 256
MAX_WAITING = 1024
MAX_WAITING_BYTES = 8 * 2**20
MAX_STREAM_ID_CHARS = 256
MAX_RECONNECT_MS = 500

CLOSE_GOING_AWAY = 1001
CLOSE_UNSUPPORTED = 1003
CLOSE_POLICY_VIOLATION = 1008
CLOSE_RESTART = 1012
CLOSE_SLOW_READER = 4008


@dataclass(frozen=True, slots=True)
class Start:
    """Create a response with this body for a lane."""

    lane: str | None
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    response_id: str
    stream_id: str | None


@dataclass(frozen=True, slots=True)
class Resume:
    response_id: str
    starting_after: int
    stream_id: str | None
    """The lane to be named in the events; None: the one that asked for the response."""


@dataclass(frozen=True, slots=True)
class SendError:
    data: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Close the socket with this, after the error events that came before."""

    code: int
    reason: str


Command = Start | Cancel | Resume | SendError | Close


@dataclass(slots=True)
class _Lane:
    """A lane that is busy; an idle one is not kept."""

    waiting: deque[bytes] = field(default_factory=deque)
    """Messages in UTF-8, as they came: parsed they would take many times their size."""


class Conversation:
    """Give it each message; carry out what it returns, in order."""

    def __init__(self) -> None:
        self._lanes: dict[str | None, _Lane] = {}
        self._num_waiting = 0
        self._num_waiting_bytes = 0
        self._is_closed = False

    @property
    def num_lanes(self) -> int:
        """Lanes that have something under way."""
        return len(self._lanes)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their lane."""
        return self._num_waiting

    def receive_text(self, text: str) -> Sequence[Command]:
        if self._is_closed:
            return ()
        stream_id: str | None = None
        try:
            message = parse_json(text)
            stream_id = _stream_id(message)
            return self._receive(message, stream_id, text)
        except ApiError as e:
            return (SendError(error_event(e, stream_id)),)

    def receive_bytes(self) -> Sequence[Command]:
        """A binary message: there is none in this protocol."""
        if self._is_closed:
            return ()
        self._is_closed = True
        error = BadRequest("Messages are JSON in text frames, got a binary frame.", code="invalid_frame")
        return (SendError(error_event(error)), Close(CLOSE_UNSUPPORTED, "text frames only"))

    def refused(self, lane: str | None, error: ApiError) -> Sequence[Command]:
        """The lane's request was not started."""
        return (SendError(error_event(error, lane)), *self._go_on(lane))

    def sent(self, lane: str | None) -> Sequence[Command]:
        """The last event of the lane's response has been sent (or can never be)."""
        return self._go_on(lane)

    def _receive(self, message: dict[str, Any], stream_id: str | None, text: str) -> Sequence[Command]:
        kind = message.get("type")
        match kind:
            case "response.create":
                return self._create(message, stream_id, text)
            case "response.cancel":
                return (Cancel(_response_id(message), stream_id),)
            case "response.resume":
                return (Resume(_response_id(message), _starting_after(message), stream_id),)
            case "response.steer":
                raise unsupported("type")
            case None:
                raise BadRequest("The message has no 'type'.", code="missing_required_parameter", param="type")
        raise BadRequest(f"Unknown message type {_shown(kind)}.", code="unknown_message_type", param="type")

    def _create(self, message: dict[str, Any], lane: str | None, text: str) -> Sequence[Command]:
        if message.get("background"):
            raise unsupported("background")
        busy = self._lanes.get(lane)
        if busy is None:
            if len(self._lanes) >= MAX_LANES:
                raise _too_many(f"{MAX_LANES} lanes are busy on this connection, which is the most there can be.")
            self._lanes[lane] = _Lane()
            return (Start(lane, _body(message)),)
        raw = text.encode()
        if self._num_waiting >= MAX_WAITING or self._num_waiting_bytes + len(raw) > MAX_WAITING_BYTES:
            raise _too_many(f"{self._num_waiting} requests wait on this connection, more cannot be kept.")
        busy.waiting.append(raw)
        self._num_waiting += 1
        self._num_waiting_bytes += len(raw)
        return ()

    def _go_on(self, lane: str | None) -> Sequence[Command]:
        busy = self._lanes[lane]
        if not busy.waiting:
            del self._lanes[lane]
            return ()
        raw = busy.waiting.popleft()
        self._num_waiting -= 1
        self._num_waiting_bytes -= len(raw)
        return (Start(lane, _body(parse_json(raw))),)


def _body(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name not in ("type", "stream_id", "stream")}


def error_event(error: ApiError, stream_id: str | None = None) -> bytes:
    """On a websocket an error event is nested, and it stands outside the numbering of any response. Where it says when
    to try again, it says so as over HTTP: in `headers`."""
    event: dict[str, Any] = {"type": "error", "status": error.status, "error": error.error()}
    if "Retry-After" in error.headers:
        event["headers"] = error.headers
    if stream_id is not None:
        event["stream_id"] = stream_id
    return to_json(event)


def reconnect_event(reason: Literal["shutting_down", "lifetime"]) -> bytes:
    """Asks the client for a new connection, after a pause that keeps all clients from coming at the same moment."""
    return to_json({"type": "reconnect", "reason": reason, "after_ms": secrets.randbelow(MAX_RECONNECT_MS)})


def _stream_id(message: dict[str, Any]) -> str | None:
    value = message.get("stream_id")
    if value is None or (isinstance(value, str) and 1 <= len(value) <= MAX_STREAM_ID_CHARS):
        return value
    wanted = f"a string of 1 to {MAX_STREAM_ID_CHARS} characters"
    raise BadRequest(f"'stream_id' must be {wanted}, got {_shown(value)}.", code="invalid_value", param="stream_id")


def _response_id(message: dict[str, Any]) -> str:
    value = message.get("response_id")
    if value is None:
        raise BadRequest("Missing required parameter: 'response_id'.", code="missing_required_parameter",
                         param="response_id")  # fmt: skip
    if not isinstance(value, str):
        raise BadRequest(f"'response_id' must be a string, got {_shown(value)}.", code="invalid_type",
                         param="response_id")  # fmt: skip
    return value


def _starting_after(message: dict[str, Any]) -> int:
    value = message.get("starting_after", -1)
    if isinstance(value, int) and not isinstance(value, bool) and value >= -1:
        return value
    raise BadRequest(f"'starting_after' must be an integer from -1, got {_shown(value)}.", code="invalid_value",
                     param="starting_after")  # fmt: skip


def _too_many(message: str) -> RateLimited:
    return RateLimited(message, code="too_many_requests", retry_after_s=1)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
