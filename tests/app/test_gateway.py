"""The gateway as a process, and what it does not load."""

import asyncio
import dataclasses
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from starlette.routing import Route, WebSocketRoute

from app.config import ConfigError, FileConfig, GatewayConfig
from app.gateway import build_services, listening_socket, stateful_routes
from engine.errors import ModelNotSupported
from tests.app.serving import make_services
from tests.scripted_engine import ScriptedEngineClient, make_byte_model

REPOSITORY = Path(__file__).parent.parent.parent

CHAT_WITHOUT_TORCH = """
import asyncio, sys
from pathlib import Path
from tests.app.serving import serving
from tests.scripted_engine import ScriptedEngineClient, say

async def main():
    async with serving(Path(sys.argv[1]), ScriptedEngineClient(script=say("Hello"))) as gateway:
        answer = (await gateway.chat()).json()
        assert answer["choices"][0]["message"]["content"] == "Hello", answer
        assert (await gateway.stream_chat())[-1]["choices"][0]["finish_reason"] == "stop"

asyncio.run(main())
loaded = [m for m in ("torch", "triton", "kernels", "numpy.linalg") if m in sys.modules]
assert "torch" not in loaded and "kernels" not in loaded, loaded
import app.gateway
assert "torch" not in sys.modules
"""


def test_a_chat_is_served_without_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHAT_WITHOUT_TORCH, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def start(config: GatewayConfig, *, listener: socket.socket | None = None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "app.gateway"],
        cwd=REPOSITORY,
        env=config.environment(),
        pass_fds=[listener.fileno()] if listener else [],
        stderr=subprocess.PIPE,
    )


async def test_each_stateful_route_is_there_once(tmp_path: Path) -> None:
    services = make_services(tmp_path, ScriptedEngineClient())
    config = services.config.model_copy(update={"redis_url": f"unix://{tmp_path}/nobody.sock"})
    async with stateful_routes(dataclasses.replace(services, config=config)) as routes:
        answered = [
            (r.path, str(getattr(r, "methods", None))) for r in routes if isinstance(r, (Route, WebSocketRoute))
        ]
    services.prompts.close()
    assert len(answered) == len(routes) == len(set(answered))
    assert [r.path for r in routes if isinstance(r, WebSocketRoute)] == ["/v1/responses"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_code_0(tmp_path: Path, signum: signal.Signals) -> None:
    make_byte_model(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        config = GatewayConfig(
            port=port,
            listen_fd=listener.fileno(),
            model_dir=tmp_path / "model",
            engine_addresses=(f"ipc://{tmp_path}/none",),
            state_dir=tmp_path / "state",
        )
        os.set_inheritable(listener.fileno(), True)
        process = start(config, listener=listener)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:
        # the socket listens already: the request waits there until the process is up
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 503
        page = await client.get("/")
        assert page.headers["content-type"].startswith("text/html")
    process.send_signal(signum)
    _, log = await asyncio.to_thread(process.communicate)
    assert process.returncode == 0, log.decode()
    assert b"Traceback" not in log


@pytest.mark.parametrize("case", ["no model", "open to the network", "bad file"])
def test_what_keeps_it_from_starting_is_one_sentence(tmp_path: Path, case: str) -> None:
    if case != "no model":
        make_byte_model(tmp_path / "model")
    (tmp_path / "config.toml").write_text("x = 1")
    config = GatewayConfig(
        host="0.0.0.0" if case == "open to the network" else "127.0.0.1",
        port=0,
        model_dir=tmp_path / "model",
        engine_addresses=("ipc:///nowhere",),
        state_dir=tmp_path / "state",
        config_path=tmp_path / "config.toml" if case == "bad file" else None,
    )
    process = start(config)
    _, log = process.communicate()
    assert process.returncode == 2
    assert len(log.decode().strip().splitlines()) == 1, log.decode()


def test_a_model_without_a_template_serves_completions_only(tmp_path: Path) -> None:
    make_byte_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    config = GatewayConfig(model_dir=tmp_path / "model", engine_addresses=("x",), state_dir=tmp_path)
    demo = FileConfig.model_validate({"assistants": [{"id": "a", "shared": True, "instructions": "x"}]})
    assert list(build_services(config, demo, ScriptedEngineClient()).current.assistants) == []
    named = config.model_copy(update={"config_path": tmp_path / "config.toml"})
    with pytest.raises(ConfigError, match="no chat template"):
        build_services(named, demo, ScriptedEngineClient())


def test_no_model(tmp_path: Path) -> None:
    config = GatewayConfig(model_dir=tmp_path, engine_addresses=("x",), state_dir=tmp_path)
    with pytest.raises(ModelNotSupported):
        build_services(config, FileConfig(), ScriptedEngineClient())


def test_cache_scopes_outlive_the_process(tmp_path: Path) -> None:
    config = FileConfig.model_validate({"assistants": [{"id": "a", "shared": True, "instructions": "x"}]})
    lives = [next(iter(make_services(tmp_path, ScriptedEngineClient(), config).current.assistants)) for _ in range(2)]
    assert lives[0].scope_key == lives[1].scope_key


def test_a_socket_of_its_own(tmp_path: Path) -> None:
    config = GatewayConfig(port=0, model_dir=tmp_path, engine_addresses=("x",), state_dir=tmp_path)
    with listening_socket(config) as sock:
        assert sock.getsockname()[0] == "127.0.0.1"
        if sys.platform == "linux":
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 120_000
