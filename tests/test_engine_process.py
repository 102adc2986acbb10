"""kill -9 of the real engine and of the gateway in the middle of answers, under the supervisor that `serve` is."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from tests.product import PATIENCE_S, Product, running
from tests.tiny_model import make_tiny

LONG = 2**17
"""Tokens of an answer that does not end by itself within any test."""

SEVERAL = 1500
"""Tokens of an answer that is still under way when its first ones have been read."""

INSTRUCTIONS = "You answer questions about trains, and about nothing else, whoever asks."


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("engine-process")
    model = make_tiny(folder / "tiny-chat", max_position_embeddings=2 * LONG)
    config = folder / "config.toml"
    config.write_text(f'[[assistants]]\nid = "support"\nshared = true\ninstructions = "{INSTRUCTIONS}"\n')
    arguments: tuple[str, ...] = ("--dtype", "float32", "--num-blocks", str(LONG // 8), "--check-kv")
    arguments += ("--config", str(config))
    # an answer that goes on alone with the next engine has the same bits as beside its siblings only without nodes
    arguments += ("--shared-attention", "never")
    with running(folder, model, *arguments) as product:
        yield product


def chat_body(product: Product, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Tell me a long story."}
    return {"model": product.model, "messages": [message], "max_tokens": LONG, "ignore_eos": True, **fields}


def data(line: str) -> dict[str, Any] | None:
    return json.loads(line[6:]) if line.startswith("data: {") else None


def test_kill_9_of_the_engine_is_a_short_gap_in_running_answers(product: Product) -> None:
    """Both choices of a stream, and an answer on a socket, are what they would have been."""
    drawn = {"max_tokens": SEVERAL, "seed": 7, "temperature": 1.0}
    want = product.post("/v1/chat/completions", chat_body(product, n=2, **drawn))
    create = {"model": product.model, "input": "Hello", "max_output_tokens": SEVERAL, "ignore_eos": True, "seed": 3}
    want_response = product.post("/v1/responses", create)
    engine, gateway = product.child("engine"), product.child("app.gateway")
    uri = product.url.replace("http", "ws") + "/v1/responses"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with (
        httpx.stream(
            "POST",
            product.url + "/v1/chat/completions",
            json=chat_body(product, n=2, **drawn, **options),
            timeout=PATIENCE_S,
        ) as sse,
        connect(uri, open_timeout=PATIENCE_S) as ws,
    ):
        lines = sse.iter_lines()
        texts = ["", ""]
        ws.send(json.dumps({"type": "response.create", **create}))
        while json.loads(ws.recv(PATIENCE_S))["type"] != "response.output_text.delta":
            pass
        while not all(texts):
            add_text(texts, data(next(lines)))
        engine.kill()
        events = [event for line in lines if (event := data(line))]
        for event in events:
            add_text(texts, event)
        while (last := json.loads(ws.recv(PATIENCE_S)))["type"] == "response.output_text.delta":
            pass
        while last["type"] not in ("response.incomplete", "response.failed", "error"):
            last = json.loads(ws.recv(PATIENCE_S))
    assert texts == [choice["message"]["content"] for choice in want["choices"]]
    assert events[-1]["usage"]["completion_tokens"] == want["usage"]["completion_tokens"] == 2 * SEVERAL
    assert last["response"]["output"][0]["content"] == want_response["output"][0]["content"]
    assert last["response"]["usage"]["output_tokens"] == SEVERAL
    assert product.child("engine").pid != engine.pid
    assert product.child("app.gateway").pid == gateway.pid
    assert product.stats()["engine"]["generation_tokens"] > 0, "all was said before the engine was killed"
    product.wait_for(product.is_idle, "the new engine's pool is not idle")


def add_text(texts: list[str], event: dict[str, Any] | None) -> None:
    for choice in event["choices"] if event else ():
        texts[choice["index"]] += choice["delta"].get("content") or ""


def test_an_assistant_is_pinned_in_each_life_of_engine_and_gateway(product: Product) -> None:
    """Its prompt is cached to the token for the first chat of each."""
    plain = chat_body(product, max_tokens=1)
    own = product.post("/v1/chat/completions", plain)["usage"]["prompt_tokens"]
    for victim in ("", "engine", "app.gateway"):
        if victim:
            product.child(victim).kill()
            product.wait_for(lambda: product.is_ready() and has_pinned(product), "nothing is pinned")
        product.wait_for(lambda: product.is_ready() and product.is_idle(), "the pool is not idle")
        num_pinned = product.stats()["blocks"]["pinned"]
        usage = product.post("/v1/chat/completions", {**plain, "model": f"{product.model}:support"})["usage"]
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert usage["prompt_tokens"] - num_cached <= own
        assert num_cached > 16
        product.wait_for(product.is_idle, "the pool is not idle")
        assert product.stats()["blocks"]["pinned"] == num_pinned > 1


def has_pinned(product: Product) -> bool:
    """False too where the engine that made the gateway ready was killed a moment ago."""
    answer = httpx.get(product.url + "/admin/stats", timeout=PATIENCE_S)
    return answer.status_code == 200 and answer.json()["blocks"]["pinned"] > 0


def test_kill_9_of_the_gateway_leaves_an_engine_without_orphans(product: Product) -> None:
    engine, gateway = product.child("engine"), product.child("app.gateway")
    body = json.dumps(chat_body(product, stream=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    clients = [socket.create_connection(("127.0.0.1", product.port), PATIENCE_S) for _ in range(4)]
    for client in clients:
        client.sendall(head + body)
    product.wait_for(lambda: product.stats()["requests"]["running"] == 4, "four streams do not run")
    gateway.kill()
    for client in clients:
        while client.recv(65536):
            pass
        client.close()
    product.wait_for(product.is_ready, "no gateway came back")
    assert product.child("engine").pid == engine.pid
    product.wait_for(product.is_idle, "the orphans still run")
    assert product.post("/v1/chat/completions", chat_body(product, max_tokens=3))["usage"]["completion_tokens"] == 3


def test_an_engine_that_can_never_start_ends_the_server_with_one_sentence(product: Product, tmp_path: Path) -> None:
    (prepared,) = (product.state_dir / "models").iterdir()
    hopeless = Product(tmp_path, prepared, "--dtype", "float32", "--max-model-len", "1000000")
    with pytest.raises(AssertionError, match="ended with 2"):
        hopeless.start()
    assert f"a context of 1000000 tokens was asked for, but the model has {2 * LONG}" in hopeless.log
    assert "the engine cannot start like this" in hopeless.log
