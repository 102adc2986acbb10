"""Clients who talk while gateways, engines and Redis are killed: they send again, come back, read slowly, regenerate.

The engines echo the last message, so each answer is known beforehand. A client remembers what it was given."""

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from tests.app.answer_reader import EventsLost, Reader
from tests.app.fleet import Fleet

WORDS = [
    "harbour",
    "lighthouse",
    "gull",
    "tide",
    "rope",
    "anchor",
    "mast",
    "keel",
    "fog",
    "bell",
    "ünïcödé",
    "灯台",
    "storm",
]
BEGUN_IN_DEPTH = 3
"""Turns of a chat, then a new one begins."""


@dataclass
class Story:
    """One message, sent once or several times under one key, and all that anybody was given of its answer."""

    key: str
    text: str
    parent: "Story | None"
    response_ids: set[str] = field(default_factory=set)
    readers: list[Reader] = field(default_factory=list)
    is_taken: asyncio.Event = field(default_factory=asyncio.Event)
    is_lost: bool = False
    """Somebody was told that its events are not held any more."""

    @property
    def response_id(self) -> str:
        (response_id,) = self.response_ids
        return response_id

    @property
    def is_completed(self) -> bool:
        return any(reader.events[-1]["type"] == "response.completed" for reader in self.readers if reader.events)

    def learn_id(self, event: dict[str, Any]) -> None:
        self.response_ids.add(event["response"]["id"])
        self.is_taken.set()
        assert len(self.response_ids) == 1, f"{self.key}: one message, several answers: {self.response_ids}"


@dataclass
class Client:
    fleet: Fleet
    name: str
    rnd: random.Random
    stops: asyncio.Event
    stories: list[Story] = field(default_factory=list)
    num_cuts: int = 0
    num_refusals: int = 0

    async def talk(self) -> None:
        """Chats of a few turns, one after another."""
        while not self.stops.is_set():
            parent: Story | None = None
            for _ in range(BEGUN_IN_DEPTH):
                parent = await self._ask(parent)
                if parent is None or self.stops.is_set():
                    break

    async def _ask(self, parent: Story | None) -> Story | None:
        """One turn; the story if it can have another turn after it."""
        story = self._new_story(parent)
        senders = [self._send(story) for _ in range(self.rnd.choice((1, 1, 2)))]
        watchers = [self._watch(story) for _ in range(self.rnd.choice((0, 1)))]
        again = [self._regenerate(parent)] if parent is not None and self.rnd.random() < 0.3 else []
        await asyncio.gather(*senders, *watchers, *again)
        return story if story.is_completed else None

    def _new_story(self, parent: Story | None) -> Story:
        number = len(self.stories)
        words = " ".join(self.rnd.choices(WORDS, k=self.rnd.randint(3, 25)))
        story = Story(f"{self.name}-{number}", f"{self.name}.{number}: {words}", parent)
        self.stories.append(story)
        return story

    async def _regenerate(self, parent: Story) -> None:
        """Another answer after the same turn, while the first one is being read."""
        await self._send(self._new_story(parent))

    def _body(self, story: Story) -> dict[str, Any]:
        body = {"model": "byte-model", "input": story.text, "stream": True}
        if story.parent is not None:
            body["previous_response_id"] = story.parent.response_id
        return body

    def _gateway(self) -> str:
        return self.rnd.choice(self.fleet.gateways)

    async def _send(self, story: Story) -> None:
        """Until the message has been taken; then reads its answer to the end."""
        reader = Reader(self.fleet, "")
        story.readers.append(reader)
        while not reader.events:
            try:
                if self.rnd.random() < 0.7:
                    await self._send_http(story, reader)
                else:
                    await self._send_on_socket(story, reader)
            except (httpx.TransportError, ConnectionClosed, InvalidHandshake, OSError):
                self.num_cuts += 1
            except EventsLost:
                story.is_lost = True
            if not reader.events:
                self.num_refusals += 1
                await asyncio.sleep(0.1)
        story.learn_id(reader.events[0])
        reader.response_id = story.response_id
        await self._read_to_end(story, reader)

    async def _send_http(self, story: Story, reader: Reader) -> None:
        headers = {"Idempotency-Key": story.key}
        http = self.fleet.http(self._gateway())
        async with http.stream("POST", "/v1/responses", json=self._body(story), headers=headers) as answer:
            if answer.status_code in (409, 503):
                _check_refusal(json.loads(await answer.aread())["error"])
                return
            await reader.read_stream(answer, self.rnd.choice((1, 5, 30, None)))

    async def _send_on_socket(self, story: Story, reader: Reader) -> None:
        most = self.rnd.choice((1, 5, 30, 10_000))
        message = {"type": "response.create", "client_message_id": story.key, **self._body(story)}
        async with self.fleet.socket(self._gateway()) as ws:
            await ws.send(json.dumps(message))
            while not reader.has_ended and len(reader.events) < most:
                event = json.loads(await ws.recv())
                event.pop("stream_id", None)
                if event["type"] == "error":
                    _check_refusal(event["error"])
                    return
                if event["type"] != "reconnect":
                    reader.take(event)

    async def _watch(self, story: Story) -> None:
        """A second reader, from the first event on and as far as it can without being cut."""
        await story.is_taken.wait()
        reader = Reader(self.fleet, story.response_id)
        story.readers.append(reader)
        await self._read_to_end(story, reader, is_steady=True)

    async def _read_to_end(self, story: Story, reader: Reader, *, is_steady: bool = False) -> None:
        while not reader.has_ended:
            most = None if is_steady else self.rnd.choice((1, 10, 50, None))
            pause_s = 0.0 if is_steady else self.rnd.choice((0.0, 0.0, 0.05))
            try:
                if not await reader.read_on(self._gateway(), most, pause_s):
                    self.num_cuts += 1
                    await asyncio.sleep(0.05)
            except EventsLost:
                story.is_lost = True
                return


REFUSALS = {"idempotency_key_in_use", "engine_unavailable", "session_store_unavailable", "shutting_down"}


def _check_refusal(error: dict[str, Any]) -> None:
    """What may be sent again a moment later."""
    assert error["code"] in REFUSALS, error
