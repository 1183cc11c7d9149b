"""Torus: the order of devices in a mesh, so that axes with much traffic lie on fast links.

JAX's own functions place mesh axes on the links of a TPU slice, and axes marked slow across slices.
Other devices keep the order of their numbers. Training and compiling ahead of time use the same
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from meshdsl.layouts.mesh import SLOW, Mesh


def arrange_devices(mesh: Mesh, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Returns JAX's mesh of some devices, as many as the mesh has.

    Raises:
        ValueError: the devices are of several slices, and the product of the slow axes is another
            number; or the axes do not fit the torus.
    """
    sizes = [size for _, size in mesh.axes]
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    try:
        if slices > 1 and devices[0].platform == "tpu":
            array = _across(mesh, devices, slices)
        else:
            array = mesh_utils.create_device_mesh(
                sizes, devices, allow_split_physical_axes=devices[0].platform == "tpu"
            )
    except NotImplementedError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"mesh {mesh} cannot be laid on the torus of {len(devices):,} "
            f"{devices[0].device_kind} devices: {reason}. Choose sizes of axes that multiply to "
            "those of the torus"
        ) from error
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.sharding.Mesh(array, mesh.names, axis_types=kinds)


def _across(mesh: Mesh, devices: Sequence[Any], slices: int) -> np.ndarray:
    """Returns the devices of several slices: slow axes go across slices, all others within one."""
    if mesh.extent(mesh.slow) != slices:
        raise ValueError(
            f"the devices are of {slices} slices, so the axes of mesh {mesh} that go across them "
            f"must have as many places: mark them, as in slice@{SLOW}:{slices}"
        )
    within = [1 if name in mesh.slow else size for name, size in mesh.axes]
    across = [size if name in mesh.slow else 1 for name, size in mesh.axes]
    return mesh_utils.create_hybrid_device_mesh(
        within, across, devices, allow_split_physical_axes=True
    )
