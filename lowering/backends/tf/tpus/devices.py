"""The TPU of a mesh: it is connected by name, and its cores are put into the order of the mesh.

The name is TensorFlow's: TPU_NAME is `local` for a TPU of this machine, else the name or the
address of one in the network. Mesh axes are laid on the torus as JAX does it.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import mesh_utils

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.tf.hosts.cluster import listens

NAME = "TPU_NAME"


def named() -> str:
    """Returns the name of the requested TPU, or an empty text."""
    return os.environ.get(NAME, "").strip()


@functools.cache
def connect(name: str) -> tuple[Any, Any]:
    """Initializes a TPU, and returns its cluster resolver and its topology.

    Raises:
        ValueError: no TPU has that name, or JAX uses it.
    """
    _leave_to_tensorflow(name)
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        address = resolver.master().removeprefix("grpc://")
        if address and not listens(address):  # TensorFlow would wait for it for ever
            raise RuntimeError(f"{address} does not answer")
        tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
        # An operation that the TPU compiler does not support must fail, and not run on the host.
        tf.config.set_soft_device_placement(False)
        return resolver, topology
    except (ValueError, RuntimeError, OSError, ImportError, tf.errors.OpError) as error:
        reason = re.split(r"\n| used by ", str(error).strip())[0]
        raise ValueError(
            f"no TPU found: looked for {name!r}, the value of --tpu or of {NAME}, through "
            f"TensorFlow's TPUClusterResolver, which says: {reason}. Name one: --tpu=local on a "
            "TPU VM, --tpu=NAME or --tpu=grpc://address for one in the network; leave both out to "
            "run on hosts"
        ) from error


def _leave_to_tensorflow(name: str) -> None:
    """Keeps JAX, which compiles parts of programs, off the TPU that TensorFlow uses.

    Raises:
        ValueError: JAX has initialized it.
    """
    jax.config.update("jax_platforms", "cpu")
    if jax.default_backend() == "tpu":
        raise ValueError(
            f"the TPU {name!r} cannot be TensorFlow's: JAX has started it in this process; "
            "begin with jax.config.update('jax_platforms', 'cpu'), or set JAX_PLATFORMS=cpu"
        )


def strategy(mesh: Mesh) -> Any:
    """Returns TensorFlow's strategy whose replicas are the devices of a mesh, in that order.

    Raises:
        ValueError: there is no TPU, or the number of its cores is not that of the devices.
    """
    return _strategy(named(), mesh)


@functools.cache
def _strategy(name: str, mesh: Mesh) -> Any:
    resolver, topology = connect(name)
    cores = topology.num_tasks * topology.num_tpus_per_task
    if cores != mesh.size:
        raise ValueError(
            f"mesh {mesh} has {mesh.size} devices, but the TPU {name!r} has {cores} cores "
            f"({_shape(topology)}): a mesh has one device for each core"
        )
    assignment = tf.tpu.experimental.DeviceAssignment(topology, core_assignment(topology, mesh))
    return tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)


def core_assignment(topology: Any, mesh: Mesh) -> np.ndarray:
    """Returns the core of every device of a mesh on a TPU: [devices, 1, 4], as x, y, z, core.

    The cores of a chip count as neighbours along the first direction of the torus.

    Args:
        topology: TensorFlow's; its `device_coordinates` are [tasks, cores of a task, 4].
    """
    coordinates = np.asarray(topology.device_coordinates).reshape(-1, 4)
    cores_per_chip = int(coordinates[:, 3].max()) + 1
    cores = [
        _Core(number, (cores_per_chip * int(x) + int(core), int(y), int(z)))
        for number, (x, y, z, core) in enumerate(coordinates)
    ]
    sizes = [size for _, size in mesh.axes] or [1]
    arranged = mesh_utils.create_device_mesh(sizes, cores, allow_split_physical_axes=True)
    return np.array([[coordinates[core.id]] for core in arranged.flat], np.int32)


@dataclass(frozen=True)
class _Core:
    """A core with the attributes that JAX's functions on device meshes read."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU"
    process_index: int = 0


def _shape(topology: Any) -> str:
    return "x".join(map(str, np.asarray(topology.mesh_shape).tolist()))
