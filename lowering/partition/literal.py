"""Partition rule of literals: every device has all of the data."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder


def literal(case: Case) -> Strategy:
    """The data is replicated; a slice of it sends nothing."""
    (out,) = case.operation.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        data = {"data": case.operation.params["data"]}
        return builder.add("literal", (), [(out.shape, out.dtype, TensorLayout())], data)

    return Strategy((), (TensorLayout(),), emit)


RULES = {"literal": literal}
