"""Times an append to the event log in the embedded server under each of its `appendfsync` settings.

    python -m benchmarks.log_append [--appends 500] [--rounds 3] [--output F]

One append is what a gateway sends at once: one event for each of so many answers, one script each, in one pipeline. It
waits for the reply before the next one, as the gateway does. Settings take turns. With `always` a write is on disk
before it is acknowledged; with the others it may only be in the system's memory, which survives the end of the server
but not that of the machine. Milliseconds.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from redis.exceptions import RedisError

from app.announcements import Announcements
from app.embedded_redis import EmbeddedRedis, find_server_program
from app.events import ResponseObject, TextDelta, number_and_encode
from app.ids import new_response_id
from app.redis_commands import RedisCommands
from app.redis_log import Append, Outcome, RedisEventLog
from app.response_node import ResponseNode
from app.sessions import Sessions
from benchmarks.document import Document, new_document, write

SETTINGS = ("always", "everysec", "no")
ANSWERS = (1, 32, 256)


@contextlib.asynccontextmanager
async def running(setting: str) -> AsyncIterator[str]:
    """The URL of a server of its own, as ours but for the setting."""
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        server = EmbeddedRedis(find_server_program(), Path(folder, "data"), Path(folder))
        server.prepare()
        command = server.command
        command[command.index("--appendfsync") + 1] = setting
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        try:
            yield server.url
        finally:
            process.terminate()
            await process.wait()


async def time_appends(url: str, num_answers: int, num_appends: int) -> list[float]:
    """Seconds of each append of one event to each of the answers."""
    commands = RedisCommands.connect(url)
    announcements = Announcements(commands.redis)
    try:
        await _until_it_answers(commands)
        sessions = Sessions(commands, owner="benchmark")
        log = RedisEventLog(commands, announcements, owner="benchmark")
        ids = [new_response_id() for _ in range(num_answers)]
        for response_id in ids:
            response = ResponseObject(id=str(response_id), created_at=1, status="in_progress", model="m")
            await sessions.create(ResponseNode(id=response_id, tenant="t", input=(), response=response))
        took = []
        for i in range(num_appends):
            event = number_and_encode(TextDelta(item_id="msg_1", delta=" word"), i)
            appends = [Append(str(response_id), [event], max(0, i - 64)) for response_id in ids]
            begin = time.perf_counter()
            outcomes = await log.append(appends)
            took.append(time.perf_counter() - begin)
            assert set(outcomes) == {Outcome.LOGGED}, outcomes
        return took
    finally:
        await announcements.close()
        await commands.close()


async def _until_it_answers(commands: RedisCommands) -> None:
    for _ in range(1000):
        with contextlib.suppress(RedisError):
            await commands.redis.ping()
            return
        await asyncio.sleep(0.01)
    raise RuntimeError("the server does not answer after 10 s")


async def measure(num_appends: int, rounds: int) -> Document:
    """By setting and number of answers: p50 and p99 in ms, and appended events a second; medians of the rounds."""
    found: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for _ in range(rounds):
        for setting in SETTINGS:
            async with running(setting) as url:
                for num_answers in ANSWERS:
                    took = sorted(await time_appends(url, num_answers, num_appends))
                    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
                    events_per_s = num_answers * num_appends / sum(took)
                    found.setdefault((setting, num_answers), []).append((p50 * 1e3, p99 * 1e3, events_per_s))
    document: Document = {}
    for (setting, num_answers), runs in found.items():
        p50, p99, events_per_s = (statistics.median(column) for column in zip(*runs, strict=True))
        document.setdefault(setting, {})[f"{num_answers} answers"] = {
            "p50_ms": round(p50, 3),
            "p99_ms": round(p99, 3),
            "events_per_s": round(events_per_s),
        }
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--appends", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.appends, arguments.rounds))
    write({**new_document(), "log_append": figures}, arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
