"""The Responses API on the wire: response object, items and events, in the shapes that OpenAI's SDK validates.

Events are built without a number; `number_and_encode` gives it, once, when the event is appended to its log. Fields
that the SDK's models require are always written, also where this service has nothing to say (empty `logprobs`, zero
`reasoning_tokens`).
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from app.cached_tokens import CachedTokens

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]

RUNNING: tuple[Status, ...] = ("queued", "in_progress")


# ---- objects


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class Logprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Logprob] = []


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class Item(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """One message: what the client sent (`input_text` parts) or an answer, sent or given (`output_text` parts)."""

    id: str
    role: Literal["user", "system", "developer", "assistant"]
    content: list[InputText | OutputText]
    status: ItemStatus = "completed"

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int
    cached_tokens_details: CachedTokens | None = None
    """Ours: where they came from. None in what was stored before this was kept."""
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int

    @classmethod
    def of(cls, num_prompt_tokens: int, cached: CachedTokens, num_output_tokens: int) -> "Usage":
        return cls(
            input_tokens=num_prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached.total, cached_tokens_details=cached),
            output_tokens=num_output_tokens,
            total_tokens=num_prompt_tokens + num_output_tokens,
        )


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed. The SDK knows a closed list of codes; `server_error` is the one that fits here."""

    message: str
    code: str = "server_error"


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    reason: Literal["max_output_tokens", "not_resumed", "log_lost"]
    """`not_resumed`: it was paused because nobody read it, and nobody came back in time. `log_lost`: its gateway has
    gone, and the session store does not hold all of its events."""


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant that a response was made with."""

    id: str
    version: str | None = None
    variables: dict[str, str] | None = None


class ConversationRef(msgspec.Struct, frozen=True, kw_only=True):
    """The conversation that a response was asked for in."""

    id: str


class TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"): ...


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat = TextFormat()


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """What clients see of a response. Times are whole seconds since 1970."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool = False
    conversation: ConversationRef | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt: Prompt | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool = True
    temperature: float | None = None
    text: TextConfig = TextConfig()
    tool_choice: str = "auto"
    tools: list[Any] = []
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    truncated_input_tokens: int = 0
    """Ours: so many tokens of the oldest turns were left out of the prompt."""
    usage: Usage | None = None
    user: str | None = None

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING


# ---- events


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = -1
    """-1 until the event is appended to its log."""


class _ResponseEvent(Event, kw_only=True):
    response: ResponseObject


class Created(_ResponseEvent, kw_only=True, tag="response.created"): ...


class InProgress(_ResponseEvent, kw_only=True, tag="response.in_progress"): ...


class Completed(_ResponseEvent, kw_only=True, tag="response.completed"): ...


class Incomplete(_ResponseEvent, kw_only=True, tag="response.incomplete"):
    """Cut by a limit, or cancelled: `response.status` says which. There is no event for a cancel of its own."""


class Failed(_ResponseEvent, kw_only=True, tag="response.failed"): ...


class OutputItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int = 0
    item: Item


class OutputItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int = 0
    item: Item


class _PartEvent(Event, kw_only=True):
    item_id: str
    output_index: int = 0
    content_index: int = 0


class ContentPartAdded(_PartEvent, kw_only=True, tag="response.content_part.added"):
    part: OutputText


class TextDelta(_PartEvent, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[Logprob] = []


class TextDone(_PartEvent, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[Logprob] = []


class ContentPartDone(_PartEvent, kw_only=True, tag="response.content_part.done"):
    part: OutputText


def ends_of_item(item: Item) -> tuple[Event, ...]:
    """What is said of an item when its text is whole."""
    part = item.content[0]
    assert isinstance(part, OutputText), part
    return (
        TextDone(item_id=item.id, text=part.text, logprobs=part.logprobs),
        ContentPartDone(item_id=item.id, part=part),
        OutputItemDone(item=item),
    )


TERMINAL = (Completed, Incomplete, Failed)
TERMINAL_TYPES = frozenset(event.__struct_config__.tag for event in TERMINAL)


class LoggedEvent(msgspec.Struct, frozen=True):
    """An event as it stands in a log: numbered, encoded, never changed again."""

    number: int
    type: str
    data: bytes
    """One JSON object in UTF-8."""
    is_terminal: bool
    progress: bytes = b""
    """What its text stands for, as app/progress.py writes it; empty where nothing was said. Readers do not see it."""


_encoder = msgspec.json.Encoder()


def to_json(value: Any) -> bytes:
    return _encoder.encode(value)


def number_and_encode(event: Event, number: int, progress: bytes = b"") -> LoggedEvent:
    """Numbers an event that has no number yet. The event may not be changed after this."""
    if event.sequence_number != -1:
        raise ValueError(f"event has number {event.sequence_number} already, got {number}")
    event.sequence_number = number
    event_type = event.__struct_config__.tag
    assert isinstance(event_type, str)
    return LoggedEvent(number, event_type, to_json(event), isinstance(event, TERMINAL), progress)


def can_merge(earlier: Event, later: Event) -> bool:
    """Whether both are text of one part, so that one event can say both."""
    return isinstance(earlier, TextDelta) and isinstance(later, TextDelta) and earlier.item_id == later.item_id


def merge(events: Sequence[Event]) -> Event:
    """One event that says all of these: at least one, and each can merge with the one before it."""
    if len(events) == 1:
        return events[0]
    deltas = [event for event in events if isinstance(event, TextDelta)]
    return msgspec.structs.replace(
        deltas[0],
        delta="".join(delta.delta for delta in deltas),
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
    )


def with_stream_id(data: bytes, stream_id: str) -> bytes:
    """The encoded event as a websocket lane carries it."""
    return data[:-1] + b',"stream_id":' + to_json(stream_id) + b"}"
