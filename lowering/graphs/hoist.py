"""Hoisting: weights that are gathered once are cast before that, once, outside of all loops.

A loop over layers casts the slice of a weight that it uses. If gathered weights are kept, the stack
of all slices is gathered before the loop. If it is cast before that, it is gathered in half
precision, and one copy serves all loops with the same cast, in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, TracedTensor


def hoist_casts(graph: Graph, weights: Collection[Tensor]) -> Graph:
    """Returns an equal graph in which casts of weights to smaller dtypes are outside of loops.

    It may have unused operations; `simplify` removes them.

    Args:
        weights: inputs of the graph.
    """
    return _hoisted(graph, set(weights))


def _hoisted(graph: Graph, weights: set[Tensor]) -> Graph:
    operations: list[Operation] = []
    for op in graph.operations:
        if op.name == "barrier":
            weights |= {b for a, b in zip(op.inputs, op.outputs, strict=True) if a in weights}
        if op.name == "scan" and not weights.isdisjoint(op.inputs):
            *casts, op = _out_of(op, weights)
            operations += casts
        operations.append(op)
    return replace(graph, operations=tuple(operations))


def _out_of(loop: Operation, weights: set[Tensor]) -> list[Operation]:
    """Returns the casts that a loop need not do itself, and the loop without them."""
    consts, carries = loop.params["consts"], loop.params["carries"]
    body: Graph = loop.params["body"]
    outside = dict(zip(body.inputs, loop.inputs, strict=True))
    for carry in body.inputs[consts : consts + carries]:
        del outside[carry]
    body = _hoisted(body, {inner for inner, outer in outside.items() if outer in weights})
    outside = {inner: outer for inner, outer in outside.items() if outer in weights}
    remaining: list[Operation] = []
    casts: list[Operation] = []
    made: list[tuple[Tensor, Tensor]] = []
    for op in body.operations:
        if op.name == "barrier":  # it separates recomputed tensors; weights are not recomputed
            pairs = zip(op.inputs, op.outputs, strict=True)
            outside.update({after: outside[before] for before, after in pairs if before in outside})
        elif op.name == "cast" and op.inputs[0] in outside and _narrows(op):
            outer = outside[op.inputs[0]]
            whole = TracedTensor(outer.shape, op.outputs[0].dtype, outer.source)
            casts.append(replace(op, inputs=(outer,), outputs=(whole,)))
            made.append((op.outputs[0], whole))
            continue
        remaining.append(op)
    unsliced = [pair for pair in made if pair[0].shape == pair[1].shape]
    sliced = [pair for pair in made if pair[0].shape != pair[1].shape]
    inputs, arguments = (
        (
            *now[:consts],
            *(pair[n] for pair in unsliced),
            *now[consts:],
            *(pair[n] for pair in sliced),
        )
        for n, now in enumerate((body.inputs, loop.inputs))
    )
    body = replace(body, inputs=inputs, operations=tuple(remaining))
    params = {**loop.params, "body": body, "consts": consts + len(unsliced)}
    return [*casts, replace(loop, inputs=arguments, params=params)]


def _narrows(cast: Operation) -> bool:
    before, after = cast.inputs[0].dtype, cast.outputs[0].dtype
    return np.dtype(after).itemsize < np.dtype(before).itemsize
