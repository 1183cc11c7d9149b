"""What JAX knows of the processes and devices that a program runs on."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
from jax import process_count, process_index

__all__ = ["device_kind", "memory_peak", "process_count", "process_index", "profile"]


def device_kind() -> str:
    """Returns what the driver calls the devices of this process."""
    return jax.local_devices()[0].device_kind


def memory_peak() -> int | None:
    """Returns the most bytes that one device of this process has held; None: it does not tell."""
    found = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in found if stats]
    return max(peaks, default=None)


def profile(folder: str) -> AbstractContextManager[None]:
    """Records what the devices do while its block runs, for TensorBoard's profiler."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python hide what the devices do
    return jax.profiler.trace(folder, profiler_options=options)
