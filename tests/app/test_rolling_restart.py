"""Two gateways under one supervisor are ended one after the other while clients go on: no answer is lost."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.app.stateful_gateway import TERMINAL, assert_contiguous, deltas, output_text
from tests.app.supervised import Running, start, until

__all__ = ["start"]

WORDS = [word for number in range(20) for word in (f"word{number} ", {"pause": 0.02})]
TEXT = "".join(word for word in WORDS if isinstance(word, str))


@dataclass
class Client:
    """Asks again and again, and once more where it was refused before an answer began."""

    server: Running
    num_answers: int = 0
    num_refused: int = 0
    stops: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream_chats(self) -> None:
        while not self.stops.is_set():
            await self._chat()

    async def _chat(self) -> None:
        body = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        events = []
        async with (
            httpx.AsyncClient(timeout=60, trust_env=False) as http,
            http.stream("POST", f"{self.server.options.url}/v1/chat/completions", json=body) as answer,
        ):
            if answer.status_code == 503:
                assert json.loads(await answer.aread())["error"]["code"] == "shutting_down"
                self.num_refused += 1
                return
            assert answer.status_code == 200
            events = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert events[-1] == "[DONE]", events
        choices = [json.loads(event)["choices"][0] for event in events[:-1]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == TEXT
        assert choices[-1]["finish_reason"] == "stop"
        self.num_answers += 1

    async def talk(self) -> None:
        """Over one websocket, until the gateway asks for another one."""
        url = self.server.options.url.replace("http", "ws") + "/v1/responses"
        while not self.stops.is_set():
            try:
                async with connect(url, proxy=None) as ws:
                    while not self.stops.is_set() and await self._answer(ws):
                        pass
            except InvalidStatus as e:
                if e.response.status_code != 503:
                    raise
                self.num_refused += 1

    async def _answer(self, ws: connect) -> bool:
        """False: this socket takes no further message."""
        may_go_on = True
        events = []
        try:
            await ws.send(json.dumps({"type": "response.create", "model": "byte-model", "input": "hi"}))
            while not events or events[-1]["type"] not in TERMINAL:
                event = json.loads(await ws.recv())
                if event["type"] == "reconnect":
                    may_go_on = False
                elif event["type"] == "error":
                    assert event["error"]["code"] == "shutting_down"
                    self.num_refused += 1
                    return False
                else:
                    events.append(event)
        except ConnectionClosed:
            if events:  # an answer was cut
                raise
            self.num_refused += 1
            return False
        assert_contiguous(events)
        assert deltas(events) == output_text(events[-1]["response"]) == TEXT
        self.num_answers += 1
        return may_go_on


async def test_a_rolling_restart_under_load_loses_no_answer(start: Callable[..., Running]) -> None:
    server = start(*WORDS, num_gateways=2)
    await server.ready()
    clients = [Client(server) for _ in range(12)]
    tasks = [asyncio.create_task(client.talk() if i % 2 else client.stream_chats()) for i, client in enumerate(clients)]

    def num_answers() -> int:
        for task in tasks:
            assert not task.done(), task.result()
        return sum(client.num_answers for client in clients)

    await until(lambda: num_answers() >= 12)
    for pid in server.pids("app.gateway"):
        before = num_answers()
        os.kill(pid, signal.SIGTERM)
        await until(lambda p=pid: p not in server.pids("app.gateway"))  # type: ignore[misc]
        await until(lambda: len(server.pids("app.gateway")) == 2)
        await until(lambda n=before: num_answers() >= n + 24)  # type: ignore[misc]
    for client in clients:
        client.stops.set()
    await asyncio.gather(*tasks)
    assert sorted(server.reports[1:]) == [
        f"gateway {i} ended with exit code 0: starting it again in 0.1 s" for i in (1, 2)
    ]
