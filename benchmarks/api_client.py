"""A client of a served model that measures: streamed chats, and the engine's counters before and after."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.served import Server

POLL_S = 0.02
STALL_S = 900.0
"""Without a byte for so long a request has failed."""


@dataclass(frozen=True)
class Answer:
    ttft_s: float
    """From the request's first byte to the first event."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class ApiClient:
    """Of one tenant. `admin_key`: for the counters."""

    def __init__(self, http: aiohttp.ClientSession, server: Server, key: str, admin_key: str) -> None:
        self._http = http
        self._url = server.url
        self._model = server.model
        self._headers = {"Authorization": f"Bearer {key}"}
        self._admin_headers = {"Authorization": f"Bearer {admin_key}"}

    async def chat(self, messages: list[dict[str, str]], *, assistant: str | None = None, **fields: Any) -> Answer:
        """Streams one greedy answer. Raises RuntimeError for anything but a whole one."""
        body = {
            "model": self._model if assistant is None else f"{self._model}:{assistant}",
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            **fields,
        }
        first, usage, data = None, None, b""
        start = time.perf_counter()
        async with self._http.post(
            self._url + "/v1/chat/completions", data=json.dumps(body), headers=self._headers
        ) as answer:
            if answer.status != 200:
                raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue  # the end of an event, or a comment
                first = first or time.perf_counter()
                data = line.removeprefix(b"data: ").strip()
                if b'"error"' in data:
                    raise RuntimeError(data.decode())
                if data != b"[DONE]":
                    usage = json.loads(data).get("usage") or usage
        if first is None or usage is None or data != b"[DONE]":
            raise RuntimeError(f"the answer ended with {data[:300]!r}, expected usage and [DONE]")
        return Answer(
            ttft_s=first - start,
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            output_tokens=usage["completion_tokens"],
        )

    async def stats(self) -> dict[str, Any]:
        while True:
            async with self._http.get(self._url + "/admin/stats", headers=self._admin_headers) as answer:
                if answer.status == 200:
                    return dict(await answer.json())
                if answer.status != 503:  # which an engine in a long step may give
                    raise RuntimeError(f"HTTP {answer.status}: {(await answer.text())[:300]}")

    async def prefill_tokens(self) -> int:
        return int((await self.stats())["engine"]["prefill_tokens"])

    async def wait_until_idle(self) -> dict[str, Any]:
        """The counters once nothing runs or waits, and no block is held but by a pin."""
        while True:
            stats = await self.stats()
            blocks, requests = stats["blocks"], stats["requests"]
            if (requests["running"], requests["waiting"], blocks["referenced"]) == (0, 0, blocks["pinned"]):
                return stats
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def clients(server: Server, *keys: str, admin_key: str) -> AsyncIterator[list[ApiClient]]:
    """One for each tenant's key, over connections of their own."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=STALL_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as http:
        yield [ApiClient(http, server, key, admin_key) for key in keys]
