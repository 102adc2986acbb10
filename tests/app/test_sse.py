"""Event streams: framing, headers, comments, slow readers, and an end that is clean."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.asgi import create_app
from app.config import FileConfig
from app.errors import BadRequest, EngineUnavailable
from app.limits import Limits
from app.sse import DONE, PING, SseResponse, SseWriter, escape_separators, frame
from tests.app.serving import CHAT, Recorder, chat_body, http_request, make_services, serving, until
from tests.byte_model import byte_model_info
from tests.scripted_engine import Fail, Pause, ScriptedEngineClient, say

SCOPE: dict[str, Any] = {"type": "http", "method": "POST", "headers": []}


class Client:
    """An ASGI `receive` whose client goes when told to."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def __call__(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


# ---- frames


@given(st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("\u2028\u2029\x85\v\f\x1c\r\n"))))
def test_careless_and_strict_readers_see_the_same_frame(text: str) -> None:
    data = json.dumps({"text": text}, ensure_ascii=False).encode()
    raw = frame(data, "name").decode()
    assert raw.splitlines() == raw.split("\n")[:-1]
    assert len(raw.splitlines()) == 3
    assert json.loads(raw.splitlines()[1].removeprefix("data: "))["text"] == text


def test_other_bytes_stay_as_they_are() -> None:
    text = '"\u2027\u202a\u0084é\U0001f600"'.encode()
    assert escape_separators(text) == text


async def test_separators_in_an_answer(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\u0085d\ve\rf\ng"
    async with serving(tmp_path, ScriptedEngineClient(script=say(text))) as gateway:
        raw = (await gateway.post(CHAT, chat_body(stream=True))).content.decode()
    assert [line for line in raw.split("\n") if line] == [line for line in raw.splitlines() if line]
    deltas = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
    assert "".join(d["choices"][0]["delta"].get("content", "") for d in deltas) == text


# ---- headers


async def test_b35_nothing_may_hold_the_stream_back(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [b"first", Pause(), b"last"])
    async with (
        serving(tmp_path, engine) as gateway,
        gateway.client.stream(
            "POST", CHAT, json=chat_body(stream=True), headers={"Accept-Encoding": "gzip, br", "X-Request-Id": "abc-1"}
        ) as response,
    ):
        pieces = response.aiter_raw()
        assert b"first" in await anext(pieces), "the text is there before the answer ends"
        engine.release()
        assert b"last" in b"".join([piece async for piece in pieces])
        headers = response.headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache, no-transform"
    assert headers["x-accel-buffering"] == "no"
    assert headers["x-request-id"] == "abc-1"
    assert "content-length" not in headers
    assert "content-encoding" not in headers


async def test_b35_comments_while_nothing_comes(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Pause(), b"text"])
    config = FileConfig(limits=Limits(ping_interval_s=0.01))
    async with (
        serving(tmp_path, engine, config) as gateway,
        gateway.client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        pieces = response.aiter_raw()
        assert (await anext(pieces)).startswith(PING)
        engine.release()
        rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(DONE)
    assert b'"content":"text"' in rest


async def test_b19_after_a_comment_an_error_is_a_frame(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(script=lambda r: [Pause(), Fail("too late for a status")])
    config = FileConfig(limits=Limits(ping_interval_s=0.01))
    async with (
        serving(tmp_path, engine, config) as gateway,
        gateway.client.stream("POST", CHAT, json=chat_body(stream=True)) as response,
    ):
        pieces = response.aiter_raw()
        assert (await anext(pieces)).startswith(PING)
        engine.release()
        rest = b"".join([piece async for piece in pieces])
    assert response.status_code == 200
    assert b'data: {"error":{"message":"too late for a status"' in rest
    assert rest.endswith(DONE)


# ---- slow readers


async def test_b33_a_client_that_does_not_read_is_dropped_alone(tmp_path: Path) -> None:
    engine = ScriptedEngineClient(
        byte_model_info(max_model_len=10**8),
        script=lambda r: [b"x" * 1000] * 600 if b"slow" in bytes(t for t in r.prompt_ids if t < 256) else b"healthy",
    )
    config = FileConfig(limits=Limits(send_timeout_s=0.5))
    async with serving(tmp_path, engine, config, send_buffer_bytes=4096) as gateway:
        slow = []
        for _ in range(5):
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", gateway.port))
            await asyncio.get_running_loop().sock_sendall(sock, http_request(CHAT, chat_body("slow", stream=True)))
            slow.append(sock)
        await engine.wait_submitted(5)
        for _ in range(10):
            assert (await gateway.chat("quick")).json()["choices"][0]["message"]["content"] == "healthy"
        metrics = gateway.services.metrics
        value = lambda name: metrics.registry.get_sample_value(name)  # noqa: E731
        await until(lambda: value("trunkline_answers_in_flight") == 0)
        assert value("trunkline_answers_total") is None
        for sock in slow:
            sock.close()


async def test_b33_what_waits_for_a_slow_client_is_one_output(tmp_path: Path) -> None:
    """The writer stands in a write; meanwhile all further tokens merge into one place, and nothing is lost."""
    engine = ScriptedEngineClient(script=lambda r: [*b"ab", Pause(), *(b"y" * 500), Pause(), *b"z"])
    written: list[bytes] = []
    may_write = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.append(message["body"])
            if b'"b"' in message["body"]:
                await may_write.wait()

    app = create_app(make_services(tmp_path, engine))
    body = json.dumps(chat_body(stream=True)).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    client = Client()

    async def receive() -> Any:
        return next(messages, None) or await client()

    scope = {**SCOPE, "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "root_path": "", "scheme": "http"}
    answer = asyncio.create_task(app(scope, receive, send))
    await engine.wait_paused()
    await until(lambda: any(b'"b"' in w for w in written))
    engine.release()
    await engine.wait_for(lambda: engine.core.num_held == 1 and engine.core.num_generated >= 502)
    num_written = len(written)
    may_write.set()
    await until(lambda: len(written) > num_written)
    assert b'{"content":"' + b"y" * 500 + b'"}' in written[num_written], "one chunk with all that had come"
    engine.release()
    await answer
    await engine.close()


async def test_a_write_that_never_ends_gives_up() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    ended = asyncio.Event()

    async def produce(writer: SseWriter) -> None:
        try:
            await writer.write(b"data: 1\n\n")
        finally:
            ended.set()

    await SseResponse(produce, send_timeout_s=0.01)(SCOPE, Client(), send)
    assert ended.is_set()


# ---- ends


async def test_an_error_before_the_first_frame_has_its_status() -> None:
    async def produce(writer: SseWriter) -> None:
        raise EngineUnavailable("none there")

    recorder = Recorder()
    await SseResponse(produce)(SCOPE, Client(), recorder)
    assert recorder.status == 503
    assert json.loads(recorder.body)["error"]["message"] == "none there"


async def test_an_error_after_the_first_frame_is_one() -> None:
    async def produce(writer: SseWriter) -> None:
        await writer.write(frame(b"1"))
        raise BadRequest("no more")

    recorder = Recorder()
    await SseResponse(produce, on_error=lambda e: frame(e.message.encode()))(SCOPE, Client(), recorder)
    assert (recorder.status, recorder.body) == (200, b"data: 1\n\ndata: no more\n\n")
    assert recorder.messages[-1]["more_body"] is False


async def test_a_bug_shows_as_an_error_and_is_not_swallowed() -> None:
    async def produce(writer: SseWriter) -> None:
        await writer.write(frame(b"1"))
        raise KeyError("secret")

    recorder = Recorder()
    with pytest.raises(KeyError):
        await SseResponse(produce)(SCOPE, Client(), recorder)
    assert b"internal_error" in recorder.body
    assert b"secret" not in recorder.body


async def test_b12_the_producer_is_cancelled_and_cleans_up_before_the_response_returns() -> None:
    events: list[str] = []
    client = Client()

    async def produce(writer: SseWriter) -> None:
        await writer.write(frame(b"1"))
        client.gone.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            events.append("cancelled")
            raise
        finally:
            events.append("finally")

    await SseResponse(produce)(SCOPE, client, Recorder())
    assert events == ["cancelled", "finally"]


async def test_b12_a_cancelled_response_ends_its_tasks() -> None:
    before = len(asyncio.all_tasks())
    writing = asyncio.Event()

    async def produce(writer: SseWriter) -> None:
        await writer.write(frame(b"1"))
        writing.set()
        await asyncio.Event().wait()

    response = asyncio.ensure_future(SseResponse(produce)(SCOPE, Client(), Recorder()))
    await writing.wait()
    response.cancel()
    with pytest.raises(asyncio.CancelledError):
        await response
    assert len(asyncio.all_tasks()) == before
