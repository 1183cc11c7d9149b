"""The numpy backend: every device simulated in lockstep; the reference for all other backends.

A value is one array with a leading axis for the devices, numbered as the mesh numbers them. Local
instructions act on each row; collectives move data between rows, as their definitions say.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import special  # type: ignore[import-untyped]

from meshdsl.dims import Shape
from meshdsl.dtypes import is_float
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends.arrange import NUMPY_NAMES, alignment, equation
from meshdsl.lowering.backends.threefry import threefry2x32
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.mesh import Mesh

Arrays = Sequence[np.ndarray]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


class Executable:
    """A program ready to run on simulated devices."""

    def __init__(self, program: SpmdProgram, donated: Sequence[bool] = ()) -> None:
        self.program = program
        self._machine = Machine(program.mesh)

    def call_flat(self, leaves: Sequence[Any]) -> list[np.ndarray]:
        """Runs the program on global arrays and returns global arrays."""
        block, machine = self.program.block, self._machine
        inputs = [
            machine.shard(np.asarray(leaf), value)
            for leaf, value in zip(leaves, block.inputs, strict=True)
        ]
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            outputs = machine.run(block, inputs)
        return [machine.join(a, v) for a, v in zip(outputs, block.outputs, strict=True)]


class Machine:
    """A mesh of simulated devices."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.coordinates = list(mesh.coordinates())

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
        """Cuts a global array into the shards of a layout."""
        assert data.shape == value.shape.sizes
        rows = []
        for device in range(self.mesh.size):
            rows.append(data[self.block(value.shape, value.layout, device)])
        return np.stack(rows)

    def block(self, shape: Shape, layout: TensorLayout, device: int) -> tuple[slice, ...]:
        """Returns the part of a global array that a device holds."""
        parts = []
        for dim in shape:
            axes = layout.axes(dim.name)
            size = dim.size // self.mesh.extent(axes)
            start = int(self.index(axes)[device]) * size if axes else 0
            parts.append(slice(start, start + size))
        return tuple(parts)

    def join(self, rows: np.ndarray, value: Value) -> np.ndarray:
        """Puts shards together; replicas must agree to the last bit."""
        assert not value.layout.partial
        whole = np.empty(value.shape.sizes, value.dtype)
        seen = np.zeros(value.shape.sizes, bool)
        for device in range(self.mesh.size):
            part = self.block(value.shape, value.layout, device)
            if seen[part].all() and whole[part].size:
                assert np.array_equal(whole[part], rows[device], equal_nan=is_float(rows.dtype))
            whole[part] = rows[device]
            seen[part] = True
        return whole

    def run(self, block: Block, inputs: Arrays) -> list[np.ndarray]:
        """Runs a block on the rows of its inputs."""
        held: dict[Value, np.ndarray] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            results = EMITTERS[instruction.op](
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


def _align(array: np.ndarray, have: Shape, want: Shape) -> np.ndarray:
    order, sizes = alignment(have, want)
    moved = array.transpose(0, *(i + 1 for i in order))
    return moved.reshape(array.shape[0], *sizes)


def _elementwise(function: Callable[..., np.ndarray]) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        (out,) = instruction.outputs
        aligned = [
            _align(a, v.local, out.local) for a, v in zip(inputs, instruction.inputs, strict=True)
        ]
        result = np.asarray(function(*aligned)).astype(out.dtype)
        return np.broadcast_to(result, (machine.mesh.size, *out.local.sizes))

    return emit


def _wide(x: np.ndarray) -> np.ndarray:
    """Returns x in a dtype that SciPy knows and that sums are accurate in."""
    return x.astype(np.float32) if is_float(x.dtype) and x.dtype.itemsize < 4 else x


def _reduction(function: Any) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        local = instruction.inputs[0].local
        at = tuple(local.position(n) + 1 for n in instruction.params["over"])
        wide = _wide(inputs[0])
        return function.reduce(wide, axis=at, dtype=wide.dtype).astype(inputs[0].dtype)

    return emit


def _full(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (out,) = instruction.outputs
    shape = (machine.mesh.size, *out.local.sizes)
    return np.full(shape, instruction.params["value"], out.dtype)


def _literal(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    data = instruction.params["data"]
    return np.broadcast_to(data, (machine.mesh.size, *data.shape))


def _iota(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    size = instruction.outputs[0].local[0].size
    return np.broadcast_to(np.arange(size, dtype=np.int32), (machine.mesh.size, size))


def _device_index(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return machine.index(instruction.params["axes"])


def _einsum(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    shapes = [v.local for v in instruction.inputs]
    (out,) = instruction.outputs
    letters = equation(shapes, out.local, batch="Z")
    return np.einsum(letters, *map(_wide, inputs), optimize=len(inputs) > 1).astype(out.dtype)


def _reshape(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    return inputs[0].reshape(machine.mesh.size, *instruction.outputs[0].local.sizes)


def _broadcast(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (out,) = instruction.outputs
    aligned = _align(inputs[0], instruction.inputs[0].local, out.local)
    return np.broadcast_to(aligned, (machine.mesh.size, *out.local.sizes))


def _take(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    table, indices = inputs
    at = instruction.inputs[0].local.position(instruction.params["dim"])
    rows = np.moveaxis(table, at + 1, 1)
    inside = (indices >= 0) & (indices < rows.shape[1])
    safe = np.where(inside, indices, 0)
    found = np.stack([row[index] for row, index in zip(rows, safe, strict=True)])
    mask = inside.reshape(*inside.shape, *(1,) * (rows.ndim - 2))
    return np.where(mask, found, np.zeros((), found.dtype))


def _scatter_add(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    updates, indices = inputs
    (out,) = instruction.outputs
    names = instruction.inputs[1].local.names
    rest = out.local.without([instruction.params["dim"]])
    ordered = Shape([*instruction.inputs[1].local, *rest])
    updates = _align(updates, instruction.inputs[0].local, ordered)
    at = out.local.position(instruction.params["dim"])
    result = np.zeros((machine.mesh.size, *out.local.sizes), out.dtype)
    rows = np.moveaxis(result, at + 1, 1)
    assert names == ordered.names[: len(names)]
    for row, index, update in zip(rows, indices, updates, strict=True):
        inside = (index >= 0) & (index < row.shape[0])
        np.add.at(row, index[inside], update[inside])
    return result


def _threefry(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    key, high, low = inputs
    shape = instruction.outputs[0].local.without(["random_key"])
    high, low = (
        _align(a, v.local, shape) for a, v in zip((high, low), instruction.inputs[1:], strict=True)
    )
    words = [key[:, i].reshape(-1, *(1,) * len(shape)) for i in (0, 1)]
    full = (machine.mesh.size, *shape.sizes)
    high, low = np.broadcast_to(high, full), np.broadcast_to(low, full)
    first, second = threefry2x32(words[0], words[1], high, low)
    return np.stack([first, second], -1) if instruction.params["pairs"] else first ^ second


def _slice(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    if not instruction.params["axes"]:
        return inputs[0]
    local = instruction.inputs[0].local
    at = local.position(instruction.params["dim"])
    axes = instruction.params["axes"]
    parts = np.split(inputs[0], machine.mesh.extent(axes), axis=at + 1)
    index = machine.index(axes)
    return np.stack([parts[i][device] for device, i in enumerate(index)])


def _scan(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    params = instruction.params
    body: Block = params["body"]
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    fixed, carry = list(inputs[:consts]), list(inputs[consts : consts + carries])
    stacked = [
        np.moveaxis(a, v.local.position(dim) + 1, 0)
        for a, v in zip(
            inputs[consts + carries :], instruction.inputs[consts + carries :], strict=True
        )
    ]
    steps = range(params["length"])
    rows: list[list[np.ndarray]] = []
    for step in reversed(steps) if params["reverse"] else steps:
        results = machine.run(body, [*fixed, *carry, *(a[step] for a in stacked)])
        carry = results[:carries]
        rows.append(results[carries:])
    if params["reverse"]:
        rows.reverse()
    return [*carry, *(np.stack(column, axis=1) for column in zip(*rows, strict=True))]


# The collectives, by their definitions.


def _at(instruction: Instruction, dim: str) -> int:
    """Returns the position of a dim within one device's array."""
    return instruction.inputs[0].local.position(dim)


_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def _all_reduce(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    result = np.empty_like(inputs[0])
    for group in machine.groups(instruction.params["axes"]):
        combine = _COMBINE[instruction.params["kind"]]
        result[group] = functools.reduce(combine, inputs[0][group])
    return result


def _reduce_scatter(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    at = _at(instruction, instruction.params["dim"])
    (out,) = instruction.outputs
    result = np.empty((machine.mesh.size, *out.local.sizes), out.dtype)
    for group in machine.groups(instruction.params["axes"]):
        total = functools.reduce(np.add, inputs[0][group])
        result[group] = np.stack(np.split(total, len(group), axis=at))
    return result


def _all_gather(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    at = _at(instruction, instruction.params["dim"])
    (out,) = instruction.outputs
    result = np.empty((machine.mesh.size, *out.local.sizes), out.dtype)
    for group in machine.groups(instruction.params["axes"]):
        result[group] = np.concatenate(list(inputs[0][group]), axis=at)
    return result


def _all_to_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    split = _at(instruction, instruction.params["split"])
    concat = _at(instruction, instruction.params["concat"])
    (out,) = instruction.outputs
    result = np.empty((machine.mesh.size, *out.local.sizes), out.dtype)
    for group in machine.groups(instruction.params["axes"]):
        sent = [np.split(row, len(group), axis=split) for row in inputs[0][group]]
        for place, device in enumerate(group):
            result[device] = np.concatenate([parts[place] for parts in sent], axis=concat)
    return result


def _permute(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    result = np.zeros_like(inputs[0])
    for source, target in instruction.params["pairs"]:
        result[target] = inputs[0][source]
    return result


EMITTERS: Mapping[str, Emitter] = {
    **{name: _elementwise(getattr(np, name)) for name in NUMPY_NAMES},
    "round": _elementwise(np.rint),
    "rsqrt": _elementwise(lambda x: (1 / np.sqrt(x)).astype(x.dtype)),
    "sigmoid": _elementwise(lambda x: special.expit(_wide(x))),
    "erf": _elementwise(lambda x: special.erf(_wide(x))),
    "shift_right": lambda machine, instruction, inputs: (
        inputs[0] >> inputs[0].dtype.type(instruction.params["places"])
    ),
    "select": _elementwise(np.where),
    "cast": _elementwise(lambda x: x),
    "sum": _reduction(np.add),
    "max": _reduction(np.maximum),
    "min": _reduction(np.minimum),
    "full": _full,
    "literal": _literal,
    "iota": _iota,
    "device_index": _device_index,
    "einsum": _einsum,
    "reshape": _reshape,
    "rename": lambda machine, instruction, inputs: inputs[0],
    "transpose": lambda machine, instruction, inputs: _align(
        inputs[0], instruction.inputs[0].local, instruction.outputs[0].local
    ),
    "broadcast": _broadcast,
    "barrier": lambda machine, instruction, inputs: tuple(inputs),
    "take": _take,
    "scatter_add": _scatter_add,
    "threefry2x32": _threefry,
    "slice": _slice,
    "scan": _scan,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
