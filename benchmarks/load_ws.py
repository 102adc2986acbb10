#!/usr/bin/env python3
"""Closed-loop load for any server of the Responses API's websocket, beside load.py.

    python -m benchmarks.load_ws --url ws://127.0.0.1:8000 --model m --concurrency 32 --requests 64 --max-tokens 64

Prints one JSON line with the names of load.py. One *chat* is a websocket on which --turns requests follow one another,
each on the answer before it; --requests counts chats, so requests sent = --requests x --turns. Every answer is checked:
each event there once and in order, and the text of the deltas that of the last events. What takes time is done after
the clock has stopped.
"""

import argparse
import gc
import itertools
import json
import select
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from benchmarks.answer_events import DELTA, BrokenStream, StreamedAnswer, is_last
from benchmarks.load import pct, question, system_prompt
from benchmarks.ws_client import Closed, WsClient

Frames = list[tuple[float, bytes]]
"""When each event came, in seconds of `time.monotonic`, and its JSON."""


@dataclass
class Exchange:
    """One request and what came of it."""

    sent: float
    frames: Frames = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.frames[-1][0] - self.sent


class Client(Protocol):
    """A connection on which answers are asked for, as `WsClient` is one."""

    def fileno(self) -> int: ...
    def send(self, text: str) -> None: ...
    def receive(self) -> list[bytes]: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Chat:
    """`bodies` gives the requests, each of the id of the answer before it."""

    client: Client
    bodies: list[Callable[[str | None], str]]
    exchanges: list[Exchange] = field(default_factory=list)

    def ask(self, previous_id: str | None = None) -> None:
        body = self.bodies.pop(0)(previous_id)
        self.exchanges.append(Exchange(time.monotonic()))
        self.client.send(body)

    def read(self) -> bool:
        """Takes what has come; whether the chat is over. Raises Closed."""
        frames = self.client.receive()
        now = time.monotonic()
        self.exchanges[-1].frames += [(now, frame) for frame in frames]
        if not frames or not is_last(frames[-1]):
            return False
        event = json.loads(frames[-1])
        if event["type"] == "error" or not self.bodies:
            return True
        self.ask(event["response"]["id"])
        return False


@dataclass
class Measured:
    """Of one answer that is whole; times in seconds."""

    ttft: float | None
    itl: list[float]
    latency: float
    answer: StreamedAnswer
    delta_times: list[float]


def measure(exchange: Exchange) -> Measured:
    """Raises BrokenStream."""
    events = [json.loads(data) for _, data in exchange.frames]
    answer = StreamedAnswer(events)
    times = [at for (at, _), event in zip(exchange.frames, events, strict=True) if event["type"] == DELTA]
    itl = [later - earlier for earlier, later in itertools.pairwise(times)]
    return Measured(times[0] - exchange.sent if times else None, itl, exchange.seconds, answer, times)


@dataclass
class Tally:
    chats: list[Chat]
    wall_s: float
    errors: list[str]
    """Of connections that ended too soon."""

    def measured(self) -> tuple[list[Measured], list[str]]:
        """Whole answers, and what is wrong with the others."""
        whole, errors = [], list(self.errors)
        for chat in self.chats:
            for exchange in chat.exchanges:
                try:
                    whole.append(measure(exchange))
                except BrokenStream as e:
                    errors.append(str(e))
        return whole, errors


def drive(chats: Sequence[Chat], concurrency: int | None = None, timeout_s: float = 900.0) -> Tally:
    """All chats to their ends, `concurrency` of them at once. Raises TimeoutError when nothing comes for so long.

    Garbage is looked for afterwards: what was received is hundreds of thousands of objects by then.
    """
    gc.disable()
    try:
        return _drive(chats, concurrency, timeout_s)
    finally:
        gc.enable()


def _drive(chats: Sequence[Chat], concurrency: int | None, timeout_s: float) -> Tally:
    waiting, errors, poll = list(reversed(chats)), [], select.epoll()
    running: dict[int, Chat] = {}

    def begin() -> None:
        chat = waiting.pop()
        running[chat.client.fileno()] = chat
        poll.register(chat.client.fileno(), select.EPOLLIN)
        chat.ask()

    start = time.monotonic()
    while waiting and len(running) < (concurrency or len(chats)):
        begin()
    while running:
        ready = poll.poll(timeout_s)
        if not ready:
            raise TimeoutError(f"nothing came for {timeout_s:g} s, {len(running)} chats are not at their end")
        for number, _ in ready:
            chat = running[number]
            try:
                is_over = chat.read()
            except (Closed, OSError) as e:
                errors.append(f"{type(e).__name__}: {e}")
                is_over = True
            if is_over:
                poll.unregister(number)
                del running[number]
                if waiting:
                    begin()
    poll.close()
    return Tally(list(chats), time.monotonic() - start, errors)


def create(model: str, text: str, **fields: Any) -> str:
    """A `response.create`; fields that are None are left out."""
    said = {name: value for name, value in fields.items() if value is not None}
    return json.dumps({"type": "response.create", "model": model, "input": text, **said})


def report(tally: Tally, label: str = "") -> dict[str, Any]:
    """With the names of load.py."""
    whole, errors = tally.measured()
    usages = [m.answer.response["usage"] for m in whole]
    tokens = sum(usage["output_tokens"] for usage in usages)
    events = sum(len(m.answer.events) for m in whole)

    def ms(values: list[float], p: float) -> float | None:
        found = pct(values, p)  # type: ignore[no-untyped-call]
        return None if found is None else round(1000 * found, 1)

    times = {
        "ttft": [m.ttft for m in whole if m.ttft is not None],
        "itl": [gap for m in whole for gap in m.itl],
        "latency": [m.latency for m in whole],
    }
    out = {
        "label": label,
        "completed": len(whole),
        "errors": len(errors),
        "output_tokens": tokens,
        "prompt_tokens": sum(usage["input_tokens"] for usage in usages),
        "cached_tokens": sum(usage["input_tokens_details"]["cached_tokens"] for usage in usages),
        "content_chunks": sum(len(m.delta_times) for m in whole),
        "events": events,
        "wall_s": round(tally.wall_s, 3),
        "tok_s": round(tokens / tally.wall_s, 2),
        "req_s": round(len(whole) / tally.wall_s, 3),
        "events_s": round(events / tally.wall_s, 1),
        **{f"{name}_p{p}_ms": ms(values, p) for name, values in times.items() for p in (50, 99)},
    }
    if errors:
        out["first_error"] = errors[0]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="ws://127.0.0.1:8000", help="base URL, without /v1")
    parser.add_argument("--model", default="m")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--concurrency", type=int, default=1, help="chats in flight at once")
    parser.add_argument("--requests", type=int, default=1, help="chats in all")
    parser.add_argument("--system-tokens", type=int, default=0)
    parser.add_argument("--tenants", type=int, default=1, help="different system prompts, round robin")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--store", action="store_true", help="answers are stored, and can be resumed")
    parser.add_argument("--seed", type=int, default=0, help="changes every prompt, so a new seed is a cold cache")
    parser.add_argument("--user-seed", type=int, help="changes the users' questions only (default: --seed)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds without an event")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON merged into every body")
    parser.add_argument("--label", default="")
    a = parser.parse_args()
    url, user_seed = urlsplit(a.url), a.seed if a.user_seed is None else a.user_seed
    headers = {"Authorization": f"Bearer {a.api_key}"} if a.api_key else {}

    def body(chat: int, turn: int, previous_id: str | None) -> str:
        return create(
            a.model,
            question(chat, turn, user_seed),  # type: ignore[no-untyped-call]
            instructions=system_prompt(a.system_tokens, chat % a.tenants, a.seed),  # type: ignore[no-untyped-call]
            previous_response_id=previous_id,
            max_output_tokens=a.max_tokens,
            temperature=a.temperature,
            ignore_eos=a.ignore_eos or None,
            store=a.store,
            **a.extra,
        )

    chats = [
        Chat(
            WsClient(url.hostname or "127.0.0.1", url.port or 80, headers=headers),
            [lambda previous_id, i=i, turn=turn: body(i, turn, previous_id) for turn in range(a.turns)],
        )
        for i in range(a.requests)
    ]
    out = report(drive(chats, a.concurrency, a.timeout), a.label)
    print(json.dumps(out), flush=True)
    sys.exit(1 if out["errors"] else 0)


if __name__ == "__main__":
    main()
