"""How tensors get to the devices that run a program, and what a program's results are.

A tensor is stored as equal shards, pads and all (see `tensors.cuts`). What is stored as a program
takes it is taken without a copy; everything else goes through the host.
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
from meshdsl.tensors.named_array import NamedArray


@dataclass(frozen=True)
class Devices:
    """Where the devices of a mesh are.

    Attributes:
        names: TensorFlow's names of this process's devices.
        numbers: their numbers in the mesh.
        cluster: the processes that the devices of a mesh belong to, evenly and in order.
    """

    names: tuple[str, ...]
    numbers: tuple[int, ...]
    cluster: Cluster

    @cached_property
    def everywhere(self) -> tuple[str, ...]:
        """TensorFlow's names of all devices of the mesh, by number."""
        own, places = f"/task:{self.cluster.index}/", range(len(self.cluster.addresses))
        return tuple(
            name.replace(own, f"/task:{place}/") for place in places for name in self.names
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
        """Returns how an end of a program is stored."""
        return Storage(value.shape, value.dtype, value.layout, mesh)

    @cached_property
    def cuts(self) -> Cuts:
        """How dims are cut where they are padded; `()` without pads."""
        return self.layout.cuts(self.dims, self.mesh)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The shape of the stored array."""
        cuts = self.cuts or ((),) * len(self.dims)
        return tuple(padded_size(d.size, counts) for d, counts in zip(self.dims, cuts, strict=True))

    @cached_property
    def parts(self) -> tuple[tuple[slice, ...], ...]:
        """Of every device, the part of the stored array that it holds."""
        found = []
        for at in self.mesh.coordinates():
            slices = []
            for dim, size in zip(self.dims, self.sizes, strict=True):
                axes, number = self.layout.axes(dim.name), 0
                for axis in axes:
                    number = number * self.mesh.sizes[axis] + at[axis]
                block = size // self.mesh.extent(axes)
                slices.append(slice(number * block, (number + 1) * block))
            found.append(tuple(slices))
        return tuple(found)

    def cut(self, leaf: Any, numbers: Sequence[int]) -> list[np.ndarray]:
        """Returns the shards of some devices, by their numbers; equal ones are one array.

        Args:
            leaf: a NamedArray, or logical data of any kind.
        """
        data, cuts = (leaf.data, leaf.cuts) if isinstance(leaf, NamedArray) else (leaf, ())
        stored = pad(np, np.asarray(leaf if cuts else data), self.cuts)
        made: dict[tuple[Any, ...], np.ndarray] = {}
        for number in numbers:
            part = self.parts[number]
            if _key(part) not in made:
                made[_key(part)] = np.ascontiguousarray(stored[part]).reshape(stored[part].shape)
        return [made[_key(self.parts[number])] for number in numbers]

    def put(self, leaf: Any, devices: Devices) -> list[tf.Tensor]:
        """Returns the shards of an array for this process's devices; see `cut`."""
        data = leaf.data if isinstance(leaf, NamedArray) else leaf
        if isinstance(data, Shards) and data.storage == self and data.devices == devices:
            return data.tensors
        made: dict[tuple[int, str], tf.Tensor] = {}
        found = []
        for name, shard in zip(devices.names, self.cut(leaf, devices.numbers), strict=True):
            key = id(shard), "" if "CPU" in name else name  # CPUs share their memory
            if key not in made:
                with tf.device(name):
                    made[key] = tf.constant(shard)
            found.append(made[key])
        return found


class Shards:
    """What a program's result is: the shards that this process's devices hold.

    It has the shape and dtype of the stored array, and is read as one: `np.asarray(shards)`.

    Attributes:
        tensors: one for each of this process's devices, which are `devices`.
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
        """Where it is on its mesh."""
        return self.storage.layout

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process holds all of it."""
        return len(self._held()) == len(set(map(_key, self.storage.parts)))

    def block_until_ready(self) -> Shards:
        """Returns this; calls return when their results are there."""
        return self

    def _held(self) -> dict[tuple[Any, ...], int]:
        """Returns the parts that are here, each with the place of a tensor that has it."""
        return {
            _key(self.storage.parts[number]): place
            for place, number in reversed(list(enumerate(self.devices.numbers)))
        }

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        held = self._held()
        if not self.is_fully_addressable:
            raise ValueError(
                f"{self!r} is split over processes, and this one holds {len(held)} of its parts; "
                "make what is to be read whole, as a result without split dims"
            )
        whole, tensors = np.empty(self.shape, self.dtype), self.tensors
        for number, part in enumerate(self.storage.parts):
            place = held.get(_key(part))
            if place is not None and number == self.devices.numbers[place]:
                whole[part] = tensors[place].numpy()
        return np.asarray(whole, dtype)

    def __repr__(self) -> str:
        return f"Shards({self.dtype.name}{list(self.shape)}; {self.layout})"


def _key(part: tuple[slice, ...]) -> tuple[Any, ...]:
    return tuple((one.start, one.stop) for one in part)
