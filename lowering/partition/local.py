"""Partition rule of operations of a user's own: local in the dims that may be split."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BOOL, BlockBuilder
from meshdsl.ops.control.local import Definition
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import is_differentiable


def local(case: Case) -> Strategy:
    """A dim is split in every tensor as in the first that splits it, results before operands.

    A result without a split dim is a partial sum over its axes, and pads along such a dim are
    masked.
    """
    op = case.operation
    definition: Definition = op.params["definition"]
    if definition.rule is not None:
        return definition.rule(case)
    free = definition.free(op)
    axes: dict[str, tuple[str, ...]] = {}
    used: set[str] = set()
    pairs = zip((*op.outputs, *op.inputs), (*case.results, *case.operands), strict=True)
    for tensor, layout in pairs:
        for name in tensor.shape.names:
            if name in free and name not in axes and layout.axes(name):
                axes[name] = tuple(a for a in layout.axes(name) if a not in used)
                used.update(axes[name])
    sums = [n for n in axes if any(t.shape.find(n) is None for t in op.outputs)]

    def place(shape: Shape) -> TensorLayout:
        return TensorLayout.of({name: axes.get(name, ()) for name in shape.names})

    def result(shape: Shape) -> TensorLayout:
        lacking = [axis for name in axes if shape.find(name) is None for axis in axes[name]]
        return place(shape).add_partial(lacking)

    results = [(t.shape, t.dtype, result(t.shape)) for t in op.outputs]
    fills = (*definition.pads, *(0.0 for _ in op.inputs[len(definition.pads) :]))

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        masked = []
        for value, fill in zip(inputs, fills, strict=True):
            names = [name for name in sums if value.shape.find(name) is not None]
            blank = fill if is_differentiable(value.dtype) else False if value.dtype == BOOL else 0
            masked.append(builder.mask_pads(value, names, blank))
        return builder.add("local", masked, results, op.params)

    operands = tuple(place(t.shape) for t in op.inputs)
    return Strategy(operands, tuple(layout for _, _, layout in results), emit)


RULES = {"local": local}
