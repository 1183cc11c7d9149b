"""Partition rules of reductions: local, then partial over the axes of the dims reduced over."""

from __future__ import annotations

from collections.abc import Sequence

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
        return builder.add(op.name, inputs, [(result.shape, result.dtype, here)], op.params)

    return Plan(
        operands=(layout,),
        results=(left,),
        emit=emit,
        linear=(0,) if op.name == "sum" else (),
        fixed=frozenset(axes),
    )


RULES = {"sum": reduction, "max": reduction, "min": reduction}
