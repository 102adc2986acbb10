"""A process that asked for it dies with its parent."""

import subprocess
import sys

import pytest

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
child.wait()
"""
CHILD = """
import signal
from engine.parent_death import die_with_parent
die_with_parent()
print("asked", flush=True)
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_it_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "asked\n"
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # the end of the file: the child, which held the other end, is gone
    parent.stdout.close()
