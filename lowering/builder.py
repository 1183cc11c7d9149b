"""BlockBuilder: writes the instructions of one block.

Identical pure instructions are written once (value numbering), so asking twice for a device index,
a slice or a collective costs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.dims import Dimension, Shape
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.mesh import Mesh
from meshdsl.source import UNKNOWN, Source

INT32 = np.dtype("int32")


class BlockBuilder:
    """Instructions under construction; `source` is given to whatever is written next."""

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
        """Writes an instruction and returns its outputs."""
        params = dict(params or {})
        key = _key(op, inputs, results, params)
        if key is not None and key in self._known:
            return self._known[key]
        outputs = tuple(self.value(*result) for result in results)
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

    def shard_start(self, dim: Dimension, axes: Sequence[str]) -> Value:
        """Returns the global index at which this device's shard of `dim` starts: an s32 scalar."""
        index = self.device_index(axes)
        size = self.number(dim.size // self.mesh.extent(axes), INT32)
        return self.one("multiply", (index, size), Shape(), INT32, index.layout)

    def finish(self, inputs: Sequence[Value], outputs: Sequence[Value]) -> Block:
        """Returns the block, without instructions that no output needs."""
        needed = set(outputs)
        kept = []
        for instruction in reversed(self.instructions):
            if any(output in needed for output in instruction.outputs):
                needed.update(instruction.inputs)
                kept.append(instruction)
        return Block(tuple(inputs), tuple(reversed(kept)), tuple(outputs))


def _key(op: str, inputs: Any, results: Any, params: Mapping[str, Any]) -> Hashable | None:
    items = []
    for name in sorted(params):
        value = params[name]
        if isinstance(value, np.ndarray | Block | dict):
            return None
        if isinstance(value, float):
            value = value.hex()  # 0.0 and -0.0 are equal, but not the same
        items.append((name, type(value), value))
    return op, tuple(map(id, inputs)), tuple(results), tuple(items)
