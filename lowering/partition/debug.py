"""Partition rule of printing: the values come whole to every device."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder


def printed(case: Case) -> Strategy:
    """What is split is gathered; the backends let the first device print."""
    op, whole = case.operation, TensorLayout()
    (done,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        return builder.add("print", inputs, [(done.shape, done.dtype, whole)], op.params)

    return Strategy((whole,) * len(op.inputs), (whole,), emit)


RULES = {"print": printed}
