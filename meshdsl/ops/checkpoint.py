"""Checkpoint: rematerialisation (Chen et al. 2016, "Training deep nets with sublinear memory").

A `checkpoint` operation keeps only its inputs for the backward pass, and the values whose names it
is told to keep; the backward pass replays its body from these. The replay starts at a `barrier`, so
that no later pass merges it with the forward computation.

Kept values are further outputs of the forward body. In the replayed body a `kept` operation stands
in the place of each `name`: its value is the one kept, its gradient flows to the computation that
made it, and lowering drops what of that computation nothing else needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshdsl.dims import Shape, did_you_mean
from meshdsl.graph import Graph, Operation, Primitive, Tensor, Work
from meshdsl.ops.body import is_array, subgraph
from meshdsl.ops.creation import as_tensor
from meshdsl.ops.operation import at_once, operation, told_as
from meshdsl.replay import Cotangents, Replay
from meshdsl.trace import bind, bind_one


def checkpoint(function: Callable, keep: Sequence[str] = (), collectives: bool = False) -> Callable:
    """Returns `function` so that its gradient computes its intermediate values again.

    Tensors among its arguments are kept; numbers, flags and the like belong to the function.

        layer = md.checkpoint(layer, keep=["attention_out"])  # md.name(x, "attention_out") in it

    Args:
        keep: names of values, given by `md.name`, that are kept too. Those in the bodies of scans
            and other checkpoints inside `function` count; those in branches of `md.cond` are
            always computed again.
        collectives: whether values are kept that a layout makes collectives of, rather than moved
            or reduced again. Which these are, lowering knows.

    Raises:
        ValueError: when called: nothing in `function` has one of the names.
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)

    @at_once
    @functools.wraps(function)
    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_array)
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        inputs = [as_tensor(leaves[i]) for i in places]

        def of_tensors(*tensors: Tensor) -> Any:
            for i, tensor in zip(places, tensors, strict=True):
                leaves[i] = tensor
            given, named = jax.tree.unflatten(tree, leaves)
            return function(*given, **named)

        graph, consts, out_tree = subgraph(of_tensors, inputs)
        with told_as("checkpoint"):
            _check_names(keep, graph, getattr(function, "__name__", "the function"))
        params = {"body": graph.prune(), "keep": keep, "collectives": collectives}
        outputs = bind(CHECKPOINT, [*consts, *inputs], params).outputs
        return jax.tree.unflatten(out_tree, outputs)

    return rematerialised


@operation
def name(x: Tensor, name: str) -> Tensor:
    """Returns x, under a name for `md.checkpoint(..., keep=[name])`.

    x = md.name(md.attention(q, k, v, over="memory_length"), "attention_out")
    """
    return bind_one(NAME, (x,), {"name": name})


def _check_names(keep: Sequence[str], graph: Graph, function: str) -> None:
    known = sorted(set(_names(graph)))
    problems = [
        f"nothing in {function} is named {one!r}{did_you_mean(one, known)}"
        for one in keep
        if one not in known
    ]
    if problems:
        raise ValueError("; ".join(problems))


def _names(graph: Graph, having: str | None = None) -> Iterator[str]:
    """Yields the names given in a graph and its bodies; to tensors with the dim `having` only."""
    for op in graph.operations:
        if op.name == "name" and (having is None or op.outputs[0].shape.find(having) is not None):
            yield op.params["name"]
        for body in op.bodies:
            yield from _names(body, having)


def _replay(
    op: Operation, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Sequence[Tensor], Callable]:
    body, keep = op.params["body"], op.params["keep"]
    given = bind(CHECKPOINT, arguments, {**op.params, "body": _showing(body, keep)}).outputs
    outputs, kept = given[: len(op.outputs)], given[len(op.outputs) :]

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        again = bind(
            BARRIER, [*arguments, *kept], {"collectives": op.params["collectives"]}
        ).outputs
        replayed = Replay(_taking(body, keep), again, [*wanted, *(False for _ in kept)])
        arriving = zip(cotangents, replayed.active_outputs, strict=True)
        return replayed.backward([c if on else None for c, on in arriving])[: len(arguments)]

    return outputs, pullback


def _showing(graph: Graph, keep: Sequence[str]) -> Graph:
    """Returns a graph that also returns its values named in `keep`, those in loops stacked."""
    operations, shown = [], []
    for op in graph.operations:
        if op.name == "name" and op.params["name"] in keep:
            shown.append(op.outputs[0])
        elif op.name in ("scan", "checkpoint"):
            body = _showing(op.params["body"], _keepable(op, keep))
            extra = [_outside(op, t) for t in body.outputs[len(op.params["body"].outputs) :]]
            op = replace(op, outputs=(*op.outputs, *extra), params={**op.params, "body": body})
            shown += extra
        operations.append(op)
    return replace(graph, operations=tuple(operations), outputs=(*graph.outputs, *shown))


def _taking(graph: Graph, keep: Sequence[str]) -> Graph:
    """Returns a graph that takes what `_showing` makes it return as further inputs."""
    operations, taken = [], []
    for op in graph.operations:
        if op.name == "print":  # the forward pass does that
            continue
        if op.name == "name" and op.params["name"] in keep:
            (x,), (y,) = op.inputs, op.outputs
            taken.append(Tensor(y.shape, y.dtype, y.source))
            op = Operation(KEPT, (x, taken[-1]), (y,), {}, op.source)
        elif op.name in ("scan", "checkpoint"):
            body = _taking(op.params["body"], _keepable(op, keep))
            extra = [_outside(op, t) for t in body.inputs[len(op.params["body"].inputs) :]]
            op = replace(op, inputs=(*op.inputs, *extra), params={**op.params, "body": body})
            taken += extra
        operations.append(op)
    return replace(graph, operations=tuple(operations), inputs=(*graph.inputs, *taken))


def _keepable(op: Operation, keep: Sequence[str]) -> Sequence[str]:
    """Returns the names to keep in a body; a scan cannot stack what has its dim already."""
    if op.name != "scan":
        return keep
    clashing = set(_names(op.params["body"], having=op.params["dim"].name))
    return [one for one in keep if one not in clashing]


def _outside(op: Operation, inner: Tensor) -> Tensor:
    """Returns what a tensor of an operation's body is outside of it."""
    dims = [op.params["dim"], *inner.shape] if op.name == "scan" else inner.shape
    return Tensor(Shape(dims), inner.dtype, inner.source)


CHECKPOINT = Primitive(
    "checkpoint",
    lambda inputs, params: [(t.shape, t.dtype) for t in params["body"].outputs],
    replay=_replay,
)
NAME = Primitive(
    "name",
    lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)],
    lambda op, cotangents, wanted: list(cotangents),
    work=Work.NONE,
)
KEPT = Primitive(
    "kept",
    lambda inputs, params: [(inputs[1].shape, inputs[1].dtype)],
    lambda op, cotangents, wanted: [cotangents[0], None],
    work=Work.NONE,
)
BARRIER = Primitive(
    "barrier",
    lambda inputs, params: [(t.shape, t.dtype) for t in inputs],
    lambda op, cotangents, wanted: list(cotangents),
)
