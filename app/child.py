"""A child process of the supervisor: how it is started, and when it is started again after it died."""

import asyncio
import collections
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

EXIT_CANNOT_START = 2
"""By agreement with our own programs: started like this it can never work, so it is not tried again."""
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildSpec:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str] | None = None
    """None: this process's own."""
    pass_fds: tuple[int, ...] = ()
    log_path: Path | None = None
    """Its output goes there, from the beginning at each start; None: where ours goes."""
    before_start: Callable[[], None] | None = None
    stop_timeout_s: float = 5.0
    """After SIGTERM it has this long to end, then it is killed."""
    ends_with: str | None = None
    """Children that stand next to one another with the same word here are ended at the same time."""
    until_hung: Callable[[], Awaitable[None]] | None = None
    """Begun with each start; returns when the process lives and yet does nothing any more: then it is killed."""
    takes_hangup: bool = False
    """Whether SIGHUP is passed on to it. Until it says otherwise, a child ignores that signal."""


@dataclass
class RestartPolicy:
    """Restarts at once at first and later and later; gives up after `max_deaths` within `window_s`."""

    max_deaths: int = 5
    window_s: float = 60.0
    first_delay_s: float = 0.1
    factor: float = 4.0
    max_delay_s: float = 5.0
    _deaths: collections.deque[float] = field(default_factory=collections.deque)

    def count_death(self, now_s: float) -> float | None:
        """Seconds to wait before the next start; None: give up."""
        self._deaths.append(now_s)
        while self._deaths[0] <= now_s - self.window_s:
            self._deaths.popleft()
        if len(self._deaths) >= self.max_deaths:
            return None
        delay_s: float = self.first_delay_s * self.factor ** (len(self._deaths) - 1)
        return min(delay_s, self.max_delay_s)


async def start_child(spec: ChildSpec) -> asyncio.subprocess.Process:
    """Raises OSError if its program cannot be started.

    The child is in a process group of its own, so that Ctrl-C at the terminal reaches the supervisor alone, which then
    ends its children in order. If the supervisor is killed, the kernel terminates the child.
    """
    if spec.before_start is not None:
        spec.before_start()
    with contextlib.ExitStack() as stack:
        output = None if spec.log_path is None else stack.enter_context(spec.log_path.open("wb"))
        return await asyncio.create_subprocess_exec(
            *spec.command,
            env=spec.environment,
            pass_fds=spec.pass_fds,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
            preexec_fn=_before_program(os.getpid()),
        )


async def stop_child(process: asyncio.subprocess.Process, timeout_s: float) -> None:
    """SIGTERM, and SIGKILL after `timeout_s` or when this is cancelled. Returns when it has ended."""
    send_signal(process, signal.SIGTERM)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await process.wait()
    finally:
        if process.returncode is None:
            send_signal(process, signal.SIGKILL)
            await process.wait()


def describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def send_signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """No error if it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


def _before_program(parent: int) -> Callable[[], None]:
    """What a child calls before its program starts: SIGHUP does not end it while it has no handler for it yet, and when
    its parent dies it gets SIGTERM (Linux only)."""
    # found here: after the fork as little as possible should happen
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
            if os.getppid() != parent:  # it died just before the call
                os._exit(1)

    return prepare
