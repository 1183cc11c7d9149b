"""Ties a process to the supervisor that started it: it ends when the supervisor does."""

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
