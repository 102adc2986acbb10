"""Starting, ending and starting again of one child process."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from app.child import ChildSpec, RestartPolicy, describe_exit, start_child, stop_child


def test_restarts_come_later_and_later_and_the_fifth_death_in_a_minute_is_the_last() -> None:
    policy = RestartPolicy()
    assert [policy.count_death(t) for t in (0.0, 1.0, 2.0, 3.0, 4.0)] == [0.1, 0.4, 1.6, 5.0, None]


def test_deaths_of_more_than_a_minute_ago_are_forgotten() -> None:
    policy = RestartPolicy()
    assert [policy.count_death(20.0 * i) for i in range(9)] == [0.1, 0.4, *[1.6] * 7]


def test_exits_in_words() -> None:
    assert describe_exit(1) == "ended with exit code 1"
    assert describe_exit(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe_exit(-64 - 1) == "was killed by signal 65"


async def test_its_output_goes_to_its_log_anew_at_each_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spec = ChildSpec("c", ["/bin/sh", "-c", "echo out; echo err >&2"], log_path=log)
    for _ in range(2):
        process = await start_child(spec)
        assert await process.wait() == 0
        assert log.read_text() == "out\nerr\n"


async def test_it_gets_environment_and_sockets_and_a_group_of_its_own() -> None:
    reader, writer = os.pipe()
    program = f"import os; os.write({writer}, f'{{os.environ[\"A\"]}} {{os.getpid()}} {{os.getpgrp()}}'.encode())"
    environment = {**os.environ, "A": "b"}
    spec = ChildSpec("c", [sys.executable, "-c", program], environment=environment, pass_fds=(writer,))
    process = await start_child(spec)
    assert await process.wait() == 0
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert pipe.read() == f"b {process.pid} {process.pid}"


async def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        await start_child(ChildSpec("c", ["/nowhere/program"]))


async def start_stubborn() -> asyncio.subprocess.Process:
    """A child that ignores SIGTERM. It stops itself once it does, so that we know when."""
    program = "trap '' TERM; kill -STOP $$; exec sleep 1000"
    process = await start_child(ChildSpec("c", ["/bin/sh", "-c", program]))
    await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    process.send_signal(signal.SIGCONT)
    return process


async def test_one_that_ignores_sigterm_is_killed() -> None:
    process = await start_stubborn()
    await stop_child(process, 0.05)
    assert process.returncode == -signal.SIGKILL


async def test_ending_one_that_has_ended() -> None:
    process = await start_child(ChildSpec("c", ["/bin/true"]))
    await process.wait()
    await stop_child(process, 1000.0)
    assert process.returncode == 0


async def test_being_cancelled_kills_it() -> None:
    process = await start_stubborn()
    stopping = asyncio.create_task(stop_child(process, 1000.0))
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert process.returncode == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_it_ends_when_its_parent_is_killed() -> None:
    program = (
        "import asyncio, sys\n"
        "from app.child import ChildSpec, start_child\n"
        "async def main():\n"
        # the grandchild holds our pipe open for as long as it lives
        "    p = await start_child(ChildSpec('c', ['/bin/sleep', '1000']))\n"
        "    print(p.pid, flush=True)\n"
        "    await p.wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # the end of the file: nobody holds it any more
    parent.stdout.close()
