"""Machine: simulates all devices of a mesh in lockstep.

A value is one array with a leading axis for the devices, in the mesh's order. Local instructions
work on each row; collectives move data between rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from meshdsl.lowering.backends.common.machine import BaseMachine
from meshdsl.lowering.backends.common.namespace import Namespace
from meshdsl.lowering.backends.numpy import namespace
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.tensors.cuts import part
from meshdsl.tensors.dtypes import is_float

Arrays = Sequence[np.ndarray]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


@dataclass(frozen=True)
class Machine(BaseMachine):
    """Emits the instructions of all devices of a mesh: an array has a row for each device.

    Attributes:
        stage_axes: the axes of a pipeline, along which devices may take different branches.
    """

    stage_axes: tuple[str, ...] = ()
    backend = "numpy"
    xp: ClassVar[Namespace] = namespace

    @cached_property
    def coordinates(self) -> list[Mapping[str, int]]:
        """The index of each device along every axis."""
        return list(self.mesh.coordinates())

    def sizes(self, value: Value) -> tuple[int, ...]:
        return (self.mesh.size, *value.local.sizes)

    def index(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the index of each device along some axes, major first: [devices]."""
        index: np.ndarray = np.zeros(self.mesh.size, np.int32)
        for axis in axes:
            index = index * self.mesh.sizes[axis] + [c[axis] for c in self.coordinates]
        return index.astype(np.int32)

    def groups(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the groups of devices along some axes: [groups, devices of a group]."""
        return np.array(self.mesh.groups(*axes))

    def shard(self, data: np.ndarray, value: Value) -> np.ndarray:
        """Returns the shards of a global array, with zeros as pads: [devices, ...]."""
        assert data.shape == value.shape.sizes
        rows = np.zeros(self.sizes(value), data.dtype)
        for device in range(self.mesh.size):
            part, inside = self.block(value, device)
            rows[device, ...][inside] = data[part]
        return rows

    def block(self, value: Value, device: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Returns the part of a global array that a device has, and its range in the shard."""
        parts, ranges = [], []
        for dim in value.shape:
            axes = value.layout.axes(dim.name)
            indices = [self.coordinates[device][axis] for axis in axes]
            start, stop = part(dim.size, self.counts(axes), indices)
            parts.append(slice(start, stop))
            ranges.append(slice(stop - start))
        return tuple(parts), tuple(ranges)

    def join(self, rows: np.ndarray, value: Value) -> np.ndarray:
        """Returns the global array of shards, without pads; replicas must be equal bit by bit."""
        assert not value.layout.partial
        joined = np.empty(value.shape.sizes, value.dtype)
        seen = np.zeros(value.shape.sizes, bool)
        for device in range(self.mesh.size):
            part, inside = self.block(value, device)
            data = rows[device, ...][inside]
            if seen[part].all() and joined[part].size:
                assert np.array_equal(joined[part], data, equal_nan=is_float(rows.dtype))
            joined[part] = data
            seen[part] = True
        return joined

    def run(self, block: Block, inputs: Arrays) -> list[np.ndarray]:
        """Runs a block on the rows of its inputs."""
        arrays: dict[Value, np.ndarray] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            results = self.emitter(instruction)(
                self, instruction, [arrays[v] for v in instruction.inputs]
            )
            if isinstance(results, np.ndarray):
                results = (results,)
            for value, array in zip(instruction.outputs, results, strict=True):
                expected = self.sizes(value)
                assert array.shape == expected, (instruction.op, array.shape, expected)
                assert array.dtype == value.dtype, (instruction.op, array.dtype, value.dtype)
                arrays[value] = array
        return [arrays[v] for v in block.outputs]
