"""The whole product over real sockets, processes and a real (tiny) model: official clients, clients that are killed,
and restarts of everything."""

import asyncio
import itertools
import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import websockets

from tests import needs
from tests.product import PATIENCE_S, Product, running
from tests.tiny_model import make_tiny

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # clients are killed in mid-answer on purpose


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    folder = tmp_path_factory.mktemp("product")
    model = make_tiny(folder / "tiny-chat")
    with running(
        folder, model, "--dtype", "float32", "--num-blocks", "256", "--max-num-seqs", "16", "--check-kv"
    ) as product:
        yield product
        product.wait_for(product.is_idle, "the pool is not idle at the end")


def sdk(product: Product) -> openai.OpenAI:
    return openai.OpenAI(base_url=product.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


# ---- official clients


def test_the_openai_sdk_streams_a_chat(product: Product) -> None:
    ask = {"model": product.model, "messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    with sdk(product) as client:
        whole = client.chat.completions.create(**ask, max_tokens=12)
        chunks = list(client.chat.completions.create(**ask, max_tokens=12, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_openai_sdk_streams_a_response_and_goes_on_from_it(product: Product) -> None:
    with sdk(product) as client:
        ask = {"model": product.model, "max_output_tokens": 12, "temperature": 0}
        events = list(client.responses.create(**ask, input="Hello", stream=True))
        first = events[-1].response
        second = client.responses.create(**ask, input="And now?", previous_response_id=first.id)
        assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == first.output_text
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16


async def test_the_openai_sdk_connects_two_lanes_on_one_websocket(product: Product) -> None:
    async with (
        openai.AsyncOpenAI(base_url=product.url + "/v1", api_key="none") as client,
        client.responses.connect() as connection,
    ):
        for lane in ("left", "right"):
            await connection.send(
                {
                    "type": "response.create",
                    "model": product.model,
                    "input": f"Hello from {lane}",
                    "stream_id": lane,
                    "max_output_tokens": 200,
                    "ignore_eos": True,
                }
            )
        lanes: list[str] = []
        ended: set[str] = set()
        async for event in connection:
            lanes.append(event.stream_id)
            if event.type in ("response.completed", "response.incomplete"):
                ended.add(event.stream_id)
                assert event.response.usage.output_tokens == 200
            if ended == {"left", "right"}:
                break
    switches = sum(a != b for a, b in itertools.pairwise(lanes))
    assert switches > 10, f"the lanes did not interleave: {switches} switches in {len(lanes)} events"


def test_curl_sees_tokens_as_events(product: Product) -> None:
    body = {"model": product.model, "prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "stream": True}
    command = [str(needs.program("curl")), "-sN", product.url + "/v1/completions", "-d", json.dumps(body)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout.splitlines()
    assert lines[-2:] == ["data: [DONE]", ""]
    assert all(line.startswith("data: ") or not line for line in lines)


# ---- clients that vanish


async def test_200_clients_killed_at_random_moments_leave_the_pool_idle(product: Product) -> None:
    """SSE, plain POST and websocket clients of both kinds of answers; a stored one runs to its end by itself."""
    chance = random.Random(20)
    system = "You are the assistant of a small shop. " * 12

    async def http_client(number: int) -> None:
        body = {
            "model": product.model,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": f"Number {number}"}],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": number % 3 > 0,
            "n": 2 if number % 5 == 0 else 1,
        }
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", product.port)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        await asyncio.sleep(chance.random() * 0.5)
        writer.transport.abort()

    async def websocket_client(number: int) -> None:
        uri = f"ws://127.0.0.1:{product.port}/v1/responses"
        socket = await websockets.connect(uri, open_timeout=PATIENCE_S)
        await socket.send(
            json.dumps(
                {
                    "type": "response.create",
                    "model": product.model,
                    "instructions": system,
                    "input": f"Number {number}",
                    "max_output_tokens": 40,
                    "ignore_eos": True,
                    "store": number % 2 == 0,
                }
            )
        )
        await asyncio.sleep(chance.random() * 0.5)
        socket.transport.abort()

    at_once = asyncio.Semaphore(40)

    async def client(number: int) -> None:
        async with at_once:
            await (websocket_client(number) if number % 4 == 0 else http_client(number))

    await asyncio.wait_for(asyncio.gather(*(client(number) for number in range(200))), PATIENCE_S)
    await asyncio.to_thread(product.wait_for, product.is_idle, "the pool is not idle")
    answer = product.post("/v1/completions", {"model": product.model, "prompt": "Hello", "max_tokens": 2})
    assert answer["choices"][0]["text"] is not None


# ---- another configuration


SHOP = """
admin_key = "admin-key-0123456789"
[[tenants]]
id = "a"
key = "key-of-tenant-a"
[[assistants]]
id = "shop"
tenant = "a"
instructions = "You are the helpful assistant of a small shop. Answer politely and briefly, in plain words."
"""


def test_a_server_takes_an_edited_configuration_while_it_runs(tmp_path: Path) -> None:
    """Written in place, replaced by rename, and after SIGHUP to the supervisor; nothing that runs is cut."""
    config = tmp_path / "config.toml"
    config.write_text(SHOP)
    model = make_tiny(tmp_path / "tiny-chat")
    with running(
        tmp_path, model, "--dtype", "float32", "--num-blocks", "128", "--check-kv", "--config", str(config)
    ) as product:
        keyed = httpx.Client(
            base_url=product.url, headers={"Authorization": "Bearer key-of-tenant-a"}, timeout=PATIENCE_S
        )
        name = keyed.get("/v1/models").json()["data"][0]["id"]
        ask = {"model": name, "input": "Hello", "prompt": {"id": "shop"}, "max_output_tokens": 8, "temperature": 0}

        def answer() -> dict[str, Any]:
            response = keyed.post("/v1/responses", json=ask)
            assert response.status_code == 200, response.text
            return response.json()

        def pinned() -> tuple[int, int]:
            stats = httpx.get(
                product.url + "/admin/stats",
                headers={"Authorization": "Bearer admin-key-0123456789"},
                timeout=PATIENCE_S,
            )
            blocks = stats.json()["blocks"]
            return blocks["pinned"], blocks["referenced"]

        first = answer()
        product.wait_for(lambda: pinned()[0] > 0, "the trunk is not pinned")
        before = pinned()
        long = {**ask, "max_output_tokens": 400, "ignore_eos": True, "stream": True}
        with keyed.stream("POST", "/v1/responses", json=long) as running_answer:
            lines = running_answer.iter_lines()
            next(line for line in lines if "output_text.delta" in line)
            config.write_text(SHOP.replace("helpful", "rude"))
            product.wait_for(lambda: answer()["prompt"] != first["prompt"], "the edit is not in force")
            events = [line for line in lines if line.startswith("event: ")]
        assert events[-1] == "event: response.incomplete"  # by its length
        edited = answer()
        assert edited["usage"]["input_tokens_details"]["cached_tokens"] > 0
        (tmp_path / "new").write_text(SHOP)
        (tmp_path / "new").rename(config)
        product.wait_for(lambda: answer()["prompt"] == first["prompt"], "the old text is not in force again")
        assert answer()["output"][0]["content"] == first["output"][0]["content"]
        product.wait_for(lambda: pinned() == before, "other blocks are pinned than before")

        config.write_text("[")
        product.wait_for(lambda: "is not valid TOML" in product.log, "the mistake is not told")
        product.hang_up()
        product.wait_for(lambda: product.log.count("is not valid TOML") >= 2, "SIGHUP is not passed on")
        assert answer()["prompt"] == first["prompt"]
        config.write_text(SHOP.replace("key-of-tenant-a", "another-key-of-a"))
        product.wait_for(lambda: keyed.get("/v1/models").status_code == 401, "the old key is still known")
        keyed.close()


# ---- wrong input, from outside


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": 3}', b"[" * 20000 + b"]" * 20000])
def test_nonsense_is_a_clear_error_and_costs_nothing(product: Product, body: bytes) -> None:
    before = product.stats()["prefix_cache"]["query_tokens"]
    answer = httpx.post(product.url + "/v1/chat/completions", content=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert product.stats()["prefix_cache"]["query_tokens"] == before


# ---- restarts


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.slow), "killed"])
def test_a_conversation_survives_a_restart_of_everything(tmp_path: Path, how: str) -> None:
    """Also after kill -9 of each process at once: what was acknowledged is there, and the next turn goes on from it."""
    model = make_tiny(tmp_path / "tiny-chat")
    with running(tmp_path, model, "--dtype", "float32", "--num-blocks", "128") as product:
        ask = {"model": product.model, "max_output_tokens": 12, "temperature": 0}
        first = product.post("/v1/responses", {**ask, "input": "My name is Ada."})
        second = product.post("/v1/responses", {**ask, "input": "And?", "previous_response_id": first["id"]})
        if how == "killed":
            product.kill_everything()
        else:
            assert product.stop() == 0
        product.start()
        assert (
            httpx.get(f"{product.url}/v1/responses/{first['id']}", timeout=PATIENCE_S).json()["output"]
            == first["output"]
        )
        again = product.post("/v1/responses", {**ask, "input": "And?", "previous_response_id": first["id"]})
        assert again["output"][0]["content"] == second["output"][0]["content"]
        assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
