"""Machine: every device of a mesh simulated in lockstep.

A value is one array with a leading axis for the devices, numbered as the mesh numbers them. Local
instructions act on each row; collectives move data between rows, as their definitions say.
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
    """A mesh of simulated devices."""

    backend = "numpy"
    xp: ClassVar[Namespace] = namespace

    @cached_property
    def coordinates(self) -> list[Mapping[str, int]]:
        """Each device's place along every axis."""
        return list(self.mesh.coordinates())

    def sizes(self, value: Value) -> tuple[int, ...]:
        return (self.mesh.size, *value.local.sizes)

    def index(self, axes: Sequence[str]) -> np.ndarray:
        """Returns each device's index along some axes, major first: [devices]."""
        found: np.ndarray = np.zeros(self.mesh.size, np.int32)
        for axis in axes:
            found = found * self.mesh.sizes[axis] + [c[axis] for c in self.coordinates]
        return found.astype(np.int32)

    def groups(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the device groups along some axes: [groups, devices of a group in order]."""
        return np.array(self.mesh.groups(*axes))

    def shard(self, data: np.ndarray, value: Value) -> np.ndarray:
        """Cuts a global array into the shards of a layout; pads hold zeros."""
        assert data.shape == value.shape.sizes
        rows = np.zeros(self.sizes(value), data.dtype)
        for device in range(self.mesh.size):
            held, real = self.block(value, device)
            rows[device, ...][real] = data[held]
        return rows

    def block(self, value: Value, device: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Returns the part of a global array that a device holds, and where its shard has it."""
        parts, places = [], []
        for dim in value.shape:
            axes = value.layout.axes(dim.name)
            at = [self.coordinates[device][axis] for axis in axes]
            start, stop = part(dim.size, self.counts(axes), at)
            parts.append(slice(start, stop))
            places.append(slice(stop - start))
        return tuple(parts), tuple(places)

    def join(self, rows: np.ndarray, value: Value) -> np.ndarray:
        """Puts shards together, without pads; replicas must agree to the last bit."""
        assert not value.layout.partial
        whole = np.empty(value.shape.sizes, value.dtype)
        seen = np.zeros(value.shape.sizes, bool)
        for device in range(self.mesh.size):
            held, real = self.block(value, device)
            mine = rows[device, ...][real]
            if seen[held].all() and whole[held].size:
                assert np.array_equal(whole[held], mine, equal_nan=is_float(rows.dtype))
            whole[held] = mine
            seen[held] = True
        return whole

    def run(self, block: Block, inputs: Arrays) -> list[np.ndarray]:
        """Runs a block on the rows of its inputs."""
        held: dict[Value, np.ndarray] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            results = self.emitter(instruction)(
                self, instruction, [held[v] for v in instruction.inputs]
            )
            if isinstance(results, np.ndarray):
                results = (results,)
            for value, array in zip(instruction.outputs, results, strict=True):
                expected = self.sizes(value)
                assert array.shape == expected, (instruction.op, array.shape, expected)
                assert array.dtype == value.dtype, (instruction.op, array.dtype, value.dtype)
                held[value] = array
        return [held[v] for v in block.outputs]
