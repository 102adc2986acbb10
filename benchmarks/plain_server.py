"""What uvicorn and Starlette reach by themselves: a server that sends the frames of an answer as they are in a file.

    python -m benchmarks.plain_server --port P --frames FRAMES.json --times FILE

FRAMES is a list of strings. As in any endpoint, each websocket has its coroutine; at each step it sends one frame.
Nothing is computed, encoded or looked up for it. uvicorn is set as the gateway sets it. Pace and number of connections
are said in the request's seed, as to the engine (`benchmarks/numbered_engine.py`); FILE gets the moments of its steps.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from benchmarks.answer_events import DELTA
from benchmarks.numbered_engine import REST_S, StepTimes, number_in, pace_of
from engine.parent_death import die_with_parent


class PlainServer:
    def __init__(self, frames: list[str], times: StepTimes) -> None:
        self._frames = frames
        self._numbers = [number_in(e["delta"]) if e["type"] == DELTA else None for e in map(json.loads, frames)]
        """Of the step that a frame stands for; None for those around the text."""
        self._times = times
        self._gathered: list[WebSocket] = []
        self._steps: asyncio.Task[None] | None = None
        self._step = asyncio.Event()
        """Set, and replaced, at each step."""

    async def answer(self, websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            while True:
                request = json.loads(await websocket.receive_text())
                num_together, interval_s = pace_of(request.get("seed"))
                self._gathered.append(websocket)
                if len(self._gathered) >= num_together:
                    self._gathered = []
                    self._steps = asyncio.create_task(self._make_steps(interval_s))
                for frame, number in zip(self._frames, self._numbers, strict=True):
                    if number is not None:
                        await self._step.wait()
                    await websocket.send_text(frame)
        except WebSocketDisconnect:
            pass

    async def _make_steps(self, interval_s: float) -> None:
        due = time.monotonic() + REST_S
        for number in self._numbers:
            if number is not None:
                due += interval_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._times[number] = time.monotonic()
                step, self._step = self._step, asyncio.Event()
                step.set()


async def serve(port: int, server: PlainServer) -> None:
    config = uvicorn.Config(
        Starlette(routes=[WebSocketRoute("/v1/responses", server.answer)]),
        port=port,
        http="httptools",
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        lifespan="off",
        access_log=False,
        log_level="warning",
        backlog=2048,
    )
    await uvicorn.Server(config).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--frames", type=Path, required=True)
    parser.add_argument("--times", type=Path, required=True)
    arguments = parser.parse_args()
    die_with_parent()
    frames = json.loads(arguments.frames.read_bytes())
    server = PlainServer(frames, StepTimes(arguments.times))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.port, server))


if __name__ == "__main__":
    main()
