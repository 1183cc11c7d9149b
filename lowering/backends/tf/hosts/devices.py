"""The host devices that a mesh runs on: GPUs where there are some, else logical CPUs.

TensorFlow decides on its logical CPUs once, when it is first used. There are as many as JAX has
been told of (`--host_devices`, `jax_num_cpu_devices`), or as the first mesh has. In a cluster they
are divided evenly: the first process has the first devices of the mesh, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import os

import jax
import tensorflow as tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster, join
from meshdsl.lowering.backends.tf.placing import Devices

TIMEOUT = "MESHDSL_COLLECTIVE_TIMEOUT"  # in seconds
_TIMEOUT = 300.0


def timeout() -> float:
    """Returns for how long a collective waits for the others, in seconds: of `inf`, for ever.

    Raises:
        ValueError: the environment says something else than a number above 0.
    """
    text = os.environ.get(TIMEOUT, str(_TIMEOUT))
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise ValueError(
        f"{TIMEOUT} needs a number of seconds, more than 0, got {text!r}; with inf a collective "
        "waits for ever"
    )


def host_devices(mesh: Mesh) -> Devices:
    """Returns the devices of a mesh, the first ones there are in every process.

    Raises:
        ValueError: there are fewer devices than the mesh has, or processes do not divide it.
    """
    processes = len(Cluster.read().addresses)
    if mesh.size % processes:
        raise ValueError(
            f"mesh {mesh} has {mesh.size} devices, which the {processes} processes of TF_CONFIG "
            "cannot share evenly"
        )
    share = mesh.size // processes
    kind, count = _started(share)
    if share > count:
        raise ValueError(
            f"mesh {mesh} needs {share} devices in a process, but TensorFlow has been started with "
            f"{count} ({kind}). Use a smaller mesh, or make virtual CPU devices: "
            f"--host_devices={share}, or in Python, before the first function runs, "
            f"jax.config.update('jax_num_cpu_devices', {share})"
        )
    cluster = join(timeout())
    names = tuple(cluster.name(f"{kind}:{number}") for number in range(share))
    first = cluster.index * share
    return Devices(names, tuple(range(first, first + share)), cluster)


def _started(share: int) -> tuple[str, int]:
    """Returns what kind of devices this process has, and how many; makes the CPUs among them."""
    asked = jax.config.values["jax_num_cpu_devices"]
    on_cpu = jax.config.values["jax_platforms"] == "cpu"
    kind = "CPU" if on_cpu or not tf.config.list_physical_devices("GPU") else "GPU"
    if kind == "GPU":
        return kind, len(tf.config.list_physical_devices("GPU"))
    return kind, _cpus(max(share, asked or 0))


@functools.cache
def _cpus(count: int) -> int:
    """Returns how many logical CPUs there are, after asking for a number of them."""
    (host, *_) = tf.config.list_physical_devices("CPU")
    one = tf.config.LogicalDeviceConfiguration()
    with contextlib.suppress(RuntimeError):  # TensorFlow is in use, with as many as it has
        tf.config.set_logical_device_configuration(host, [one] * count)
        _share_cores(count)
    return len(tf.config.get_logical_device_configuration(host) or [one])


def _share_cores(count: int) -> None:
    """Divides the cores among the logical CPUs, unless the user has said how many a kernel takes.

    By default a kernel of each takes all the cores, and they get in each other's way.
    """
    threads = tf.config.threading
    asked = threads.get_intra_op_parallelism_threads() or os.environ.get("TF_NUM_INTRAOP_THREADS")
    if count > 1 and not asked:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads.set_intra_op_parallelism_threads(max(1, (cores or 1) // count))
