"""How much a function does, as the number of its calls: the same however busy the machine is."""

import sys
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """Returns how many functions are called, in Python and below, while a function runs."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
