"""Runs tests in a process that interprets the Triton kernels: nothing can be compiled there, and TRITON_INTERPRET=1 has
to be set before triton is imported."""

import faulthandler
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests import needs

REPOSITORY = Path(__file__).parents[2]


def need_triton() -> None:
    needs.need(find_spec("triton") is not None, "the package triton is not installed")


def run_interpreted(*arguments: str, **environment: str) -> None:
    """pytest with these arguments. What fails there fails here, with its report."""
    need_triton()
    # the child is no worker of the pytest that started it
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=15"]
    # it may well take longer than the time after which a test that hangs shows where, here and there
    faulthandler.cancel_dump_traceback_later()
    command += ["-p", "tests.interpreted.quicker", "-o", "faulthandler_timeout=0"]
    done = subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        env={**inherited, **environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
