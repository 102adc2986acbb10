"""One scripted answer of the fake server: its numbered events, and whoever follows them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]
ENDINGS = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True)
class Hold:
    """The answer stands still here until the test releases it."""


@dataclass(frozen=True)
class Break:
    """The answer ends as `response.failed`."""

    code: str
    message: str


Step = str | Hold | Break


@dataclass(eq=False)
class FakeAnswer:
    """Says `steps`: each text is one delta, and one token of the usage."""

    id: str
    model: str
    steps: Sequence[Step]
    parent: str | None = None
    input_tokens: int = 840
    cached_tokens: int = 812
    events: list[Event] = field(default_factory=list)
    text: str = ""
    status: str = "in_progress"
    num_tokens: int = 0
    error: dict[str, str] | None = None
    released: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _cancelled: bool = False
    _has_ended: bool = False

    def response(self) -> dict[str, Any]:
        """The response object, as GET /v1/responses/{id} gives it."""
        ended = self.status != "in_progress"
        content = [{"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}]
        item = {
            "type": "message",
            "id": f"msg_{self.id}",
            "role": "assistant",
            "status": "completed",
            "content": content,
        }
        usage = {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens": self.num_tokens,
            "total_tokens": self.input_tokens + self.num_tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "status": self.status,
            "model": self.model,
            "previous_response_id": self.parent,
            "output": [item] if ended and self.text else [],
            "usage": usage if ended else None,
            "error": self.error,
            "incomplete_details": None,
        }

    async def run(self) -> None:
        """Says everything, or as far as the test lets it."""
        await self._append("response.created", response=self.response())
        await self._append("response.in_progress", response=self.response())
        for step in self.steps:
            if isinstance(step, Break):
                self.status, self.error = "failed", {"code": step.code, "message": step.message}
                await self._append("response.failed", response=self.response())
                return
            if isinstance(step, Hold):
                await self.released.wait()
                self.released.clear()
            if self._cancelled:
                break
            if isinstance(step, str):
                self.text += step
                self.num_tokens += 1
                await self._append("response.output_text.delta", item_id=f"msg_{self.id}", delta=step)
        if self._cancelled:
            self.status = "cancelled"
            await self._append("response.incomplete", response=self.response())
            return
        await self._append("response.output_text.done", item_id=f"msg_{self.id}", text=self.text)
        self.status = "completed"
        await self._append("response.completed", response=self.response())

    def cancel(self) -> None:
        """Ends the answer at its next step; one that stands at a Hold ends now."""
        self._cancelled = True
        self.released.set()

    async def follow(self, after: int) -> AsyncIterator[Event]:
        """The events after that number, then those to come, to the end."""
        position = after + 1
        while True:
            async with self._changed:
                while position >= len(self.events) and not self._has_ended:
                    await self._changed.wait()
            if position >= len(self.events):
                return
            yield self.events[position]
            position += 1

    async def _append(self, kind: str, **fields: Any) -> None:
        async with self._changed:
            self.events.append({"type": kind, "sequence_number": len(self.events), **fields})
            self._has_ended = kind in ENDINGS
            self._changed.notify_all()
