"""How much a function does, as the number of its calls: the same however busy the machine is."""

import gc
import sys
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """Returns how many functions are called, in Python and below, while a function runs.

    The garbage collector waits: it would call what earlier tests left to be called at its next run.
    """
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
