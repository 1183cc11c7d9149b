"""Checkpoint: rematerialisation (Chen et al. 2016, "Training deep nets with sublinear memory").

A `checkpoint` operation keeps its inputs for the backward pass, and the named values that the user
lists in `keep`. The backward pass replays the body from these. The replay starts at a `barrier`.
The kept values pass through it together with the cotangents of the operation's outputs. So no later
pass, and no compiler, merges the replay with the forward computation or begins it before the
gradient that needs it arrives.

Kept values are further outputs of the forward body. In the replayed body a `kept` operation
replaces the operation that made them. Its values are the kept ones; its gradient is that of the
replaced operation. Lowering drops what nothing else needs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import jax

from meshdsl.gradients.replay import Cotangents, Replay, passes
from meshdsl.gradients.tangents import PushedBody, apart, with_tangents
from meshdsl.ops.control.body import traced_call
from meshdsl.ops.operation import at_once, operation, reported_as
from meshdsl.tensors.dims import Shape, did_you_mean
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Form, Graph, Operation, Primitive, TracedTensor, Work
from meshdsl.tracing.trace import bind, bind_one

P = ParamSpec("P")
R = TypeVar("R")


def checkpoint(
    function: Callable[P, R],
    keep: Sequence[str] = (),
    collectives: bool = False,
    products: bool = False,
) -> Callable[P, R]:
    """Returns `function` so that its gradient computes its intermediate values again.

    Tensors among its arguments are kept; numbers, flags and the like belong to the function.

        layer = md.checkpoint(layer, keep=["attention_out"])  # md.name(x, "attention_out") in it

    Args:
        keep: names of values, given by `md.name`, that are kept too. Those in the bodies of scans
            and other checkpoints inside `function` count; those in branches of `md.cond` are
            always computed again.
        collectives: whether to keep the results of collectives, so that they are not sent again.
            Lowering knows which values these are.
        products: whether to keep the results of matrix products, convolutions and attention, so
            that only what is cheap is computed again. Loops and branches are as for `keep`.

    Raises:
        ValueError: when called: nothing in `function` has one of the names.

    Examples:
        >>> def layer(x):
        ...     return md.sum(md.sin(md.name(md.sin(x), "inner")))
        >>> x = md.named([0.5, 1.0], ["embed"])
        >>> gradient = md.grad(md.checkpoint(layer, keep=["inner"]))(x)
        >>> np.allclose(gradient, md.grad(layer)(x))
        True
    """
    keep = (keep,) if isinstance(keep, str) else tuple(keep)

    @at_once
    @functools.wraps(function)
    def rematerialised(*args: Any, **kwargs: Any) -> Any:
        graph, operands, tree = traced_call(function, args, kwargs)
        with reported_as("checkpoint"):
            _check_names(keep, graph, getattr(function, "__name__", "the function"))
        params = {
            "body": graph.prune(),
            "keep": keep,
            "products": products,
            "collectives": collectives,
        }
        return jax.tree.unflatten(tree, bind(CHECKPOINT, operands, params).outputs)

    return rematerialised


@operation
def name(x: Tensor, name: str) -> Tensor:
    """Returns x, under a name for `md.checkpoint(..., keep=[name])`.

    x = md.name(md.attention(q, k, v, over="memory_length"), "attention_out")

    Raises:
        ValueError: the name is no text.

    Examples:
        >>> layer = md.checkpoint(lambda x: md.sum(md.name(x * x, "square") ** 2), keep=["square"])
        >>> print(md.grad(layer)(md.named([1.0, 2.0], ["embed"])))
        f32[embed=2] [ 4. 32.]
    """
    if not isinstance(name, str):
        raise ValueError(f"a name is a text, not {name!r}")
    return bind_one(NAME, (x,), {"name": name})


def _check_names(keep: Sequence[str], graph: Graph, function: str) -> None:
    known = sorted(set(_names(graph)))
    problems = [
        f"nothing in {function} is named {one!r}{did_you_mean(one, known)}"
        for one in keep
        if one not in known
    ]
    if problems:
        hint = f"; its names: {', '.join(known)}" if known else ""
        raise ValueError("; ".join(problems) + hint)


def _names(graph: Graph) -> Iterator[str]:
    """Yields the names given in a graph and its bodies."""
    for op in graph.operations:
        if op.name == "name":
            yield op.params["name"]
        for body in op.bodies:
            yield from _names(body)


def _replay(
    op: Operation, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Sequence[Tensor], Callable]:
    body, choice = op.params["body"], _Choice(frozenset(op.params["keep"]), op.params["products"])
    results = bind(CHECKPOINT, arguments, {**op.params, "body": _showing(body, choice)}).outputs
    outputs, saved = results[: len(op.outputs)], results[len(op.outputs) :]

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        arriving = [c for c in cotangents if c is not None]
        params = {"collectives": op.params["collectives"]}
        behind = iter(bind(BARRIER, [*arguments, *saved, *arriving], params).outputs)
        again = list(itertools.islice(behind, len(arguments) + len(saved)))
        late = [None if c is None else next(behind) for c in cotangents]
        replayed = Replay(_taking(body, choice), again, [*wanted, *(False for _ in saved)])
        reaching = zip(late, replayed.active_outputs, strict=True)
        return replayed.backward([c if on else None for c, on in reaching])[: len(arguments)]

    return outputs, pullback


@dataclass(frozen=True)
class _Choice:
    """What is kept of a graph: names and products, unless they have a dim of an outer loop."""

    names: frozenset[str]
    products: bool
    loops: frozenset[str] = frozenset()

    def inside(self, op: Operation) -> _Choice:
        """Returns the choice for an operation's body; a scan stacks kept values along its dim."""
        if op.name != "scan":
            return self
        dim = op.params["dim"].name
        if dim in self.loops:
            return _Choice(frozenset(), False)
        return replace(self, loops=self.loops | {dim})

    def of(self, graph: Graph) -> set[Operation]:
        """Returns the operations whose results are kept; for a name, the maker of the value."""
        makers = {t: op for op in graph.operations for t in op.outputs}
        chosen = set()
        for op in graph.operations:
            if op.name == "name" and op.params["name"] in self.names:
                maker = makers.get(op.inputs[0])
                chosen.add(maker if maker is not None and _can_be_kept(maker) else op)
            elif self.products and _is_product(op):
                chosen.add(op)
        return {op for op in chosen if not any(self.loops & {*t.shape.names} for t in op.outputs)}


def _can_be_kept(op: Operation) -> bool:
    """Whether all results of an operation can be kept for the sake of one that is named."""
    single = len(op.outputs) - len(op.primitive.for_gradient) == 1
    return single and passes(op) and op.primitive.gradient is not None and not op.effect


def _is_product(op: Operation) -> bool:
    if op.name == "einsum":
        contracted = {name for t in op.inputs for name in t.shape.names}
        return not contracted <= {*op.outputs[0].shape.names}
    return op.name in ("convolve", "attention", "grouped_einsum")


def _showing(graph: Graph, choice: _Choice) -> Graph:
    """Returns a graph that also returns the chosen values; values in loops are stacked."""
    operations: list[Operation] = []
    shown: list[Tensor] = []
    chosen = choice.of(graph)
    for op in graph.operations:
        if op in chosen:
            shown += op.outputs
        elif op.name in ("scan", "checkpoint"):
            body = _showing(op.params["body"], choice.inside(op))
            extra = [_outside(op, t) for t in body.outputs[len(op.params["body"].outputs) :]]
            op = replace(op, outputs=(*op.outputs, *extra), params={**op.params, "body": body})
            shown += extra
        operations.append(op)
    return replace(graph, operations=tuple(operations), outputs=(*graph.outputs, *shown))


def _taking(graph: Graph, choice: _Choice) -> Graph:
    """Returns a graph whose further inputs are the values that the graph of `_showing` returns."""
    operations: list[Operation] = []
    saved: list[Tensor] = []
    chosen = choice.of(graph)
    for op in graph.operations:
        if op.name == "print":  # the forward pass prints
            continue
        if op in chosen:
            values = [TracedTensor(t.shape, t.dtype, t.source) for t in op.outputs]
            params = {"primitive": op.primitive, "params": op.params, "outputs": len(values)}
            op = Operation(KEPT, (*op.inputs, *values), op.outputs, params, op.source)
            saved += values
        elif op.name in ("scan", "checkpoint"):
            body = _taking(op.params["body"], choice.inside(op))
            extra = [_outside(op, t) for t in body.inputs[len(op.params["body"].inputs) :]]
            op = replace(op, inputs=(*op.inputs, *extra), params={**op.params, "body": body})
            saved += extra
        operations.append(op)
    return replace(graph, operations=tuple(operations), inputs=(*graph.inputs, *saved))


def _outside(op: Operation, inner: Tensor) -> Tensor:
    """Returns the outer tensor for a tensor of an operation's body."""
    dims = [op.params["dim"], *inner.shape] if op.name == "scan" else inner.shape
    return TracedTensor(Shape(dims), inner.dtype, inner.source)


def _kept_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> Sequence[Aval]:
    count = params["outputs"]
    return [(t.shape, t.dtype) for t in inputs[len(inputs) - count :]]


def _kept_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> Cotangents:
    """Returns the gradient of the operation that it replaces."""
    count = len(op.inputs) - len(op.outputs)
    primitive, params = op.params["primitive"], op.params["params"]
    made = Operation(primitive, op.inputs[:count], op.outputs, params, op.source)
    gradients = primitive.gradient(made, cotangents, wanted[:count])
    return [*gradients, *(None for _ in op.outputs)]


def _push(
    op: Operation, arguments: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    active = [t is not None for t in tangents]
    pushed = PushedBody(op.params["body"], active)
    moving, results = pushed.moving, len(op.outputs)
    graph = pushed.graph(pushed.taking(0, len(active)), pushed.giving(0, results, moving))
    operands = with_tangents(arguments, tangents, active)
    return apart(bind(CHECKPOINT, operands, {**op.params, "body": graph}).outputs, moving)


CHECKPOINT = Primitive(
    "checkpoint",
    lambda inputs, params: [(t.shape, t.dtype) for t in params["body"].outputs],
    replay=_replay,
    push=_push,
    inlined=True,
    result_graphs=("body",),
)
NAME = Primitive(
    "name",
    lambda inputs, params: [(inputs[0].shape, inputs[0].dtype)],
    lambda op, cotangents, wanted: list(cotangents),
    work=Work.NONE,
    form=Form.SAME,
    mark=True,
)
KEPT = Primitive("kept", _kept_rule, _kept_gradient, work=Work.NONE, form=Form.SAME, mark=True)
BARRIER = Primitive(
    "barrier",
    lambda inputs, params: [(t.shape, t.dtype) for t in inputs],
    lambda op, cotangents, wanted: list(cotangents),
    form=Form.SAME,
)
