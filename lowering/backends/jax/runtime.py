"""Facts about the processes and devices that a program runs on, as JAX reports them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import jax
from jax import process_count, process_index

__all__ = ["device_kind", "memory_peak", "process_count", "process_index", "profile"]


def device_kind() -> str:
    """Returns the driver's name for the kind of this process's devices."""
    return jax.local_devices()[0].device_kind


def memory_peak() -> int | None:
    """Returns the peak of the memory in use on a device of this process; None: not reported."""
    reports = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in reports if stats]
    return max(peaks, default=None)


def profile(folder: str) -> AbstractContextManager[None]:
    """Records a profile of the devices while its block runs, for TensorBoard."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python calls would hide the devices' work
    return jax.profiler.trace(folder, profiler_options=options)
