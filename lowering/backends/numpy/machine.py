"""Machine: every device of a mesh simulated in lockstep.

A value is one array with a leading axis for the devices, numbered as the mesh numbers them. Local
instructions act on each row; collectives move data between rows, as their definitions say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.arrange import alignment
from meshdsl.lowering.backends.missing import emitter_of
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.tensors.cuts import part
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import accumulator, is_float

Arrays = Sequence[np.ndarray]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


class Machine:
    """A mesh of simulated devices."""

    def __init__(self, mesh: Mesh, emitters: Mapping[str, Emitter]) -> None:
        self.mesh = mesh
        self.emitters = emitters
        self.coordinates = list(mesh.coordinates())

    def index(self, axes: Sequence[str]) -> np.ndarray:
        """Returns each device's index along some axes, major first: [devices]."""
        found: np.ndarray = np.zeros(self.mesh.size, np.int32)
        for axis in axes:
            found = found * self.mesh.sizes[axis] + [c[axis] for c in self.coordinates]
        return found.astype(np.int32)

    def emitter(self, instruction: Instruction) -> Emitter:
        """Returns what emits an instruction."""
        return emitter_of(self.emitters, instruction, "numpy")

    def counts(self, axes: Sequence[str]) -> list[int]:
        """Returns the sizes of some axes."""
        return [self.mesh.sizes[axis] for axis in axes]

    def groups(self, axes: Sequence[str]) -> np.ndarray:
        """Returns the device groups along some axes: [groups, devices of a group in order]."""
        return np.array(self.mesh.groups(*axes))

    def shard(self, data: np.ndarray, value: Value) -> np.ndarray:
        """Cuts a global array into the shards of a layout; pads hold zeros."""
        assert data.shape == value.shape.sizes
        rows = np.zeros((self.mesh.size, *value.local.sizes), data.dtype)
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
                expected = (self.mesh.size, *value.local.sizes)
                assert array.shape == expected, (instruction.op, array.shape, expected)
                assert array.dtype == value.dtype, (instruction.op, array.dtype, value.dtype)
                held[value] = array
        return [held[v] for v in block.outputs]


def align(array: np.ndarray, have: Shape, want: Shape) -> np.ndarray:
    """Lays the dims of an array as `want` orders them, with size 1 for those that it lacks."""
    order, sizes = alignment(have, want)
    moved = array.transpose(0, *(i + 1 for i in order))
    return moved.reshape(array.shape[0], *sizes)


def wide(x: np.ndarray) -> np.ndarray:
    """Returns x in a dtype that SciPy knows and that sums are accurate in."""
    return x.astype(accumulator(x.dtype), copy=False)
