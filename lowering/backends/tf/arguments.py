"""Storage of tensors on the devices of a mesh, and the transfer of arguments to it.

A tensor is stored as equal shards, with pads (see `tensors.cuts`). Data that is stored in a
program's form is used without a copy; all other data goes through the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends.tf.hosts.cluster import Cluster
from meshdsl.lowering.program import Value
from meshdsl.tensors.cuts import Cuts, pad, padded_size
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import is_float8
from meshdsl.tensors.named_array import NamedArray


@dataclass(frozen=True)
class Devices:
    """The devices of a mesh, by their names in TensorFlow.

    Attributes:
        names: those of this process's devices.
        numbers: their numbers in the mesh.
        cluster: the processes; each has the same number of devices, in the order of the mesh.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    cluster: Cluster

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """The names of all devices of the mesh, by number."""
        own_task, processes = f"/task:{self.cluster.index}/", range(len(self.cluster.addresses))
        return tuple(
            name.replace(own_task, f"/task:{process}/")
            for process in processes
            for name in self.names
        )


@dataclass(frozen=True)
class Storage:
    """The form in which a tensor of some dims is stored on a mesh."""

    dims: Shape
    dtype: np.dtype
    layout: TensorLayout
    mesh: Mesh

    @staticmethod
    def of(value: Value, mesh: Mesh) -> Storage:
        """Returns the form in which an input or output of a program is stored."""
        return Storage(value.shape, value.dtype, value.layout, mesh)

    @cached_property
    def cuts(self) -> Cuts:
        """How dims are padded; `()`: it has no pads."""
        return self.layout.cuts(self.dims, self.mesh)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the stored array."""
        cuts = self.cuts or ((),) * len(self.dims)
        return tuple(padded_size(d.size, counts) for d, counts in zip(self.dims, cuts, strict=True))

    @cached_property
    def parts(self) -> tuple[tuple[slice, ...], ...]:
        """The part of the stored array that each device has, by number."""
        parts = []
        for coordinates in self.mesh.coordinates():
            slices = []
            for dim, size in zip(self.dims, self.sizes, strict=True):
                axes, number = self.layout.axes(dim.name), 0
                for axis in axes:
                    number = number * self.mesh.sizes[axis] + coordinates[axis]
                block = size // self.mesh.extent(axes)
                slices.append(slice(number * block, (number + 1) * block))
            parts.append(tuple(slices))
        return tuple(parts)

    def shards(self, leaf: Any, numbers: Sequence[int]) -> list[np.ndarray]:
        """Returns the shards of an array for some devices, by number; replicas are one array.

        Args:
            leaf: a NamedArray, or logical data of any kind.
            numbers: of the devices.
        """
        data, cuts = (leaf.data, leaf.cuts) if isinstance(leaf, NamedArray) else (leaf, ())
        stored = pad(np, np.asarray(leaf if cuts else data), self.cuts)
        blocks: dict[tuple[Any, ...], np.ndarray] = {}
        for number in numbers:
            part = self.parts[number]
            if _key(part) not in blocks:
                blocks[_key(part)] = np.ascontiguousarray(stored[part]).reshape(stored[part].shape)
        return [blocks[_key(self.parts[number])] for number in numbers]

    def put(self, leaf: Any, devices: Devices) -> list[tf.Tensor]:
        """Returns the shards of an array on this process's devices; see `shards`."""
        data = leaf.data if isinstance(leaf, NamedArray) else leaf
        if isinstance(data, Shards) and data.storage == self and data.devices == devices:
            return data.tensors
        tensors: dict[tuple[int, str], tf.Tensor] = {}
        placed = []
        for name, shard in zip(devices.names, self.shards(leaf, devices.numbers), strict=True):
            key = id(shard), "" if "CPU" in name else name  # CPUs share their memory
            if key not in tensors:
                with tf.device(name):
                    tensors[key] = tf.constant(
                        shard.view(np.uint8) if is_float8(self.dtype) else shard
                    )
            placed.append(tensors[key])
        return placed


class Shards:
    """A result of a program: the shards on this process's devices.

    It has the shape and dtype of the stored array, and is read as an array: `np.asarray(shards)`.

    Attributes:
        tensors: one for each of `devices`, which are this process's.
    """

    def __init__(self, storage: Storage, devices: Devices, tensors: Sequence[tf.Tensor]) -> None:
        self.storage = storage
        self.devices = devices
        self.tensors = list(tensors)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.storage.sizes

    @property
    def dtype(self) -> np.dtype:
        return self.storage.dtype

    @property
    def layout(self) -> TensorLayout:
        """The layout on the mesh."""
        return self.storage.layout

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has all parts."""
        return len(self._parts_here()) == len(set(map(_key, self.storage.parts)))

    def block_until_ready(self) -> Shards:
        """Returns the shards; a call returns only after its results are computed."""
        return self

    def _parts_here(self) -> dict[tuple[Any, ...], int]:
        """Returns the parts of this process, each with the index of a tensor that has it."""
        return {
            _key(self.storage.parts[number]): index
            for index, number in reversed(list(enumerate(self.devices.numbers)))
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the stored array, from the shards of this process."""
        parts = self._parts_here()
        if not self.is_fully_addressable:
            raise ValueError(
                f"{self!r} is split over processes, and this process has {len(parts)} of its "
                "parts: return it without split dims to read all of it"
            )
        array, tensors = np.empty(self.shape, self.dtype), self.tensors
        for number, part in enumerate(self.storage.parts):
            index = parts.get(_key(part))
            if index is not None and number == self.devices.numbers[index]:
                shard = tensors[index].numpy()
                array[part] = shard.view(self.dtype) if is_float8(self.dtype) else shard
        return np.asarray(array, dtype)

    def __repr__(self) -> str:
        return f"Shards({self.dtype.name}{list(self.shape)}; {self.layout})"


def _key(part: tuple[slice, ...]) -> tuple[Any, ...]:
    """Returns a hashable form of a part; slices are hashable from Python 3.12 on."""
    return tuple((s.start, s.stop) for s in part)
