"""Partition rule of the barriers that begin a recomputation: it changes no layout."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder


def barrier(case: Case) -> Strategy:
    """A barrier keeps all layouts."""

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        results = [(v.shape, v.dtype, v.layout) for v in inputs]
        return builder.add("barrier", inputs, results, {"id": id(case.operation)})

    return Strategy(case.operands, case.operands, emit)


RULES = {"barrier": barrier}
