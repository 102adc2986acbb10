"""A child that must not outlive its parent asks the kernel to be signalled when the parent dies."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(signal_number: signal.Signals = signal.SIGKILL) -> None:
    """This process gets `signal_number` as soon as its parent (strictly: the thread that forked it) has died.

    Linux only; elsewhere it does nothing. Raises OSError if the kernel refuses.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    if os.getppid() != parent:  # it died just before the call: nobody would signal us
        os.kill(os.getpid(), signal_number)
