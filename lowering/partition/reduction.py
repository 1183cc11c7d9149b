"""Partition rules of reductions: local, then partial over the axes of the dims reduced over."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshdsl.dtypes import is_float
from meshdsl.lowering.builder import BlockBuilder
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value


def reduction(case: Case) -> Plan:
    """Local in the layout of the operand; split dims leave partial results."""
    op, (layout,) = case.operation, case.operands
    result, over = op.outputs[0], op.params["over"]
    axes = [axis for name in over for axis in layout.axes(name)]
    left = layout.restrict(result.shape.names).add_partial(axes, op.name)  # type: ignore[arg-type]

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        here = left.add_partial(inputs[0].layout.partial_axes)
        inputs = [builder.mask_pads(inputs[0], over, identity(op.name, result.dtype))]
        return builder.add(op.name, inputs, [(result.shape, result.dtype, here)], op.params)

    return Plan(
        operands=(layout,),
        results=(left,),
        emit=emit,
        linear=(0,) if op.name == "sum" else (),
        fixed=frozenset(axes),
    )


def identity(kind: str, dtype: np.dtype) -> float:
    """Returns what changes no sum, maximum or minimum."""
    if kind == "sum":
        return 0
    if is_float(dtype):
        return -np.inf if kind == "max" else np.inf
    limits = np.iinfo(dtype)
    return limits.min if kind == "max" else limits.max


RULES = {"sum": reduction, "max": reduction, "min": reduction}
