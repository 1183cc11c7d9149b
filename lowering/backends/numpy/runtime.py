"""The facts about simulated devices: one process has them all."""

from __future__ import annotations


def process_count() -> int:
    """Returns the number of processes of a job."""
    return 1


def process_index() -> int:
    """Returns the index of this process."""
    return 0


def device_kind() -> str:
    """Returns the name for the kind of device."""
    return "numpy"


def memory_peak() -> int | None:
    """Returns None: the peak of the memory in use is not known."""
    return None


profile = None  # there is no device to profile
