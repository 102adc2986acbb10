"""Keeps the processes of one server running: starts them, starts again what dies, ends them in order."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from app.child import (
    EXIT_CANNOT_START,
    ChildSpec,
    RestartPolicy,
    describe_exit,
    send_signal,
    start_child,
    stop_child,
)

EXIT_OK = 0
EXIT_GAVE_UP = 1


class Supervisor:
    """Children are started all at once, in the order given, and ended from the last to the first, one after another
    but for those that end together.

    So who uses another comes after it: first the database, then engines, then gateways.
    """

    def __init__(
        self,
        children: Sequence[ChildSpec],
        *,
        report: Callable[[str], None],
        on_stop: Sequence[Callable[[], None]] = (),
        policy: Callable[[], RestartPolicy] = RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`report` takes one sentence for a person; `on_stop` is called before children are ended; `policy` makes each
        child its own."""
        self._children = children
        self._report = report
        self._on_stop = on_stop
        self._policy = policy
        self._clock = clock
        self._sleep = sleep
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._owed_hangups: set[str] = set()
        """Children to which SIGHUP is still to be passed on."""
        self._stop_requested = asyncio.Event()
        self._kill_requested = asyncio.Event()

    async def run(self) -> int:
        """Until `stop`, or until a child cannot be kept running. Returns the exit code of the whole server.

        0 after `stop`; 1 if a child died too often; 2 if one can never start like this (it has said why).
        """
        async with asyncio.TaskGroup() as group:
            keepers = [group.create_task(self._keep(spec), name=spec.name) for spec in self._children]
            stop = group.create_task(self._stop_requested.wait(), name="stop")
            done, _ = await asyncio.wait([*keepers, stop], return_when=asyncio.FIRST_COMPLETED)
            code = EXIT_OK if stop in done else next(task.result() for task in keepers if task in done)
            self._stop_requested.set()
            for keeper in keepers:
                keeper.cancel()
            await asyncio.wait(keepers)
            for call in self._on_stop:
                call()
            await self._end_all()
        return code

    def stop(self) -> None:
        """Ends everything in order; called again, at once."""
        if self._stop_requested.is_set():
            self._kill_requested.set()
        self._stop_requested.set()

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT call `stop`. SIGHUP is passed on, to read the configuration again; but where it comes
        because our terminal is gone, it calls `stop` too."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        is_unwatched = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        had_terminal = not is_unwatched and has_terminal()

        def hang_up() -> None:
            if had_terminal and not has_terminal():
                self.stop()
            else:
                self.pass_on_hangup()

        loop.add_signal_handler(signal.SIGHUP, hang_up)

    def pass_on_hangup(self) -> None:
        """SIGHUP to each child that takes it; to one that is just being started, as soon as it is there."""
        for spec in self._children:
            if spec.takes_hangup:
                self._owed_hangups.add(spec.name)
                self._pay_hangup(spec.name)

    def _pay_hangup(self, name: str) -> None:
        process = self._processes.get(name)
        if process is not None and name in self._owed_hangups:
            self._owed_hangups.remove(name)
            send_signal(process, signal.SIGHUP)

    def pid(self, name: str) -> int | None:
        """Of the child of this name; None while it does not run."""
        process = self._processes.get(name)
        return None if process is None else process.pid

    async def _keep(self, spec: ChildSpec) -> int:
        """Runs one child again and again. Returns only when it gives up."""
        policy = self._policy()
        while True:
            try:
                await self._start(spec)
                code = await self._wait(spec)
            except OSError as e:
                self._report(f"{spec.name} cannot be started: {e}")
                return EXIT_CANNOT_START
            del self._processes[spec.name]
            if code == EXIT_CANNOT_START:
                self._report(f"{spec.name} cannot start like this{_where(spec)}")
                return EXIT_CANNOT_START
            delay_s = policy.count_death(self._clock())
            if delay_s is None:
                self._report(
                    f"{spec.name} {describe_exit(code)}, the {policy.max_deaths}th time within "
                    f"{policy.window_s:.0f} s: giving up{_where(spec)}"
                )
                return EXIT_GAVE_UP
            self._report(f"{spec.name} {describe_exit(code)}: starting it again in {delay_s:.1f} s")
            await self._sleep(delay_s)

    async def _wait(self, spec: ChildSpec) -> int:
        """The exit code of a child that runs; one that hangs is killed."""
        process = self._processes[spec.name]
        if spec.until_hung is None:
            return await process.wait()
        ending = asyncio.create_task(process.wait(), name=f"end of {spec.name}")
        hanging = asyncio.ensure_future(spec.until_hung())
        try:
            await asyncio.wait((ending, hanging), return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():
                hanging.result()  # raises what went wrong in it
                self._report(f"{spec.name} does not answer any more: killing it")
                send_signal(process, signal.SIGKILL)
            return await ending
        finally:
            ending.cancel()
            hanging.cancel()
            await asyncio.wait((ending, hanging))

    async def _start(self, spec: ChildSpec) -> None:
        """Cancelled, it still waits for the child that is being started, so that nobody is left behind."""

        async def start() -> None:
            self._processes[spec.name] = await start_child(spec)
            self._pay_hangup(spec.name)

        starting = asyncio.create_task(start(), name=f"start {spec.name}")
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.wait([starting])
            raise

    async def _end_all(self) -> None:
        kill = asyncio.create_task(self._kill_requested.wait(), name="kill")
        try:
            for _, specs in itertools.groupby(reversed(self._children), key=lambda s: s.ends_with or s.name):
                await asyncio.gather(*(self._end(spec, kill) for spec in specs))
        finally:
            kill.cancel()

    async def _end(self, spec: ChildSpec, kill: asyncio.Task[bool]) -> None:
        process = self._processes.get(spec.name)
        if process is None:
            return
        ending = asyncio.create_task(stop_child(process, spec.stop_timeout_s), name=f"end {spec.name}")
        await asyncio.wait([ending, kill], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        await asyncio.wait([ending])
        del self._processes[spec.name]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal; a terminal that was closed is none."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _where(spec: ChildSpec) -> str:
    return "" if spec.log_path is None else f" (see {spec.log_path})"
