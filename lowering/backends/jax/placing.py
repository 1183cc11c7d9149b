"""How arrays get to where a program takes them, and into the form in which it takes them.

A program stores an input whose dims do not divide with pads (see `tensors.cuts`). What is stored
that way, on the right devices, is taken without a copy. Numbers of the host are padded there and
go to each device in its part; arrays on the program's devices, or on a single one, are padded, or
padded otherwise, where they are. Those of other meshes travel logical, split as far as their sizes
divide.
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
    """Returns a tensor's layout in JAX's terms."""
    parts = [layout.axes(name) for name in shape.names]
    return PartitionSpec(*(p[0] if len(p) == 1 else p or None for p in parts))


@dataclass(frozen=True)
class Storage:
    """The form in which a tensor of some dims is stored on a mesh: `Storage.of(dims, ...)`.

    Attributes:
        cuts: how its dims are cut where they are padded; `()` without pads.
        even: the sharding of the logical array: dims are split as far as they divide.
    """

    dims: Shape
    cuts: Cuts
    sharding: NamedSharding
    even: NamedSharding

    @staticmethod
    def of(dims: Shape, layout: TensorLayout, mesh: Mesh, devices: jax.sharding.Mesh) -> Storage:
        """Returns how `layout` stores a tensor on the devices of a mesh."""
        fitting = layout.even(dims, mesh)
        sharding, even = (
            NamedSharding(devices, partition_spec(dims, where)) for where in (layout, fitting)
        )
        return Storage(dims, layout.cuts(dims, mesh), sharding, even)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the stored array."""
        cuts = self.cuts or ((),) * len(self.dims)
        return tuple(padded_size(d.size, counts) for d, counts in zip(self.dims, cuts, strict=True))

    def holds(self, data: Any) -> bool:
        """Whether data is on the only device of the mesh, by whatever name."""
        sharding = getattr(data, "sharding", None)
        return (
            isinstance(sharding, SingleDeviceSharding)
            and sharding.memory_kind == self.sharding.memory_kind
            and sharding.device_set == self.sharding.device_set
        )

    def put(self, array: Any) -> jax.Array:
        """Returns an array stored this way: itself if it is.

        Args:
            array: a `NamedArray`, or logical data of any kind.
        """
        data, cuts = (array.data, array.cuts) if isinstance(array, NamedArray) else (array, ())
        sharding = getattr(data, "sharding", None)
        if cuts == self.cuts and (sharding == self.sharding or self.holds(data)):
            return data
        if not self.sharding.is_fully_addressable and getattr(data, "is_fully_addressable", True):
            data = np.asarray(data)  # what one process holds, others do as well
        if not isinstance(data, jax.Array):
            stored = np.asarray(data)
            if cuts != self.cuts:
                stored = pad(np, unpad(np, stored, cuts, self.dims.sizes), self.cuts)
            return _from_host(stored, self.sharding)
        if cuts == self.cuts:
            return jax.device_put(data, self.sharding)
        if len(data.sharding.device_set) == 1:
            return jax.device_put(_converting(cuts, self.cuts, self.dims)(data), self.sharding)
        if not (isinstance(sharding, NamedSharding) and _same(sharding.mesh, self.sharding.mesh)):
            logical = NamedArray(data, self.dims, cuts).unpadded()
            data, cuts = jax.device_put(logical, self.even), ()
        return _converting(cuts, self.cuts, self.dims, self.sharding)(data)


def _from_host(data: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns data of the host on its devices; of those of other processes each puts its own."""
    if sharding.is_fully_addressable:
        return jax.device_put(data, sharding)
    return jax.make_array_from_callback(data.shape, sharding, data.__getitem__)


def taking_logical(run: Callable, program: SpmdProgram) -> Callable:
    """Returns a function of arrays as a program stores them as one of logical arrays."""
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


def _same(one: Any, other: Any) -> bool:
    return list(one.devices.flat) == list(other.devices.flat)


@functools.lru_cache(maxsize=1024)
def _converting(
    before: Cuts, after: Cuts, dims: Shape, sharding: NamedSharding | None = None
) -> Callable[[jax.Array], jax.Array]:
    """Returns what exchanges the pads of data on its devices; without a sharding, on one."""

    def convert(data: jax.Array) -> jax.Array:
        return pad(jnp, unpad(jnp, data, before, dims.sizes), after)

    return jax.jit(convert, out_shardings=sharding)
