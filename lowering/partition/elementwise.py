"""Partition rules of elementwise operations: everything is local, in the layout of the result."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.ops.elementwise.broadcasting import ELEMENTWISE


def elementwise(case: Case) -> Strategy:
    """Operands come in the layout of the result."""
    op, (layout,) = case.operation, case.results
    shape = op.outputs[0].shape

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (result,) = op.outputs
        partial = [axis for value in inputs for axis, _ in value.layout.partial]
        here = layout.add_partial(partial) if partial else layout
        if op.name == "stop_gradient":
            return inputs
        return builder.add(op.name, inputs, [(result.shape, result.dtype, here)], op.params)

    return Strategy(
        operands=tuple(
            [layout if t.shape == shape else layout.restrict(t.shape.names) for t in op.inputs]
        ),
        results=(layout,),
        emit=emit,
        linear=op.linear,
        additive=op.primitive.additive,
    )


RULES = dict.fromkeys(ELEMENTWISE, elementwise)
