"""BlockBuilder: writes the instructions of one block.

Identical pure instructions are written once (value numbering), so a second request for a device
index, a slice or a collective costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.collectives import COLLECTIVES
from meshdsl.lowering.instructions import kind_of
from meshdsl.lowering.program import EFFECTS, Block, Instruction, Value, exact_key
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tracing.source import UNKNOWN, Source

INT32 = np.dtype("int32")
BOOL = np.dtype("bool")
# What may move blocks; not a permute, which leaves zeros on devices that are sent nothing.
_MOVES = frozenset(COLLECTIVES) - {"permute"} | {"slice"}


class BlockBuilder:
    """Instructions under construction; the next instructions get `source` as their line."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.source: Source = UNKNOWN
        self.instructions: list[Instruction] = []
        self._known: dict[Hashable, tuple[Value, ...]] = {}

    def value(self, shape: Shape, dtype: np.dtype, layout: TensorLayout) -> Value:
        return Value(shape, dtype, layout, layout.local(shape, self.mesh))

    def add(
        self,
        op: str,
        inputs: Sequence[Value],
        results: Sequence[tuple[Shape, np.dtype, TensorLayout]],
        params: Mapping[str, Any] | None = None,
    ) -> tuple[Value, ...]:
        """Writes an instruction and returns its outputs.

        A collective, or a slice, in groups of one device only changes the layout of its operand.

        Raises:
            ValueError: an instruction of that name is not declared.
        """
        kind_of(op)  # refuses what is not declared
        params = dict(params) if params else {}
        if op in _MOVES and self.mesh.extent(params["axes"]) == 1:
            # On a mesh of one device JAX binds no axes, so it could not even add up along them.
            op, params = "slice", {"axes": (), "dim": ""}
        key = None if op in EFFECTS else _key(op, inputs, results, params)
        if key is not None and key in self._known:
            return self._known[key]
        outputs = tuple([self.value(*result) for result in results])
        self.instructions.append(Instruction(op, tuple(inputs), outputs, params, self.source))
        if key is not None:
            self._known[key] = outputs
        return outputs

    def one(
        self,
        op: str,
        inputs: Sequence[Value],
        shape: Shape,
        dtype: np.dtype,
        layout: TensorLayout,
        **params: Any,
    ) -> Value:
        """Writes an instruction with one output and returns it."""
        return self.add(op, inputs, [(shape, dtype, layout)], params)[0]

    def number(self, value: float | bool, dtype: np.dtype) -> Value:
        """Returns a scalar constant."""
        return self.one("full", (), Shape(), dtype, TensorLayout(), value=value)

    def device_index(self, axes: Sequence[str]) -> Value:
        """Returns this device's index along `axes`, major first: an s32 scalar."""
        axes = [axis for axis in axes if self.mesh.sizes[axis] > 1]
        if not axes:
            return self.number(0, INT32)
        varying = TensorLayout().add_partial(axes, "varying")
        return self.one("device_index", (), Shape(), INT32, varying, axes=tuple(axes))

    def has_pads(self, dim: Dimension, axes: Sequence[str]) -> bool:
        """Whether shards of `dim`, split over `axes`, have pads."""
        return dim.size % self.mesh.extent(axes) != 0

    def positions(self, dim: Dimension, axes: Sequence[str]) -> Value:
        """Returns the global index of each element of this device's shard: s32[dim].

        Pads have an index of `dim.size` or more.
        """
        here = TensorLayout.of({dim.name: axes})
        index = self.one("iota", (), Shape([dim]), INT32, here)
        levels = [axis for axis in axes if self.mesh.sizes[axis] > 1]
        if not self.has_pads(dim, axes) and levels:
            start = self._block_start(dim.size, levels)
            return self.one("add", (index, start), Shape([dim]), INT32, here)
        for depth in reversed(range(len(levels))):
            outside = -(-dim.size // self.mesh.extent(levels[:depth]))
            start = self._block_start(outside, [levels[depth]])
            index = self.one("add", (index, start), Shape([dim]), INT32, here)
            if depth:  # past this block's end begins the next one, which is not ours
                end = self.number(outside, INT32)
                inside = self.one("less", (index, end), Shape([dim]), BOOL, here)
                past = self.number(dim.size, INT32)
                index = self.one("select", (inside, index, past), Shape([dim]), INT32, here)
        return index

    def local_indices(self, indices: Value, dim: Dimension, axes: Sequence[str]) -> Value:
        """Returns global s32 indices along `dim`, counted within this device's shard.

        Indices of other devices, and outside of `dim`, are negative or past the shard's end.
        """
        levels = [axis for axis in axes if self.mesh.sizes[axis] > 1]
        if not levels:
            return indices
        layout = indices.layout.add_partial(axes, "varying")
        if not self.has_pads(dim, axes):
            return self._less(indices, self._block_start(dim.size, levels), layout)
        outside = dim.size
        indices = self._within(indices, outside)
        for axis in levels:
            indices = self._less(indices, self._block_start(outside, [axis]), layout)
            outside = -(-outside // self.mesh.sizes[axis])
            indices = self._within(indices, outside)
        return indices

    def _less(self, indices: Value, start: Value, layout: TensorLayout) -> Value:
        return self.one("subtract", (indices, start), indices.shape, INT32, layout)

    def _within(self, indices: Value, size: int) -> Value:
        """Returns the indices with -1 for those past the end of a block."""
        shape, layout = indices.shape, indices.layout
        end, none = self.number(size, INT32), self.number(-1, INT32)
        inside = self.one("less", (indices, end), shape, BOOL, layout)
        return self.one("select", (inside, indices, none), shape, INT32, layout)

    def _block_start(self, size: int, axes: Sequence[str]) -> Value:
        index = self.device_index(axes)
        block = self.number(-(-size // self.mesh.extent(axes)), INT32)
        return self.one("multiply", (index, block), Shape(), INT32, index.layout)

    def mask_pads(self, value: Value, names: Iterable[str], fill: float | bool) -> Value:
        """Returns `value` with `fill` in its pads along some dims; itself where it has none."""
        blank = None
        for name in names:
            dim, axes = value.shape.get(name), value.layout.axes(name)
            if not self.has_pads(dim, axes):
                continue
            index = self.positions(dim, axes)
            end = self.number(dim.size, INT32)
            real = self.one("less", (index, end), Shape([dim]), BOOL, index.layout)
            blank = blank or self.number(fill, value.dtype)
            value = self.one("select", (real, value, blank), value.shape, value.dtype, value.layout)
        return value

    def finish(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Block:
        """Returns the block, without instructions that have no effect and that no output needs."""
        needed = set(outputs)
        kept = []
        for instruction in reversed(self.instructions):
            if not needed.isdisjoint(instruction.outputs) or instruction.has_effect:
                needed.update(instruction.inputs)
                kept.append(instruction)
        return Block(tuple(inputs), tuple(reversed(kept)), tuple(outputs))


def _key(op: str, inputs: Any, results: Any, params: Mapping[str, Any]) -> Hashable | None:
    if not params:  # as of most instructions
        return op, tuple(map(id, inputs)), tuple(results)
    items = []
    for name in sorted(params):
        value = params[name]
        if isinstance(value, np.ndarray | Block | dict):
            return None
        items.append((name, exact_key(value)))
    return op, tuple(map(id, inputs)), tuple(results), tuple(items)
