"""Engines that live and do nothing."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.heartbeat import until_hung
from engine.heartbeat import Heartbeat


async def test_an_engine_that_was_stopped_is_found_and_one_that_answers_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"ipc://{tmp_path}/e"
    answered, now, num_looks = asyncio.Event(), 0.0, 0
    beat = Heartbeat.beat

    def noted(heartbeat: Heartbeat) -> None:
        beat(heartbeat)
        answered.set()

    monkeypatch.setattr(Heartbeat, "beat", noted)
    engine = subprocess.Popen(  # noqa: ASYNC220 nothing waits for it
        [sys.executable, "-m", "tests.scripted_engine", "--address", address]
    )

    async def sleep(interval_s: float) -> None:
        nonlocal now, num_looks
        if num_looks < 20:
            await answered.wait()
            answered.clear()
        elif num_looks == 20:
            engine.send_signal(signal.SIGSTOP)
        now += interval_s
        num_looks += 1

    try:
        await until_hung(address, timeout_s=50.0, interval_s=10.0, clock=lambda: now, sleep=sleep)
        assert 20 + 4 <= num_looks <= 20 + 5  # an answer may have been on its way
    finally:
        engine.kill()
        engine.wait()
