"""The processes that a gateway is measured with: Valkey, an engine without a model, the gateway; and a plain server."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from app.config import GatewayConfig
from app.embedded_redis import EmbeddedRedis, find_server_program
from benchmarks.numbered_engine import StepTimes, make_numbered_model

READY_S = 60.0


@dataclass(frozen=True)
class Served:
    """A server under measurement."""

    port: int
    pid: int
    times: StepTimes

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """Of its process, all threads."""
        used = psutil.Process(self.pid).cpu_times()
        return float(used.user + used.system)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def keep_apart() -> int | None:
    """Leaves the first core to the server under measurement: this process, and what it starts, get the others. That
    core; None where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return None
    os.sched_setaffinity(0, cores[1:])
    return cores[0]


@contextlib.contextmanager
def child(
    command: Sequence[str], environment: dict[str, str] | None = None, core: int | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})}, stdout=sys.stderr)
    try:
        if core is not None:
            os.sched_setaffinity(process.pid, [core])
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def gateway(folder: Path, core: int | None = None) -> Iterator[Served]:
    """With an engine and a Valkey of its own, in `folder`, whose path is short. `core`: for the gateway alone."""
    model = make_numbered_model(folder / "model")
    address, times_path, port = f"ipc://{folder}/engine", folder / "times", free_port()
    redis = EmbeddedRedis(find_server_program(), folder / "valkey", folder)
    redis.prepare()
    config = GatewayConfig(
        port=port,
        model_dir=model.path,
        engine_addresses=(address,),
        redis_url=redis.url,
        state_dir=folder / "state",
        drain_timeout_s=1.0,
    )
    engine = [sys.executable, "-m", "benchmarks.numbered_engine", "--address", address, "--times", str(times_path)]
    times = StepTimes(times_path)
    with (
        child(redis.command),
        child(engine),
        child([sys.executable, "-m", "app.gateway"], config.environment(), core) as process,
    ):
        wait_until_ready(f"http://127.0.0.1:{port}/ready")
        yield Served(port, process.pid, times)


@contextlib.contextmanager
def plain(folder: Path, frames: list[str], core: int | None = None) -> Iterator[Served]:
    """uvicorn and Starlette, sending these frames to whoever asks."""
    path, port, times_path = folder / "frames.json", free_port(), folder / "plain-times"
    path.write_text(json.dumps(frames))
    command = [sys.executable, "-m", "benchmarks.plain_server", "--port", str(port)]
    with child([*command, "--frames", str(path), "--times", str(times_path)], core=core) as process:
        wait_until_listening(port)
        yield Served(port, process.pid, StepTimes(times_path))


def wait_until_ready(url: str) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.02)
    raise TimeoutError(f"{url} was not ready within {READY_S:g} s")


def wait_until_listening(port: int) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise TimeoutError(f"nobody listened on port {port} within {READY_S:g} s")
