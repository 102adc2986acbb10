"""Children that die are started again, and everything ends in order. Small shell commands stand in for real ones."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app import supervisor
from app.child import ChildSpec, RestartPolicy, start_child
from app.supervisor import Supervisor

FOREVER = "exec sleep 1000"


def shell(name: str, program: str, **settings: object) -> ChildSpec:
    return ChildSpec(name, ["/bin/sh", "-c", program], **settings)  # type: ignore[arg-type]


async def until(condition: Callable[[], bool]) -> None:
    """Asks again and again: other processes tell nobody. The time only guards against hanging."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


class Watched:
    """A supervisor whose waits are recorded instead of waited."""

    def __init__(self, *children: ChildSpec, policy: Callable[[], RestartPolicy] = RestartPolicy) -> None:
        self.reports: list[str] = []
        self.delays: list[float] = []
        self.supervisor = Supervisor(
            children, report=self.reports.append, policy=policy, clock=lambda: 0.0, sleep=self._sleep
        )
        self.running = asyncio.create_task(self.supervisor.run())

    async def _sleep(self, delay_s: float) -> None:
        self.delays.append(delay_s)

    async def pid(self, name: str, *, other_than: int | None = None) -> int:
        """Of this child, once it runs."""
        await until(lambda: self.supervisor.pid(name) not in (None, other_than))
        pid = self.supervisor.pid(name)
        assert pid is not None
        return pid


async def test_what_hangs_is_killed_and_started_again() -> None:
    hangs = asyncio.Event()

    async def until_hung() -> None:
        await hangs.wait()
        hangs.clear()

    watched = Watched(shell("engine", FOREVER, until_hung=until_hung), shell("gateway", FOREVER))
    engine, gateway = await watched.pid("engine"), await watched.pid("gateway")
    os.kill(engine, signal.SIGSTOP)
    hangs.set()
    assert await watched.pid("engine", other_than=engine) != engine
    assert await watched.pid("gateway") == gateway
    assert watched.reports == [
        "engine does not answer any more: killing it",
        "engine was killed by SIGKILL: starting it again in 0.1 s",
    ]
    watched.supervisor.stop()
    assert await watched.running == 0


async def test_what_dies_is_started_again() -> None:
    watched = Watched(shell("engine", FOREVER), shell("gateway", FOREVER))
    engine, gateway = await watched.pid("engine"), await watched.pid("gateway")
    os.kill(engine, signal.SIGKILL)
    assert await watched.pid("engine", other_than=engine) != engine
    assert await watched.pid("gateway") == gateway
    assert watched.reports == ["engine was killed by SIGKILL: starting it again in 0.1 s"]
    watched.supervisor.stop()
    assert await watched.running == 0
    assert watched.supervisor.pid("engine") is None


async def test_it_gives_up_after_five_deaths_and_ends_the_others() -> None:
    watched = Watched(shell("engine", "exit 1"), shell("gateway", FOREVER))
    gateway = await watched.pid("gateway")
    assert await watched.running == 1
    assert watched.delays == [0.1, 0.4, 1.6, 5.0]
    assert watched.reports[-1] == "engine ended with exit code 1, the 5th time within 60 s: giving up"
    with pytest.raises(ProcessLookupError):
        os.kill(gateway, 0)


async def test_children_that_end_together_do_not_wait_for_one_another(tmp_path: Path) -> None:
    wait = "do sleep 0.01; done"
    meet = f"trap 'touch {{0}}; until [ -e {{1}} ]; {wait}; exit 0' TERM; touch {{0}}.up; while :; {wait}"
    first, second = tmp_path / "first", tmp_path / "second"
    watched = Watched(
        shell("engine", FOREVER),
        shell("gateway 1", meet.format(first, second), ends_with="gateways", stop_timeout_s=60.0),
        shell("gateway 2", meet.format(second, first), ends_with="gateways", stop_timeout_s=60.0),
    )
    await until(lambda: (tmp_path / "first.up").exists() and (tmp_path / "second.up").exists())
    watched.supervisor.stop()
    assert await watched.running == 0
    assert first.exists()
    assert second.exists()


async def test_before_children_are_ended_others_are_told() -> None:
    told: list[int | None] = []
    one = Supervisor([shell("gateway", FOREVER)], report=print, on_stop=[lambda: told.append(one.pid("gateway"))])
    running = asyncio.create_task(one.run())
    await until(lambda: one.pid("gateway") is not None)
    pid = one.pid("gateway")
    one.stop()
    assert await running == 0
    assert told == [pid]


async def test_deaths_are_counted_for_each_child() -> None:
    watched = Watched(shell("a", FOREVER), shell("b", FOREVER), policy=lambda: RestartPolicy(max_deaths=2))
    for name in ("a", "b"):
        pid = await watched.pid(name)
        os.kill(pid, signal.SIGKILL)
        await watched.pid(name, other_than=pid)
    watched.supervisor.stop()
    assert await watched.running == 0


async def test_one_that_cannot_start_like_this_is_not_tried_again(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    watched = Watched(shell("engine", "exit 2", log_path=log))
    assert await watched.running == 2
    assert watched.delays == []
    assert watched.reports == [f"engine cannot start like this (see {log})"]


async def test_a_program_that_is_not_there() -> None:
    watched = Watched(ChildSpec("engine", ["/nowhere/engine"]), shell("gateway", FOREVER))
    assert await watched.running == 2
    (report,) = watched.reports
    assert report.startswith("engine cannot be started: ")


async def test_the_end_comes_in_order_from_the_last_to_the_first(tmp_path: Path) -> None:
    order = tmp_path / "order"

    def child(name: str) -> ChildSpec:
        ready = tmp_path / name
        return shell(name, f"trap 'echo {name} >> {order}; exit 0' TERM; touch {ready}; while :; do sleep 0.01; done")

    names = ["database", "engine", "gateway"]
    watched = Watched(*map(child, names))
    await until(lambda: all((tmp_path / name).exists() for name in names))
    watched.supervisor.stop()
    assert await watched.running == 0
    assert order.read_text().split() == ["gateway", "engine", "database"]


async def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = shell("gateway", f"trap '' TERM; touch {ready}; {FOREVER}", stop_timeout_s=1000.0)
    watched = Watched(shell("engine", FOREVER), stubborn)
    gateway = await watched.pid("gateway")
    await until(ready.exists)
    watched.supervisor.stop()
    watched.supervisor.stop()
    assert await watched.running == 0
    with pytest.raises(ProcessLookupError):
        os.kill(gateway, 0)


async def test_a_stop_while_children_start_leaves_nobody(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    children = [shell(f"c{i}", f"echo $$ >> {pids}; {FOREVER}") for i in range(3)]
    for num_turns in range(4):
        watched = Watched(*children)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        watched.supervisor.stop()
        assert await watched.running == 0
    for pid in pids.read_text().split() if pids.exists() else []:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


async def test_signals_stop_it() -> None:
    watched = Watched(shell("engine", FOREVER))
    await watched.pid("engine")
    watched.supervisor.handle_signals()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await watched.running == 0


TELLS_HANGUPS = """
import signal, sys
signal.signal(signal.SIGHUP, lambda *_: open(sys.argv[1], "a").write("hangup "))
open(sys.argv[1], "a").write("ready ")
while True:
    signal.pause()
"""


async def test_sighup_reaches_those_that_take_it_and_ends_nobody(tmp_path: Path) -> None:
    told = tmp_path / "told"
    taker = ChildSpec("gateway", [sys.executable, "-c", TELLS_HANGUPS, str(told)], takes_hangup=True)
    watched = Watched(shell("engine", FOREVER), taker)
    engine = await watched.pid("engine")
    watched.supervisor.handle_signals()
    await until(lambda: told.exists() and told.read_text() == "ready ")
    os.kill(engine, signal.SIGHUP)  # ignored: it has no handler
    for number in range(1, 4):
        os.kill(os.getpid(), signal.SIGHUP)
        await until(lambda: told.read_text() == "ready " + "hangup " * number)  # noqa: B023
    watched.supervisor.stop()
    assert await watched.running == 0
    assert watched.reports == []


async def test_a_sighup_that_comes_while_a_child_is_being_started_reaches_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, may_go_on = tmp_path / "told", asyncio.Event()

    async def start_slowly(spec: ChildSpec) -> asyncio.subprocess.Process:
        process = await start_child(spec)
        await may_go_on.wait()
        return process

    monkeypatch.setattr(supervisor, "start_child", start_slowly)
    taker = ChildSpec("gateway", [sys.executable, "-c", TELLS_HANGUPS, str(told)], takes_hangup=True)
    watched = Watched(taker)
    await until(lambda: told.exists() and told.read_text() == "ready ")
    assert watched.supervisor.pid("gateway") is None
    watched.supervisor.pass_on_hangup()
    may_go_on.set()
    await until(lambda: told.read_text() == "ready hangup ")
    watched.supervisor.stop()
    assert await watched.running == 0


SUPERVISOR = """
import asyncio, signal, sys
from app.child import ChildSpec
from app.supervisor import Supervisor

async def main(told, child, has_nohup):
    if has_nohup == "nohup":
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    spec = ChildSpec("child", [sys.executable, "-c", child, told], takes_hangup=True)
    supervisor = Supervisor([spec], report=lambda sentence: None)
    supervisor.handle_signals()
    code = await supervisor.run()
    open(told, "a").write(f"ended with {code}")

asyncio.run(main(*sys.argv[1:]))
"""


def in_a_terminal(told: Path, has_nohup: str) -> tuple[int, int]:
    """Starts the supervisor above as the leader of a terminal of its own: its pid, and the terminal's other end."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", SUPERVISOR, str(told), TELLS_HANGUPS, has_nohup])
    return pid, terminal


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_server_ends_with_the_terminal_in_which_it_was_started(tmp_path: Path) -> None:
    told = tmp_path / "told"
    pid, terminal = in_a_terminal(told, "without")
    await until(lambda: told.exists() and told.read_text() == "ready ")
    os.kill(pid, signal.SIGHUP)  # while the terminal is there, it is for the child
    await until(lambda: told.read_text() == "ready hangup ")
    os.close(terminal)
    assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
    assert told.read_text() == "ready hangup ended with 0"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_under_nohup_it_outlives_its_terminal(tmp_path: Path) -> None:
    told = tmp_path / "told"
    pid, terminal = in_a_terminal(told, "nohup")
    await until(lambda: told.exists() and told.read_text() == "ready ")
    os.close(terminal)
    await until(lambda: told.read_text() == "ready hangup ")
    os.kill(pid, signal.SIGTERM)
    assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
