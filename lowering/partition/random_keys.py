"""Partition rule of random bits: each device runs the counters of its own elements.

The counter of an element is its row-major index in the whole tensor, as two 32-bit words. Leading
dims are counted in the high word only as far as the low word cannot hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import RandomBits
from meshdsl.lowering.partition.creation import global_index
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.ops.random import KEY
from meshdsl.tensors.dims import Shape

UINT32 = np.dtype("uint32")


def random_bits(case: Case) -> Strategy:
    """Every device draws its own elements; the key is whole everywhere."""
    op, (layout,) = case.operation, case.results
    (out,) = op.outputs
    shape = op.params["shape"]
    layout = layout.split(KEY.name, ())
    here = layout.restrict(shape.names)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        at = _words(shape)
        high = _counter(builder, Shape(shape[:at]), here, 0)
        low = _counter(builder, Shape(shape[at:]), here, op.params["start"])
        params: RandomBits = {"pairs": op.params["pairs"]}
        result = [(out.shape, out.dtype, layout)]
        return builder.add("threefry2x32", (inputs[0], high, low), result, params)

    return Strategy((TensorLayout(),), (layout,), emit)


def _words(shape: Shape) -> int:
    """Returns how many leading dims the high word counts."""
    at, volume = len(shape), 1
    while at and volume * shape[at - 1].size <= 2**32:
        at -= 1
        volume *= shape[at].size
    if Shape(shape[:at]).volume > 2**32:
        raise ValueError(f"{shape} has more elements than two 32-bit words can count")
    return at


def _counter(builder: BlockBuilder, shape: Shape, layout: TensorLayout, start: int) -> Value:
    """Returns the row-major index over some dims, as u32."""
    total = builder.number(start, UINT32)
    stride = 1
    for dim in reversed(shape):
        index = global_index(builder, dim, layout)
        part = Shape([dim])
        index = builder.one("cast", (index,), part, UINT32, index.layout)
        if stride > 1:
            by = builder.number(stride, UINT32)
            index = builder.one("multiply", (index, by), part, UINT32, index.layout)
        together = Shape([dim, *total.shape])
        layout_here = layout.restrict(together.names)
        total = builder.one("add", (index, total), together, UINT32, layout_here)
        stride *= dim.size
    return total


def fold_in(case: Case) -> Strategy:
    """Every device makes the keys of its own numbers."""
    op, (layout,) = case.operation, case.results
    (out,) = op.outputs
    layout = layout.split(KEY.name, ())

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        source, low = inputs
        high = builder.number(op.params["high"], UINT32)
        result = [(out.shape, out.dtype, layout)]
        return builder.add("threefry2x32", (source, high, low), result, {"pairs": True})

    keys, numbers = (layout.restrict(tensor.shape.names) for tensor in op.inputs)
    return Strategy((keys, numbers), (layout,), emit)


RULES = {"random_bits": random_bits, "fold_in": fold_in}
