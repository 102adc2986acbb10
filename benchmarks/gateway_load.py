"""What one gateway process carries: events a second, latency, websockets, slow readers, resumes; without a model.

    nice -n -10 python -m benchmarks.gateway_load [rate stored idle slow resume sse]
        --output benchmarks/results/NAME.json

docs/benchmarks.md says what each name means and which bar it is held to; the exit code is 1 if one does not hold.
"""

import argparse
import itertools
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from redis import Redis

from benchmarks.crowd import Crowd
from benchmarks.document import Document, all_hold, bar, new_document, write
from benchmarks.gateway_processes import gateway, keep_apart, plain
from benchmarks.load_ws import Chat, drive
from benchmarks.sse_client import SseClient
from benchmarks.wave import Wave, body, record_frames, wave
from benchmarks.ws_client import WsClient

STREAMS = 500
RATE = 20_000
SECONDS = 5
MAX_ADDED_P99_MS = 30.0
LEAST_SHARE_OF_PLAIN = 0.5
IDLE_SOCKETS = 10_000
IDLE_MESSAGES = 100
MAX_IDLE_KIB = 40.0
MAX_IDLE_TTFT_MS = 50.0
SLOW_READERS = 4
SLOW_TOKENS = 8_000
SLOW_OTHERS = 100
SLOW_BUFFER_BYTES = 4096
MAX_SLOW_MIB = 1.0
RESUME_EVENTS = 2_000
RESUME_TOKENS = 2_200
"""Some are merged, as each append takes a while."""
RESUMES = 20
MAX_RESUME_MS = 20.0


def rate(folder: Path, core: int | None, runs: int) -> Document:
    """store: false. The gateway, and by turns the plain server with the same frames."""
    num_tokens = RATE * SECONDS // STREAMS
    with ExitStack() as stack:
        ours = stack.enter_context(gateway(folder, core))
        wave(ours, STREAMS, 20)
        theirs = stack.enter_context(plain(folder, record_frames(ours, num_tokens), core))
        wave(theirs, STREAMS, num_tokens)
        found: dict[str, dict[str, list[Document]]] = {"paced": {}, "highest": {}}
        for _ in range(runs):
            for pace, interval_s in (("paced", STREAMS / RATE), ("highest", 0.0)):
                for name, served in (("plain", theirs), ("gateway", ours)):
                    measured = wave(served, STREAMS, num_tokens, interval_s=interval_s).document()
                    print(name, pace, measured, file=sys.stderr)
                    found[pace].setdefault(name, []).append(measured)
    paced, highest = ({name: medians(runs) for name, runs in found[pace].items()} for pace in ("paced", "highest"))
    shares = [
        a["deltas_per_s"] / b["deltas_per_s"]
        for a, b in zip(found["highest"]["gateway"], found["highest"]["plain"], strict=True)
    ]
    return {
        "streams": STREAMS,
        "paced": paced,
        "highest": highest,
        "latency_p99_ms": bar(paced["gateway"]["latency_p99_ms"], at_most=MAX_ADDED_P99_MS),
        "deltas_per_s": bar(paced["gateway"]["deltas_per_s"], at_least=0.99 * RATE),
        "one_token_deltas": bar(paced["gateway"]["one_token_deltas"], at_least=0.99),
        "share_of_plain": bar(statistics.median(shares), at_least=LEAST_SHARE_OF_PLAIN),
        "runs": found,
    }


def stored(folder: Path, core: int | None, runs: int) -> Document:
    """store: true. Each event is in Redis, and on its disk, before it is sent."""
    num_tokens = RATE * SECONDS // STREAMS
    found: dict[str, list[Document]] = {"paced": [], "highest": []}
    with gateway(folder, core) as served, Redis.from_url(f"unix://{folder}/valkey.sock") as redis:
        wave(served, STREAMS, 20, store=True)
        for _ in range(runs):
            for pace, interval_s in (("paced", STREAMS / RATE), ("highest", 0.0)):
                before = _calls(redis)
                measured = wave(served, STREAMS, num_tokens, interval_s=interval_s, store=True)
                calls = {name: number - before.get(name, 0) for name, number in _calls(redis).items()}
                figures = {
                    **measured.document(),
                    "appends_per_s": round(calls["xadd"] / measured.tally.wall_s, 1),
                    "events_per_append": round(calls["xadd"] / calls["evalsha"], 2),
                }
                print("stored", pace, figures, file=sys.stderr)
                found[pace].append(figures)
    return {"streams": STREAMS, **{pace: medians(runs) for pace, runs in found.items()}, "runs": found}


def _calls(redis: Redis) -> dict[str, int]:
    """How often each command was run."""
    stats: dict[str, dict[str, int]] = redis.info("commandstats")
    return {name.removeprefix("cmdstat_"): found["calls"] for name, found in stats.items()}


def sse(folder: Path, core: int | None, runs: int) -> Document:
    """store: false, as server-sent events; for information."""
    num_tokens = RATE * SECONDS // STREAMS
    found: dict[str, list[Document]] = {"paced": [], "highest": []}
    with gateway(folder, core) as served:
        wave(served, STREAMS, 20, connect=SseClient)
        for _ in range(runs):
            for pace, interval_s in (("paced", STREAMS / RATE), ("highest", 0.0)):
                measured = wave(served, STREAMS, num_tokens, interval_s=interval_s, connect=SseClient).document()
                print("sse", pace, measured, file=sys.stderr)
                found[pace].append(measured)
    return {"streams": STREAMS, **{pace: medians(runs) for pace, runs in found.items()}, "runs": found}


def idle(folder: Path, core: int | None, runs: int) -> Document:
    """Websockets on which nothing happens, and a message on one of them now and then."""
    with gateway(folder, core) as served:
        wave(served, 50, 20)
        before = served.rss_bytes
        sources = itertools.cycle(("127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.4"))
        clients = [WsClient("127.0.0.1", served.port, source=next(sources)) for _ in range(IDLE_SOCKETS)]
        each_bytes = (served.rss_bytes - before) / IDLE_SOCKETS
        crowd, ttft_ms = Crowd(clients), []
        for client in random.Random(1).sample(clients, IDLE_MESSAGES):
            ttft_ms.append(1000 * crowd.ask(client, body(20)))
            crowd.rest(0.02)
        for client in clients:
            client.close()
    return {
        "websockets": IDLE_SOCKETS,
        "kib_each": bar(each_bytes / 1024, at_most=MAX_IDLE_KIB),
        "messages": IDLE_MESSAGES,
        "ttft_p50_ms": round(statistics.median(ttft_ms), 2),
        "ttft_max_ms": bar(max(ttft_ms), at_most=MAX_IDLE_TTFT_MS),
    }


def slow(folder: Path, core: int | None, runs: int) -> Document:
    """Readers that stop within a long answer, beside others that read."""
    seconds = 4
    steps_per_s = 40
    with gateway(folder, core) as served:

        def others() -> Wave:
            return wave(served, SLOW_OTHERS, seconds * steps_per_s, interval_s=1 / steps_per_s)

        said = body(SLOW_TOKENS, interval_s=seconds / SLOW_TOKENS)
        for _ in range(2):  # what one answer of that length takes while somebody reads it
            others()
            drive([Chat(WsClient("127.0.0.1", served.port), [lambda _: said]) for _ in range(SLOW_READERS)])
        alone = others()
        before = served.rss_bytes
        stopped = [
            WsClient("127.0.0.1", served.port, receive_buffer_bytes=SLOW_BUFFER_BYTES) for _ in range(SLOW_READERS)
        ]
        for client in stopped:
            client.send(said)
        beside = others()
        each_bytes = (served.rss_bytes - before) / SLOW_READERS
        for client in stopped:
            client.close()
    return {
        "readers_that_stop": SLOW_READERS,
        "tokens_they_leave": SLOW_TOKENS,
        "mib_each": bar(each_bytes / 2**20, at_most=MAX_SLOW_MIB),
        "others": {"alone": alone.document(), "beside_them": beside.document()},
        "others_one_token_deltas": bar(beside.document()["one_token_deltas"], at_least=0.99),
    }


def resume(folder: Path, core: int | None, runs: int) -> Document:
    """A long answer that has ended, from its first event on, on a new websocket."""
    first_ms, all_ms = [], []
    with gateway(folder, core) as served:
        chat = Chat(WsClient("127.0.0.1", served.port), [lambda _: body(RESUME_TOKENS, interval_s=0.005, store=True)])
        whole, errors = drive([chat]).measured()
        if errors or len(whole[0].answer.events) < RESUME_EVENTS:
            raise RuntimeError(f"expected {RESUME_EVENTS} events at least: {errors or 'too many were merged'}")
        response_id = whole[0].answer.response["id"]
        said = json.dumps({"type": "response.resume", "response_id": response_id, "starting_after": -1})
        for _ in range(RESUMES):
            again = Chat(WsClient("127.0.0.1", served.port), [lambda _: said])
            resumed, errors = drive([again]).measured()
            if errors or resumed[0].answer != whole[0].answer:
                raise RuntimeError(f"another answer came: {errors}")
            exchange = again.exchanges[0]
            first_ms.append(1000 * (exchange.frames[0][0] - exchange.sent))
            all_ms.append(1000 * exchange.seconds)
            again.client.close()
    return {
        "events": len(whole[0].answer.events),
        "resumes": RESUMES,
        "first_event_p50_ms": round(statistics.median(first_ms), 2),
        "first_event_max_ms": bar(max(first_ms), at_most=MAX_RESUME_MS),
        "all_events_p50_ms": round(statistics.median(all_ms), 2),
    }


def medians(runs: list[Document]) -> Document:
    """Of each figure that all runs have."""
    names = [name for name in runs[0] if all(name in run for run in runs)]
    return {name: statistics.median(run[name] for run in runs) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measurements: dict[str, Callable[[Path, int | None, int], Document]] = {
        "rate": rate,
        "stored": stored,
        "idle": idle,
        "slow": slow,
        "resume": resume,
        "sse": sse,
    }
    parser.add_argument("what", nargs="*", default=list(measurements))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    if unknown := set(args.what) - measurements.keys():
        parser.error(f"unknown measurements: {', '.join(sorted(unknown))}; known are {', '.join(measurements)}")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    core = keep_apart()
    document: dict[str, Any] = new_document()
    for what in args.what:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tl") as folder:
            document[what] = measurements[what](Path(folder), core, args.runs)
        print(f"{what}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    write(document, args.output)
    sys.exit(0 if all_hold(document) else 1)


if __name__ == "__main__":
    main()
