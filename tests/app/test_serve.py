"""What `trunkline serve` starts, with the real gateway and database; the engine is scripted and needs no model."""

import asyncio
import json
import os
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from app import serve
from app.child import ChildSpec
from app.config import ConfigError, GatewayConfig
from app.serve import ServeError, check_configuration, children, is_ready, listen, locked, runtime_dir
from engine.config import EngineConfig
from engine.zmq_client import ZmqEngineClient
from tests.app.supervised import GUARD_S, Running, options, start, until
from tests.scripted_engine import release_request

__all__ = ["start"]


async def test_everything_is_started_and_survives_the_death_of_each_part(start: Callable[..., Running]) -> None:
    server = start("Hello", {"pause": 0.0}, "!")
    await server.ready()
    assert server.reports == [f"ready: {server.options.url} (Ctrl-C ends it)"]
    assert await server.chat() == "Hello!"
    for word in ("valkey", "scripted_engine", "app.gateway"):
        (pid,) = server.pids(word)
        os.kill(pid, signal.SIGKILL)
        await until(lambda w=word, p=pid: server.pids(w) not in ([], [p]))  # type: ignore[misc]
        await server.ready()
        assert await server.chat() == "Hello!"
    assert [r.partition(":")[0] for r in server.reports[1:]] == [
        "the database was killed by SIGKILL",
        "the engine was killed by SIGKILL",
        "the gateway was killed by SIGKILL",
    ]


async def test_an_engine_killed_in_the_middle_of_a_stream(start: Callable[..., Running]) -> None:
    server = start("Hel", {"pause": 2}, "lo")
    await server.ready()
    body = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    lines: list[str] = []
    async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            lines.append(line)
            if "Hel" in line:
                os.kill(server.pids("scripted_engine")[0], signal.SIGKILL)
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == "Hello", lines
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    await until(lambda: len(server.reports) == 2)
    await server.ready()


async def test_a_server_that_is_ended_finishes_its_answers(start: Callable[..., Running]) -> None:
    server = start("Hel", {"pause": None}, "lo")
    await server.ready()
    engine = ZmqEngineClient(f"ipc://{server.folder}/engine.sock")
    await engine.start()
    await engine.wait_ready()
    body = {"model": "byte-model", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    lines: list[str] = []
    async with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if "Hel" in line:
                os.kill(os.getpid(), signal.SIGTERM)
                async with asyncio.timeout(GUARD_S):
                    while await is_ready(server.options.url):  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                async with httpx.AsyncClient(base_url=server.options.url, timeout=GUARD_S, trust_env=False) as other:
                    refused = await other.get("/ready")
                    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
                engine.submit(release_request())
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(event["delta"].get("content", "") for event in events) == "Hello"
    assert await server.task == 0
    await engine.close()


async def test_two_gateways_and_two_engines_each_of_which_may_die(start: Callable[..., Running]) -> None:
    server = start("Hello", num_gateways=2, num_engines=2)
    await server.ready()
    for word, names in (("scripted_engine", ("engine 1", "engine 2")), ("app.gateway", ("gateway 1", "gateway 2"))):
        pids = server.pids(word)
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            await until(lambda p=pid, w=word: p not in server.pids(w) and len(server.pids(w)) == 2)  # type: ignore[misc]
            await server.ready()
            assert await server.chat() == "Hello"
        assert sorted(r.partition(" was")[0] for r in server.reports[-2:]) == list(names)


def specs(tmp_path: Path, listener: socket.socket | None, **changes: object) -> dict[str, ChildSpec]:
    changed = options(tmp_path, redis_url="redis://elsewhere", **changes)
    return {spec.name: spec for spec in children(changed, listener, tmp_path, None)}


def engine_of(spec: ChildSpec) -> EngineConfig:
    return msgspec.json.decode(spec.command[-1], type=EngineConfig)


def gateway_of(spec: ChildSpec) -> GatewayConfig:
    assert spec.environment is not None
    return GatewayConfig.model_validate_json(spec.environment["TRUNKLINE_GATEWAY"])


def test_gateways_know_all_engines_here_and_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "available_cpus", lambda: 7)
    with listen("127.0.0.1", 0) as listener:
        found = specs(tmp_path, listener, num_gateways=2, num_engines=2, engine_addresses=("tcp://far:1",))
    assert list(found) == ["engine 1", "engine 2", "gateway 1", "gateway 2"]
    engines = [engine_of(found[name]) for name in ("engine 1", "engine 2")]
    assert [engine.threads for engine in engines] == [3, 3]
    assert len({engine.address for engine in engines}) == 2
    for name in ("gateway 1", "gateway 2"):
        assert gateway_of(found[name]).engine_addresses == (*(engine.address for engine in engines), "tcp://far:1")


def test_ranks_of_engines_divide_the_cores_and_meet_in_the_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "available_cpus", lambda: 16)
    settings = {"num_gateways": 0, "num_engines": 2, "engine_listen": "tcp://0.0.0.0:7001"}
    engine = EngineConfig(model_dir="", tensor_parallel=4)
    changed = options(tmp_path, **settings, engine=engine)
    engines = [engine_of(spec) for spec in children(changed, None, tmp_path / "run", None)]
    assert [(e.threads, e.tensor_parallel, e.runtime_dir) for e in engines] == [(2, 4, str(tmp_path / "run"))] * 2


def test_engines_alone_for_gateways_elsewhere(tmp_path: Path) -> None:
    found = specs(tmp_path, None, num_gateways=0, num_engines=2, engine_listen="tcp://0.0.0.0:7001")
    assert [engine_of(spec).address for spec in found.values()] == ["tcp://0.0.0.0:7001", "tcp://0.0.0.0:7002"]
    changed = options(tmp_path, num_gateways=0, engine_listen="tcp://0.0.0.0:7001")  # and no database of their own
    assert [spec.name for spec in children(changed, None, tmp_path, None)] == ["the engine"]


def test_engines_that_listen_for_others_serve_the_gateway_beside_them_too(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as listener:
        found = specs(tmp_path, listener, engine_listen="tcp://0.0.0.0:7001")
    assert gateway_of(found["the gateway"]).engine_addresses == ("tcp://127.0.0.1:7001",)
    assert serve.reachable("tcp://10.0.0.7:7001") == "tcp://10.0.0.7:7001"
    assert serve.reachable("tcp://*:7001") == "tcp://127.0.0.1:7001"


async def test_a_gateway_reaches_engines_by_address(start: Callable[..., Running]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start("Hello", num_engines=2, engine_listen=f"tcp://127.0.0.1:{port}")
    await server.ready()
    assert await server.chat() == "Hello"


def test_with_a_redis_of_ones_own_no_database_is_started(tmp_path: Path) -> None:
    with listen("127.0.0.1", 0) as listener:
        specs = children(options(tmp_path, redis_url="redis://elsewhere"), listener, tmp_path, None)
    assert [s.name for s in specs] == ["the engine", "the gateway"]
    assert specs[1].environment is not None
    assert "redis://elsewhere" in specs[1].environment["TRUNKLINE_GATEWAY"]


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"^cannot listen on 127.0.0.1 port {port}: .* --port$"):
            listen("127.0.0.1", port)
    with pytest.raises(ServeError, match="cannot listen on no such host port 80"):
        listen("no such host", 80)


def test_two_servers_never_share_a_database(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(ServeError, match=r"another trunkline uses .*--state-dir"):  # noqa: SIM117
        with locked(tmp_path, wait_s=0.0):
            pass
    with locked(tmp_path, wait_s=0.0):  # and it is free again
        pass


def test_a_socket_has_a_short_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with runtime_dir() as folder:
        assert len(f"{folder}/engine.sock") < 100
        assert folder.stat().st_mode & 0o077 == 0
    assert not folder.exists()


def test_a_configuration_that_cannot_work_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loopback"):
        check_configuration("0.0.0.0", None)
    broken = tmp_path / "broken.toml"
    broken.write_text("tenants = 1")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        check_configuration("127.0.0.1", broken)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("example.org", "http://example.org:8000"),
    ],
)
def test_the_address_to_open(tmp_path: Path, host: str, url: str) -> None:
    assert options(tmp_path, host=host, port=8000).url == url


async def test_a_port_where_nobody_answers_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert not await is_ready(f"http://127.0.0.1:{port}")
