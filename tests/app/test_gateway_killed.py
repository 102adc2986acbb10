"""A gateway process is killed with answers under way: each comes to its end on the other one, unbroken."""

import asyncio
import json
import os
import signal
from collections.abc import Callable

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from tests.app.stateful_gateway import TERMINAL, assert_contiguous, deltas, output_text
from tests.app.supervised import Running, start, until

__all__ = ["start"]

WORDS = [word for number in range(400) for word in (f"word{number} ", {"pause": 0.04})]
TEXT = "".join(word for word in WORDS if isinstance(word, str))


class Client:
    """One answer over websockets, gone on with after each lost connection."""

    def __init__(self, server: Running) -> None:
        self.events: list[dict[str, object]] = []
        self.num_cuts = 0
        self._url = server.options.url.replace("http", "ws") + "/v1/responses"

    def _message(self) -> dict[str, object]:
        if not self.events:
            return {"type": "response.create", "model": "byte-model", "input": "hi"}
        created, last = self.events[0]["response"], self.events[-1]["sequence_number"]
        assert isinstance(created, dict)
        return {"type": "response.resume", "response_id": created["id"], "starting_after": last}

    async def read(self) -> None:
        while not self.events or self.events[-1]["type"] not in TERMINAL:
            try:
                async with connect(self._url, proxy=None) as ws:
                    await ws.send(json.dumps(self._message()))
                    async for frame in ws:
                        event = json.loads(frame)
                        if event["type"] == "error":
                            assert event["error"]["code"] == "shutting_down", event
                            break
                        self.events.append(event)
                        if event["type"] in TERMINAL:
                            return
            except (ConnectionClosed, InvalidStatus, OSError):
                pass
            self.num_cuts += 1
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_answers_of_a_gateway_that_is_killed_go_on_on_the_other(start: Callable[..., Running]) -> None:
    server = start(*WORDS, num_gateways=2)
    await server.ready()
    clients = [Client(server) for _ in range(12)]
    reading = [asyncio.create_task(client.read()) for client in clients]
    await until(lambda: all(len(client.events) > 8 for client in clients))
    # one that nobody reads
    async with httpx.AsyncClient(base_url=server.options.url, timeout=60, trust_env=False) as http:
        body = {"model": "byte-model", "input": "hi", "background": True}
        unread = [(await http.post("/v1/responses", json=body)).json()["id"] for _ in range(4)]
        for pid in server.pids("app.gateway"):
            os.kill(pid, signal.SIGKILL)
            await until(lambda p=pid: p not in server.pids("app.gateway"))  # type: ignore[misc]
            await until(lambda: len(server.pids("app.gateway")) == 2)
            if any(client.num_cuts for client in clients):
                break  # else all answers were on the other one
        else:
            raise AssertionError("no answer was cut")
        await asyncio.gather(*reading)
        for client in clients:
            assert_contiguous(client.events)
            assert deltas(client.events) == output_text(client.events[-1]["response"]) == TEXT
        async with asyncio.timeout(60):
            for response_id in unread:
                url = f"/v1/responses/{response_id}"
                while (stored := (await http.get(url)).json())["status"] == "in_progress":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                assert (stored["status"], output_text(stored)) == ("completed", TEXT)
