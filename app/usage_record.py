"""What one generation used: the row of the usage ledger."""

import csv
import datetime
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

Outcome = Literal["completed", "failed", "aborted"]
"""All choices came to their end; the generation failed; nobody wanted the rest."""


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One for each generation, whatever became of it. `prompt_tokens` is the sum of trunk, history and computed."""

    id: str
    """The response's."""
    created_at: str
    """When it was submitted: ISO 8601, UTC."""
    tenant: str
    assistant: str | None
    model: str
    outcome: Outcome
    prompt_tokens: int
    trunk_tokens: int
    """From the cache: of the assistant's prompt, shared by all its chats."""
    history_tokens: int
    """From the cache: of earlier requests in the same private scope."""
    computed_tokens: int
    output_tokens: int
    """Of all choices."""
    queue_ms: float
    """Until its first choice to say something had a place in the engine."""
    prefill_ms: float
    """From then to the first token."""
    decode_ms: float
    """From the first token to the last."""
    takeovers: int = 0
    """So many gateways have gone before it was at its end, and others went on with it."""

    @property
    def day(self) -> str:
        return self.created_at[:10]


CSV_HEAD = ",".join(UsageRecord.__struct_fields__)


def to_csv(record: UsageRecord) -> str:
    """One line, without its end."""
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(msgspec.structs.astuple(record))
    return text.getvalue()


def to_json(record: UsageRecord) -> bytes:
    """One line, without its end."""
    return msgspec.json.encode(record)


from_json = msgspec.json.Decoder(UsageRecord).decode
"""Raises msgspec.ValidationError or DecodeError."""


def iso_time(seconds: float) -> str:
    """Of seconds since 1970."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(slots=True)
class AnswerTimes:
    """When the tokens of one answer came, in seconds of `clock`. After a pause it is as if all had come later."""

    clock: Callable[[], float]
    begun: float
    first: float | None = None
    last: float | None = None
    queue_ms: float = 0.0
    paused_at: float = 0.0

    def pause(self) -> None:
        """From now until `go_on` no time passes for it."""
        self.paused_at = self.clock()

    def go_on(self) -> None:
        gap = self.clock() - self.paused_at
        self.begun += gap
        self.first = None if self.first is None else self.first + gap
        self.last = None if self.last is None else self.last + gap

    def restore(self, queue_ms: float, prefill_ms: float) -> None:
        """As another gateway has measured it."""
        self.queue_ms = queue_ms
        self.first = self.last = self.begun + (queue_ms + prefill_ms) / 1000

    def tokens_came(self, queue_ms: float | None) -> None:
        """`queue_ms`: as the engine says it with the first output of each request."""
        self.last = self.clock()
        if self.first is None:
            self.first = self.last
            self.queue_ms = min(queue_ms or 0.0, (self.first - self.begun) * 1000)

    @property
    def prefill_ms(self) -> float:
        return 0.0 if self.first is None else (self.first - self.begun) * 1000 - self.queue_ms

    @property
    def decode_ms(self) -> float:
        return 0.0 if self.first is None or self.last is None else max(self.last - self.first, 0.0) * 1000
