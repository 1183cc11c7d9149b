"""What TensorFlow knows of the processes and devices that a program runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from meshdsl.lowering.backends.tf.hosts.cluster import Cluster
from meshdsl.lowering.backends.tf.tpus.devices import named


def process_index() -> int:
    """Returns the place of this process among those of a job."""
    return Cluster.read().index


def process_count() -> int:
    """Returns how many processes a job has."""
    return len(Cluster.read().addresses)


def device_kind() -> str:
    """Returns what the driver calls the devices of this process; of TPUs it does not tell."""
    if named():
        return "TPU"
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return str(details.get("device_name", "cpu"))


def memory_peak() -> int | None:
    """Returns the most bytes that one device of this process has held; None: it does not tell."""
    if named():
        return None
    gpus = tf.config.list_logical_devices("GPU")
    peaks = [tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus]
    return max(peaks, default=None)


@contextmanager
def profile(folder: str) -> Iterator[None]:
    """Records what the devices do while its block runs, for TensorBoard's profiler."""
    tf.profiler.experimental.start(folder)
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
