"""What there is to know of simulated devices: one process has them all."""

from __future__ import annotations


def process_count() -> int:
    """Returns how many processes a job has."""
    return 1


def process_index() -> int:
    """Returns the place of this process among those of a job, which it is all of."""
    return 0


def device_kind() -> str:
    """Returns what the devices are called."""
    return "numpy"


def memory_peak() -> int | None:
    """Returns the most bytes that a device has held: that is not known."""
    return None


profile = None  # there is no device to record
