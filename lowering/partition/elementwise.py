"""Partition rules of elementwise operations: everything is local, in the layout of the result."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.ops.elementwise.arithmetic import ELEMENTWISE
from meshdsl.tensors.dtypes import is_float
from meshdsl.tracing.graph import Operation


def elementwise(case: Case) -> Strategy:
    """Operands come in the layout of the result."""
    op, (layout,) = case.operation, case.results
    shape = op.outputs[0].shape

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (result,) = op.outputs
        partial = [axis for value in inputs for axis, _ in value.layout.partial]
        here = layout.add_partial(partial)
        if op.name == "stop_gradient":
            return inputs
        return builder.add(op.name, inputs, [(result.shape, result.dtype, here)], op.params)

    return Strategy(
        operands=tuple(
            [layout if t.shape == shape else layout.restrict(t.shape.names) for t in op.inputs]
        ),
        results=(layout,),
        emit=emit,
        linear=_linear(op),
        additive=op.primitive.additive,
    )


def _linear(op: Operation) -> tuple[int, ...]:
    """Returns the operands in which an operation is linear; a cast is, where it is exact."""
    if op.name == "cast":
        before, after = op.inputs[0].dtype, op.outputs[0].dtype
        return (0,) if _holds(after, before) else ()
    return op.linear


def _holds(wide: np.dtype, narrow: np.dtype) -> bool:
    """Whether one floating-point dtype holds every number of another."""
    if not (is_float(wide) and is_float(narrow)):
        return False
    w, n = ml_dtypes.finfo(wide), ml_dtypes.finfo(narrow)
    return w.nmant >= n.nmant and w.maxexp >= n.maxexp and w.minexp <= n.minexp


RULES = dict.fromkeys(ELEMENTWISE, elementwise)
