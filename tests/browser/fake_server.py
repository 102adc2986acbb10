"""The page with a server behind it that says what a test wants: the Responses events on a websocket, no engine."""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from app import page
from tests.browser.fake_answer import FakeAnswer, Step

T = TypeVar("T")
MODEL = "demo-model"
ASSISTANTS = ("support", "writing", "translator")
GUARD_S = 60  # against a test that hangs, not a limit on speed


@dataclass(frozen=True)
class Refusal:
    """What `response.create` is answered with in place of an answer."""

    code: str
    message: str


Plan = Sequence[Step] | Refusal


class FakeServer:
    """Runs in a thread of its own between `start` and `stop`; the public methods are the test thread's."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []  # what the page has sent, in order
        self.answers: dict[str, FakeAnswer] = {}
        self.resumes = True  # whether it knows response.resume
        self.confirms = True  # whether it answers response.create at all
        self.open = True  # whether it lets sockets in
        self._plans: deque[Plan] = deque()
        self._sockets: set[WebSocket] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._number = 0
        self.port = 0

    # -------------------------------------------------------------- the test's side
    def reset(self) -> None:
        """As new, but for the port: nothing said, nothing planned, no answer under way."""

        async def reset() -> None:
            for task in self._tasks:
                task.cancel()
            self.messages, self.answers, self._plans, self._number = [], {}, deque(), 0
            self.resumes = self.confirms = self.open = True

        self._call(reset)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def say(self, *steps: Step) -> None:
        """The next answer."""
        self._plans.append(steps)

    def refuse(self, code: str, message: str) -> None:
        """The next message is refused."""
        self._plans.append(Refusal(code, message))

    def sent(self, kind: str) -> list[dict[str, Any]]:
        """The page's messages of that type."""
        return [message for message in self.messages if message["type"] == kind]

    def release(self) -> None:
        """Lets every answer that stands at a Hold go on; one that has not reached it yet will not stop there."""

        async def release() -> None:
            for answer in self.answers.values():
                answer.released.set()

        self._call(release)

    def drop_sockets(self) -> None:
        """Closes every socket, as a server does that goes away."""

        async def drop() -> None:
            for websocket in list(self._sockets):
                await websocket.close(1012)

        self._call(drop)

    def ask_to_reconnect(self, reason: str, after_ms: int = 50) -> None:
        """As a server that ends, or finds its sockets too old: they stay open."""

        async def ask() -> None:
            for websocket in list(self._sockets):
                await websocket.send_json({"type": "reconnect", "reason": reason, "after_ms": after_ms})

        self._call(ask)

    @property
    def num_sockets(self) -> int:
        return len(self._sockets)

    def start(self) -> None:
        config = uvicorn.Config(self._app(), log_level="error", ws="websockets-sansio")
        self._server = server = uvicorn.Server(config)
        listener = socket.create_server(("127.0.0.1", 0))  # connections wait in it until the server takes them
        self.port = listener.getsockname()[1]
        started = threading.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            started.set()
            await server.serve(sockets=[listener])
            for task in self._tasks:
                task.cancel()

        self._thread = threading.Thread(target=lambda: asyncio.run(serve()), name="fake server")
        self._thread.start()
        assert started.wait(GUARD_S), "the fake server did not start"

    def stop(self) -> None:
        assert self._server is not None
        assert self._thread is not None
        self._server.should_exit = True
        self.drop_sockets()
        self._thread.join(GUARD_S)
        assert not self._thread.is_alive(), "the fake server did not stop"

    def _call(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(GUARD_S)

    # -------------------------------------------------------------- the page's side
    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                *page.routes(),
                Route("/v1/models", self._models),
                Route("/v1/responses/{id}", self._retrieve),
                Route("/v1/responses/{id}/cancel", self._cancel_over_http, methods=["POST"]),
                WebSocketRoute("/v1/responses", self._socket),
            ]
        )

    async def _models(self, request: Request) -> Response:
        ids = [MODEL, *(f"{MODEL}:{assistant}" for assistant in ASSISTANTS)]
        return JSONResponse({"object": "list", "data": [{"id": id, "object": "model"} for id in ids]})

    async def _retrieve(self, request: Request) -> Response:
        answer = self.answers.get(request.path_params["id"])
        if answer is None:
            error = {
                "message": "no such response",
                "type": "not_found_error",
                "code": "response_not_found",
                "param": None,
            }
            return JSONResponse({"error": error}, 404)
        return JSONResponse(answer.response())

    async def _cancel_over_http(self, request: Request) -> Response:
        answer = self.answers[request.path_params["id"]]
        answer.cancel()
        return JSONResponse(answer.response())

    async def _socket(self, websocket: WebSocket) -> None:
        if not self.open:
            await websocket.close()
            return
        await websocket.accept()
        self._sockets.add(websocket)
        try:
            while True:
                message = await websocket.receive_json()
                self.messages.append(message)
                await self._on_message(websocket, message)
        except WebSocketDisconnect:
            pass
        finally:
            self._sockets.discard(websocket)

    async def _on_message(self, websocket: WebSocket, message: dict[str, Any]) -> None:
        stream_id = message.get("stream_id")
        answer = self.answers.get(message.get("response_id", ""))
        if message["type"] == "response.create":
            if self.confirms:
                await self._create(websocket, message)
        elif message["type"] == "response.resume" and not self.resumes:
            await self._error(websocket, None, "unknown_event", "unknown event type")
        elif answer is None:
            await self._error(websocket, stream_id, "response_not_found", "no such response")
        elif message["type"] == "response.cancel":
            answer.cancel()
        elif message["type"] == "response.resume":
            self._spawn(self._forward(websocket, answer, message["starting_after"], stream_id))

    async def _create(self, websocket: WebSocket, message: dict[str, Any]) -> None:
        plan = self._plans.popleft() if self._plans else (f"You said: {message['input']}",)
        if isinstance(plan, Refusal):
            await self._error(websocket, message["stream_id"], plan.code, plan.message)
            return
        self._number += 1
        id = f"resp_{self._number}"
        answer = FakeAnswer(id, message["model"], plan, message.get("previous_response_id"))
        self.answers[id] = answer
        self._spawn(answer.run())
        self._spawn(self._forward(websocket, answer, -1, message["stream_id"]))

    async def _forward(self, websocket: WebSocket, answer: FakeAnswer, after: int, stream_id: str) -> None:
        async for event in answer.follow(after):
            if websocket not in self._sockets:
                return
            await websocket.send_json({**event, "stream_id": stream_id})

    async def _error(self, websocket: WebSocket, stream_id: str | None, code: str, message: str) -> None:
        error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
        event: dict[str, Any] = {"type": "error", "status": 400, "error": error}
        await websocket.send_json(event if stream_id is None else {**event, "stream_id": stream_id})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
