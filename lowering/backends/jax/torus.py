"""Torus: which devices a mesh is made of, so that what talks most lies side by side.

JAX's own functions place mesh axes on the links of a TPU slice, and axes marked slow across slices;
other devices are taken as they are numbered. Training and compiling ahead of time place alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType

from meshdsl.layouts.mesh import SLOW, Mesh


def placed(mesh: Mesh, devices: Sequence[Any]) -> jax.sharding.Mesh:
    """Returns a mesh of as many devices as it has.

    Raises:
        ValueError: the devices are of several slices, and no marked axes go across just these, or
            the axes cannot be laid on the torus.
    """
    sizes = [size for _, size in mesh.axes]
    slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
    try:
        if slices > 1 and devices[0].platform == "tpu":
            laid = _across(mesh, devices, slices)
        else:
            laid = mesh_utils.create_device_mesh(
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
    return jax.sharding.Mesh(laid, mesh.names, axis_types=kinds)


def _across(mesh: Mesh, devices: Sequence[Any], slices: int) -> np.ndarray:
    """Returns the devices of several slices, laid out within each and numbered across them."""
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
