"""The whole product as its user starts it: `trunkline serve` with its children, over a tiny random model."""

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.conftest import REPOSITORY

PATIENCE_S = 120.0
"""A guard against hanging, not a bound: the machine may be busy."""


class Product:
    """A server process with everything it needs in one folder; may be stopped and started again on the same port."""

    def __init__(self, folder: Path, model: Path | str, *arguments: str) -> None:
        self.folder = folder
        self.state_dir = folder / "state"
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port: int = s.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", "app", "serve", "--port", str(self.port), "--model", str(model)]
        self._command += ["--state-dir", str(self.state_dir), *arguments]
        self.log_path = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=REPOSITORY, stdout=log, stderr=log)
        self.wait_ready()

    def wait_ready(self) -> None:
        self.wait_for(self.is_ready, "the server is not ready")

    def is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"ended with {self._process.returncode}:\n{self.log}"
        try:
            return httpx.get(self.url + "/ready", timeout=PATIENCE_S).status_code == 200
        except httpx.HTTPError:
            return False

    def wait_for(self, condition: Callable[[], Any], otherwise: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"{otherwise} after {PATIENCE_S:.0f} s:\n{self.log}"
            time.sleep(0.05)

    def hang_up(self) -> None:
        """SIGHUP, which has it read its configuration again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(PATIENCE_S)
        self._process = None
        return code

    def kill_everything(self) -> None:
        """kill -9 of the supervisor and each of its children, as a power cut would."""
        assert self._process is not None
        for process in [psutil.Process(self._process.pid), *self._children()]:
            process.kill()
        self._process.wait(PATIENCE_S)
        self._process = None

    def child(self, word: str) -> psutil.Process:
        """The one child with this word in its command line: engine, gateway, valkey."""
        found = [p for p in self._children() if any(word in part for part in p.cmdline()[:5])]
        assert len(found) == 1, [p.cmdline() for p in self._children()]
        return found[0]

    def _children(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def model(self) -> str:
        names = [m["id"] for m in httpx.get(self.url + "/v1/models", timeout=PATIENCE_S).json()["data"]]
        return next(name for name in names if ":" not in name)

    def stats(self) -> dict[str, Any]:
        answer = httpx.get(self.url + "/admin/stats", timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def is_idle(self) -> bool:
        """Nothing runs or waits, and no block is held but what is pinned."""
        stats = self.stats()
        blocks, requests = stats["blocks"], stats["requests"]
        return (requests["running"], requests["waiting"], blocks["referenced"]) == (0, 0, blocks["pinned"])

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.post(self.url + path, content=json.dumps(body), timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def running(folder: Path, model: Path | str, *arguments: str) -> Iterator[Product]:
    product = Product(folder, model, *arguments)
    try:
        product.start()
        yield product
    finally:
        if product._process is not None:
            product.stop()
