"""Facts about the processes and devices that a program runs on, as TensorFlow reports them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from meshdsl.lowering.backends.tf.hosts.cluster import Cluster
from meshdsl.lowering.backends.tf.tpus.devices import named


def process_index() -> int:
    """Returns the index of this process in its job."""
    return Cluster.read().index


def process_count() -> int:
    """Returns the number of processes of the job."""
    return len(Cluster.read().addresses)


def device_kind() -> str:
    """Returns the driver's name for the kind of this process's devices; for TPUs just `TPU`."""
    if named():
        return "TPU"
    gpus = tf.config.list_physical_devices("GPU")
    details = tf.config.experimental.get_device_details(gpus[0]) if gpus else {}
    return str(details.get("device_name", "cpu"))


def memory_peak() -> int | None:
    """Returns the peak of the memory in use on a device of this process; None: not reported."""
    if named():
        return None
    gpus = tf.config.list_logical_devices("GPU")
    peaks = [tf.config.experimental.get_memory_info(gpu.name)["peak"] for gpu in gpus]
    return max(peaks, default=None)


@contextmanager
def profile(folder: str) -> Iterator[None]:
    """Records a profile of the devices while its block runs, for TensorBoard."""
    tf.profiler.experimental.start(folder)
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
