"""Ties a process to the supervisor that started it: when it ends, and what it prints."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


def end_with(supervisor: int) -> None:
    """Has the kernel kill this process when its supervisor ends, however that ends.

    Elsewhere than on Linux it does nothing.

    Args:
        supervisor: the supervisor's process number. If it has ended before, this process ends.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != supervisor:  # it ended before the kernel was told
        os.kill(os.getpid(), signal.SIGKILL)


def own_output() -> None:
    """Leaves standard output to Python: what libraries print goes to standard error.

    There the supervisor drops lines which say that all is well; on standard output some libraries
    print them among the results. What processes that this one starts print goes there too.
    """
    if sys.stdout is None:  # it is closed
        return
    own = os.dup(1)
    os.dup2(2, 1)
    before = sys.stdout
    at_once = os.isatty(own) or getattr(before, "write_through", False)  # by PYTHONUNBUFFERED
    sys.stdout = os.fdopen(
        own, "w", 1 if at_once else -1, encoding=before.encoding, errors=before.errors
    )
