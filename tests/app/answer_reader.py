"""A reader of a stored answer who may be cut off and comes back, on this gateway or another one."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.app.fleet import Fleet
from tests.app.stateful_gateway import TERMINAL, assert_contiguous, deltas, output_text


class EventsLost(Exception):
    """The events of the answer are not held any more, while it runs or after that."""


@dataclass
class Reader:
    fleet: Fleet
    response_id: str
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1]["type"] in TERMINAL

    @property
    def last_number(self) -> int:
        return self.events[-1]["sequence_number"] if self.events else -1

    @property
    def text(self) -> str:
        return deltas(self.events)

    def take(self, event: dict[str, Any]) -> None:
        """The next one: none may be missing or come twice."""
        assert event["sequence_number"] == self.last_number + 1, (event, self.events[-3:])
        assert not self.has_ended, event
        self.events.append(event)

    async def read_on(self, gateway: str, most: int | None = None, pause_s: float = 0.0) -> bool:
        """From where it is until the end or for so many events; False where the connection is cut or refused.

        Raises EventsLost."""
        url = f"/v1/responses/{self.response_id}?stream=true&starting_after={self.last_number}"
        try:
            async with self.fleet.http(gateway).stream("GET", url) as answer:
                return await self.read_stream(answer, most, pause_s)
        except httpx.TransportError:
            return False

    async def read_stream(self, answer: httpx.Response, most: int | None = None, pause_s: float = 0.0) -> bool:
        """As `read_on`, what comes in an answer that has begun."""
        if answer.status_code == 503:
            return False
        if answer.status_code == 404:
            raise EventsLost(await answer.aread())
        assert answer.status_code == 200, await answer.aread()
        num_read = 0
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["type"] == "error":
                if event["code"] == "response_not_found":
                    raise EventsLost(event)
                return False
            self.take(event)
            num_read += 1
            if num_read == most:
                return True
            if pause_s:
                await asyncio.sleep(pause_s)
        return self.has_ended


async def check_whole(fleet: Fleet, *readers: Reader) -> dict[str, Any]:
    """All readers were given one and the same sequence of events, which tells what is stored; any gateway replays it.

    Gives what is stored."""
    response_id, events = readers[0].response_id, readers[0].events
    assert_contiguous(events)
    assert events[-1]["type"] in TERMINAL
    for reader in readers:
        assert reader.events == events
    for gateway in fleet.gateways:
        if gateway not in fleet.processes:
            continue
        again = Reader(fleet, response_id)
        assert await again.read_on(gateway), "the log is whole and any gateway reads it"
        assert again.events == events
        stored: dict[str, Any] = (await fleet.http(gateway).get(f"/v1/responses/{response_id}")).json()
        assert events[-1]["response"] == stored
        assert deltas(events) == output_text(stored)
    return stored
