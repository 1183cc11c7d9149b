"""Partition rules of tensors from nothing: every device makes its own shard."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import Full
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import INT32, BlockBuilder
from meshdsl.tensors.dims import Dimension


def full(case: Case) -> Strategy:
    """Every device fills its own shard."""
    (out,), (layout,) = case.operation.outputs, case.results

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        params: Full = {"value": case.operation.params["value"]}
        return builder.add("full", (), [(out.shape, out.dtype, layout)], params)

    return Strategy((), (layout,), emit)


def arange(case: Case) -> Strategy:
    """Every device counts from where its shard starts."""
    (out,), (layout,) = case.operation.outputs, case.results

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        index = global_index(builder, out.shape[0], layout)
        if out.dtype != INT32:
            index = builder.one("cast", (index,), out.shape, out.dtype, layout)
        return (index,)

    return Strategy((), (layout,), emit)


def global_index(builder: BlockBuilder, dim: Dimension, layout: TensorLayout) -> Value:
    """Returns the global indices of this device's shard of `dim`: s32[dim]; see `positions`."""
    return builder.positions(dim, layout.axes(dim.name))


RULES = {"full": full, "arange": arange}
