"""Storage of arrays on a mesh, and the transfer of arguments to it.

An input whose dims do not divide is stored with pads (see `tensors.cuts`). Data that is stored that
way on the right devices is used without a copy. All other data is converted:

* Data of the host is padded there, and each device receives its part.
* Arrays on the program's devices, or on a single device, are padded there, or their pads change.
* Arrays of other meshes are transferred without pads, split as far as their sizes divide.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.cuts import Cuts, pad, padded_size, unpad
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.named_array import NamedArray


def partition_spec(shape: Shape, layout: TensorLayout) -> PartitionSpec:
    """Returns a tensor's layout as JAX's PartitionSpec."""
    parts = [layout.axes(name) for name in shape.names]
    return PartitionSpec(*(p[0] if len(p) == 1 else p or None for p in parts))


@dataclass(frozen=True)
class Storage:
    """The form in which a tensor of some dims is stored on a mesh: `Storage.of(dims, ...)`.

    Attributes:
        cuts: how its dims are padded; `()`: it has no pads.
        even: the sharding of the logical array, without pads: dims are split as far as they divide.
    """

    dims: Shape
    cuts: Cuts
    sharding: NamedSharding
    even: NamedSharding

    @staticmethod
    def of(dims: Shape, layout: TensorLayout, mesh: Mesh, devices: jax.sharding.Mesh) -> Storage:
        """Returns the form in which a layout stores a tensor on the devices of a mesh."""
        even_layout = layout.even(dims, mesh)
        sharding, even = (
            NamedSharding(devices, partition_spec(dims, each)) for each in (layout, even_layout)
        )
        return Storage(dims, layout.cuts(dims, mesh), sharding, even)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the stored array."""
        cuts = self.cuts or ((),) * len(self.dims)
        return tuple(padded_size(d.size, counts) for d, counts in zip(self.dims, cuts, strict=True))

    def is_same_device(self, data: Any) -> bool:
        """Whether data is on the only device of the mesh, whatever its kind of sharding."""
        sharding = getattr(data, "sharding", None)
        return (
            isinstance(sharding, SingleDeviceSharding)
            and sharding.memory_kind == self.sharding.memory_kind
            and sharding.device_set == self.sharding.device_set
        )

    def put(self, array: Any) -> jax.Array:
        """Returns an array stored in this form; itself if it is already.

        Args:
            array: a `NamedArray`, or logical data of any kind.
        """
        data, cuts = (array.data, array.cuts) if isinstance(array, NamedArray) else (array, ())
        sharding = getattr(data, "sharding", None)
        if cuts == self.cuts and (sharding == self.sharding or self.is_same_device(data)):
            return data
        if not self.sharding.is_fully_addressable and getattr(data, "is_fully_addressable", True):
            data = np.asarray(data)  # every process has the same data
        if not isinstance(data, jax.Array):
            stored = np.asarray(data)
            if cuts != self.cuts:
                stored = pad(np, unpad(np, stored, cuts, self.dims.sizes), self.cuts)
            return _from_host(stored, self.sharding)
        if cuts == self.cuts:
            return jax.device_put(data, self.sharding)
        if len(data.sharding.device_set) == 1:
            return jax.device_put(_repadding(cuts, self.cuts, self.dims)(data), self.sharding)
        if not (
            isinstance(sharding, NamedSharding) and _same_devices(sharding.mesh, self.sharding.mesh)
        ):
            logical = NamedArray(data, self.dims, cuts).unpadded()
            data, cuts = jax.device_put(logical, self.even), ()
        return _repadding(cuts, self.cuts, self.dims, self.sharding)(data)


def _from_host(data: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns data of the host on the devices; each process transfers to its own."""
    if sharding.is_fully_addressable:
        return jax.device_put(data, sharding)
    return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)


def as_logical_function(run: Callable, program: SpmdProgram) -> Callable:
    """Returns a function of logical arrays, from one of arrays as a program stores them."""
    block, mesh = program.block, program.mesh
    ins = [value.layout.cuts(value.shape, mesh) for value in block.inputs]
    outs = [value.layout.cuts(value.shape, mesh) for value in block.outputs]
    if not any((*ins, *outs)):
        return run
    sizes = [value.shape.sizes for value in block.outputs]

    def logical(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        results = run(*(pad(jnp, array, cuts) for array, cuts in zip(arrays, ins, strict=True)))
        rows = zip(results, outs, sizes, strict=True)
        return tuple(unpad(jnp, array, cuts, size) for array, cuts, size in rows)

    return logical


def _same_devices(first: Any, second: Any) -> bool:
    return list(first.devices.flat) == list(second.devices.flat)


@functools.lru_cache(maxsize=1024)
def _repadding(
    before: Cuts, after: Cuts, dims: Shape, sharding: NamedSharding | None = None
) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that changes the pads of data.

    Args:
        sharding: of the result; None: data is on one device.
    """

    def convert(data: jax.Array) -> jax.Array:
        return pad(jnp, unpad(jnp, data, before, dims.sizes), after)

    return jax.jit(convert, out_shardings=sharding)
