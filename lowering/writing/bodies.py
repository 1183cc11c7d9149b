"""Bodies: the lowering of operations that run other operations.

A body is a block of its own. Values that it captures are fetched once, before the body runs, in the
layout that the body needs. A loop's carry keeps the layout of the layout rules between iterations.
The predicate of a cond or a while loop is replicated, so all devices take the same branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.options import dtype_of_sums
from meshdsl.lowering.parameters import Cond, Scan, While
from meshdsl.lowering.program import Block, Value
from meshdsl.lowering.writing.builder import BOOL, INT32
from meshdsl.lowering.writing.loops import is_sum, within
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tracing.graph import Graph, Operation

if TYPE_CHECKING:
    from meshdsl.lowering.writing.scope import Scope

_Pairs = list[tuple[Value, Value]]  # a value outside of a body, and the input that it is inside


def _scan(scope: Scope, op: Operation) -> None:
    body: Graph = op.params["body"]
    dim, consts, carries = op.params["dim"], op.params["consts"], op.params["carries"]
    own = _own_slices(scope, op)
    inner = scope.inside(op, body.inputs[:consts], op.inputs[:consts])

    def outside(position: int, where: TensorLayout) -> TensorLayout:
        """Returns the layout outside of the loop of a value with layout `where` in its body."""
        return where.add_partial(own) if position < carries else where.split(dim.name, own)

    entering = _entering(scope, inner, op, body, consts, outside)
    inner.run(body.operations)
    results_inside = []
    results = []
    for position, (tensor, result) in enumerate(zip(body.outputs, op.outputs, strict=True)):
        like = body.inputs[consts + position] if position < carries else tensor
        where = scope.place(like, like if position < carries else result)
        if result in scope.planned.moved:
            where = scope.planned.moved[result]
        inner.builder.source = tensor.source
        results_inside.append(inner.get(tensor, where))
        results.append((result.shape, result.dtype, outside(position, where)))
    if own and carries and scope.builder.has_pads(dim, own):
        starts = [inside for _, inside in entering[:carries]]
        entering.append(_place_of(scope, inner, dim, own))
        results_inside[:carries] = _unless_pad(inner, dim, entering[-1][1], starts, results_inside)
    pairs = [*inner.consts.items(), *entering]
    params: Scan = {
        "body": inner.builder.finish([inside for _, inside in pairs], results_inside),
        "length": -(-dim.size // scope.builder.mesh.extent(own)),
        "dim": dim.name,
        "consts": len(inner.consts),
        "carries": carries,
        "reverse": op.params["reverse"],
    }
    scope.builder.source = op.source
    inputs = [value for value, _ in pairs]
    _define(scope, op, scope.builder.add("scan", inputs, results, params))


def _own_slices(scope: Scope, op: Operation) -> tuple[str, ...]:
    """Returns the axes along which every device runs a scan over its own slices only.

    There are such axes if the iterations do not depend on each other (their carries are running
    sums, which become partial), all stacked tensors are split over these axes, and no tensor in the
    body is. Nor are there any if the sums are of half precision: a device's part of a sum may
    overflow where the sum does not.
    """
    body: Graph = op.params["body"]
    dim, consts, carries = op.params["dim"], op.params["consts"], op.params["carries"]
    layouts = scope.planned.layouts
    stacked = (*op.inputs[consts + carries :], *op.outputs[carries:])
    split_over = {layouts[tensor].axes(dim.name) for tensor in stacked}
    axes = split_over.pop() if len(split_over) == 1 else ()
    if not axes or not all(is_sum(body, consts + i, i) for i in range(carries)):
        return ()
    options = scope.planned.chooser.options
    if any(dtype_of_sums(t.dtype, options) != t.dtype for t in body.outputs[:carries]):
        return ()
    inside = list(within(body))
    decides = any(inner.effect or inner.name in ("cond", "while_loop") for inner in inside)
    tensors = [*body.inputs, *(t for inner in inside for t in inner.outputs)]
    tensors += [t for inner in inside for nested in inner.bodies for t in nested.inputs]
    busy = {axis for t in tensors for axis in layouts[t].split_axes}
    partial = scope.reduced.partial
    busy |= {axis for t in (*tensors, *op.inputs, *op.outputs) for axis in partial.get(t, ())}
    return () if decides or busy & set(axes) else axes


def _place_of(
    scope: Scope, inner: Scope, dim: Dimension, axes: Sequence[str]
) -> tuple[Value, Value]:
    """Returns the global indices of a device's slices, and that of one slice in the body."""
    inside = inner.builder.value(Shape(), INT32, TensorLayout())
    return scope.builder.positions(dim, axes), inside


def _unless_pad(
    inner: Scope, dim: Dimension, place: Value, starts: Sequence[Value], sums: Sequence[Value]
) -> list[Value]:
    """Returns the running sums; iterations over pads leave them unchanged."""
    size = inner.builder.number(dim.size, INT32)
    counts = inner.builder.one("less", (place, size), Shape(), BOOL, TensorLayout())
    return [
        inner.builder.one("select", (counts, end, start), end.shape, end.dtype, end.layout)
        for start, end in zip(starts, sums, strict=False)
    ]


def _while(scope: Scope, op: Operation) -> None:
    consts, bodies = op.params["consts"], (op.params["condition"], op.params["body"])
    inners = [scope.inside(op, body.inputs[:consts], op.inputs[:consts]) for body in bodies]
    entering = [
        _entering(scope, inner, op, body, consts)
        for inner, body in zip(inners, bodies, strict=True)
    ]
    places = [scope.place(tensor, tensor) for tensor in bodies[1].inputs[consts:]]
    results_inside = []
    for inner, body, wanted in zip(inners, bodies, ([TensorLayout()], places), strict=True):
        inner.run(body.operations)
        results_inside.append(_results(inner, body, wanted))
    captured = dict.fromkeys(outside for inner in inners for outside in inner.consts)
    blocks = [
        _block(inner, captured, [inside for _, inside in pairs], end)
        for inner, pairs, end in zip(inners, entering, results_inside, strict=True)
    ]
    params: While = {
        "condition": blocks[0],
        "body": blocks[1],
        "consts": len(captured),
        "carries": len(places),
    }
    results = [(t.shape, t.dtype, at) for t, at in zip(op.outputs, places, strict=True)]
    scope.builder.source = op.source
    inputs = [*captured, *(outside for outside, _ in entering[1])]
    _define(scope, op, scope.builder.add("while", inputs, results, params))


def _cond(scope: Scope, op: Operation) -> None:
    predicate, *arguments = op.inputs
    places = [scope.place(tensor, tensor) for tensor in op.outputs]
    inners, results_inside = [], []
    for body in op.bodies:
        inner = scope.inside(op, body.inputs, arguments)
        inner.run(body.operations)
        results_inside.append(_results(inner, body, places))
        inners.append(inner)
    captured = dict.fromkeys(outside for inner in inners for outside in inner.consts)
    blocks = [
        _block(inner, captured, [], end) for inner, end in zip(inners, results_inside, strict=True)
    ]
    scope.builder.source = op.source
    inputs = [scope.get(predicate, TensorLayout()), *captured]
    results = [(t.shape, t.dtype, at) for t, at in zip(op.outputs, places, strict=True)]
    params: Cond = {"if_true": blocks[0], "if_false": blocks[1]}
    scope.builder.source = op.source
    _define(scope, op, scope.builder.add("cond", inputs, results, params))


BODIES: Mapping[str, Callable[[Scope, Operation], None]] = {
    "cond": _cond,
    "scan": _scan,
    "while_loop": _while,
}


def _entering(
    scope: Scope,
    inner: Scope,
    op: Operation,
    body: Graph,
    consts: int,
    outside: Callable[[int, TensorLayout], TensorLayout] = lambda position, where: where,
) -> _Pairs:
    """Fetches a loop's carries and sliced inputs, and defines them in its body."""
    pairs = []
    tensors = zip(op.inputs[consts:], body.inputs[consts:], strict=True)
    for position, (outer, tensor) in enumerate(tensors):
        where = scope.place(tensor, tensor)
        scope.builder.source = op.source
        value = inner.builder.value(tensor.shape, tensor.dtype, where)
        inner.define(tensor, value)
        pairs.append((scope.get(outer, outside(position, where)), value))
    return pairs


def _results(inner: Scope, body: Graph, places: Sequence[TensorLayout]) -> list[Value]:
    """Returns the results of a body, in the layouts `places`."""
    values = []
    for tensor, where in zip(body.outputs, places, strict=True):
        inner.builder.source = tensor.source
        values.append(inner.get(tensor, where))
    return values


def _block(
    inner: Scope, captured: Collection[Value], own: Sequence[Value], results: Sequence[Value]
) -> Block:
    """Returns a block with an input for every value that it or the other body captures."""
    first = [
        inner.consts.get(v) or inner.builder.value(v.shape, v.dtype, v.layout) for v in captured
    ]
    return inner.builder.finish([*first, *own], results)


def _define(scope: Scope, op: Operation, values: Sequence[Value]) -> None:
    for tensor, value in zip(op.outputs, values, strict=True):
        scope.define(tensor, value)
