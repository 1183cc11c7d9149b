"""Partition rules of elementwise operations: everything is local, in the layout of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition.strategy import Case, Emit, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.ops.elementwise.broadcasting import ELEMENTWISE
from meshdsl.tensors.dims import Shape


def elementwise(case: Case) -> Strategy:
    """Operands come in the layout of the result."""
    op, (layout,), (result,) = case.operation, case.results, case.operation.outputs
    shapes = tuple([t.shape for t in op.inputs])
    if op.params:
        emit = _emit(op.name, result.shape, result.dtype, layout, op.params)
        return _strategy(shapes, result.shape, layout, emit, op.linear, op.primitive.additive)
    facts = op.linear, op.primitive.additive
    return _of_kind(op.name, shapes, result.shape, result.dtype, layout, *facts)


@lru_cache(maxsize=1 << 10)
def _of_kind(
    name: str,
    shapes: tuple[Shape, ...],
    shape: Shape,
    dtype: np.dtype,
    layout: TensorLayout,
    linear: tuple[int, ...],
    additive: bool,
) -> Strategy:
    """Returns the strategy of an operation without parameters.

    An optimizer does the same to thousands of parameters that have the same dims.
    """
    emit = _emit(name, shape, dtype, layout, {})
    return _strategy(shapes, shape, layout, emit, linear, additive)


def _strategy(
    shapes: Sequence[Shape],
    shape: Shape,
    layout: TensorLayout,
    emit: Emit,
    linear: tuple[int, ...],
    additive: bool,
) -> Strategy:
    operands = [layout if own == shape else layout.restrict(own.names) for own in shapes]
    return Strategy(tuple(operands), (layout,), emit, linear, additive)


def _emit(
    name: str, shape: Shape, dtype: np.dtype, layout: TensorLayout, params: Mapping[str, Any]
) -> Emit:
    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        if name == "stop_gradient":
            return inputs
        here = layout
        for value in inputs:
            if value.layout.partial:
                here = here.add_partial([axis for axis, _ in value.layout.partial])
        return builder.add(name, inputs, [(shape, dtype, here)], params)

    return emit


RULES = dict.fromkeys(ELEMENTWISE, elementwise)
