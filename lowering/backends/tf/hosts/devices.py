"""The host devices of a mesh: GPUs if there are any, else logical CPUs.

TensorFlow fixes the number of logical CPUs when it is first used. It is the number that JAX has
(`--host_devices`, `jax_num_cpu_devices`), or that of the first mesh's devices if that is larger. In
a cluster, each process has the same number of them: the first process has the first devices of the
mesh, and so on.
"""

from __future__ import annotations

import contextlib
import functools
import os

import jax
import tensorflow as tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.arguments import Devices
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster, join

TIMEOUT = "MESHDSL_COLLECTIVE_TIMEOUT"  # in seconds
_TIMEOUT = 300.0


def timeout() -> float:
    """Returns how long a collective waits for other devices, in seconds; `inf`: for ever.

    Raises:
        ValueError: the value of the environment is not a number above 0.
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
    """Returns the devices of a mesh: the first devices of every process.

    Raises:
        ValueError: the mesh needs more devices, or its size does not divide by the number of
            processes.
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
    """Returns the kind and the number of this process's devices; creates logical CPUs."""
    requested = jax.config.values["jax_num_cpu_devices"]
    on_cpu = jax.config.values["jax_platforms"] == "cpu"
    kind = "CPU" if on_cpu or not tf.config.list_physical_devices("GPU") else "GPU"
    if kind == "GPU":
        return kind, len(tf.config.list_physical_devices("GPU"))
    return kind, _cpus(max(share, requested or 0))


@functools.cache
def _cpus(count: int) -> int:
    """Creates logical CPUs, and returns their number."""
    (host, *_) = tf.config.list_physical_devices("CPU")
    configuration = tf.config.LogicalDeviceConfiguration()
    with contextlib.suppress(RuntimeError):  # TensorFlow is in use, and their number is fixed
        tf.config.set_logical_device_configuration(host, [configuration] * count)
        _share_cores(count)
    return len(tf.config.get_logical_device_configuration(host) or [configuration])


def _share_cores(count: int) -> None:
    """Divides the cores among the logical CPUs, unless the user has set the threads of a kernel."""
    # By default a kernel uses all cores, and the kernels of several logical CPUs compete for them.
    threads = tf.config.threading
    is_set = threads.get_intra_op_parallelism_threads() or os.environ.get("TF_NUM_INTRAOP_THREADS")
    if count > 1 and not is_set:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads.set_intra_op_parallelism_threads(max(1, (cores or 1) // count))
