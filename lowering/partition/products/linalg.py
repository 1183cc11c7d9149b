"""Partition rules of linear algebra: matrices are unsplit, and devices share the batch.

Axes that split matrix dims by the layout are moved to batch dims that they divide. Then the devices
share the work, and the moves are all_to_alls. Without such a batch dim every device does all work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder


def batch_layout(case: Case, whole: Iterable[str]) -> TensorLayout:
    """Returns the layout of an operation's dims in which those called `whole` are unsplit.

    Their axes go to the largest other dim that all operands have and that the axes divide.
    """
    whole = frozenset(whole)
    op = case.operation
    tensors = [*zip(op.outputs, case.results, strict=True)]
    tensors += zip(op.inputs, case.operands, strict=True)
    splits: dict[str, tuple[str, ...]] = {}
    free: list[str] = []
    for _, layout in tensors:
        for name, axes in layout.splits:
            used = {axis for split in splits.values() for axis in split}
            if name not in whole and name not in splits and used.isdisjoint(axes):
                splits[name] = axes
            else:
                free += axes
    used = {axis for split in splits.values() for axis in split}
    shared = [d for d in op.inputs[0].shape.without(whole) if all(d in t.shape for t in op.inputs)]
    for axis in dict.fromkeys(free):
        if axis in used:
            continue
        room = [
            d for d in shared if d.size % case.mesh.extent((*splits.get(d.name, ()), axis)) == 0
        ]
        if room:
            dim = max(room, key=lambda d: d.size // case.mesh.extent(splits.get(d.name, ())))
            splits[dim.name] = (*splits.get(dim.name, ()), axis)
    return TensorLayout.of(splits)


def whole_dims(case: Case, whole: Iterable[str], params: Mapping[str, Any]) -> Strategy:
    """Does an operation locally; the dims `whole` are unsplit."""
    op = case.operation
    layout = batch_layout(case, whole)
    results = tuple(layout.restrict(t.shape.names) for t in op.outputs)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        partial = [axis for i in op.linear for axis in inputs[i].layout.partial_axes]
        made = [
            (t.shape, t.dtype, at.add_partial(partial))
            for t, at in zip(op.outputs, results, strict=True)
        ]
        return builder.add(op.name, inputs, made, params)

    return Strategy(
        operands=tuple(layout.restrict(t.shape.names) for t in op.inputs),
        results=results,
        emit=emit,
        linear=op.linear,
        fixed=layout.split_axes,
    )


def linalg(case: Case) -> Strategy:
    """Rows, columns and the inner dim of factors are unsplit; a solution is linear in b."""
    params = case.operation.params
    whole = [params["rows"], params["columns"]]
    whole += [params["inner"].name] if "inner" in params else []
    return whole_dims(case, whole, params)


RULES = dict.fromkeys(["cholesky", "solve", "triangular_solve", "slogdet"], linalg)
