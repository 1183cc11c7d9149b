"""Tangents: forward-mode differentiation, operation by operation.

`push` emits a graph's operations again. After each it emits the operations that compute the
tangents of its outputs from those of its inputs. An operation's gradient is linear in its
cotangents. Its transpose is the operation's derivative. So every gradient rule is a tangent rule as
well. Operations with bodies run body and tangents together (`Primitive.push`), so a loop keeps
nothing for a later pass.

Tensors without a tangent (constants, whole numbers, results of `stop_gradient`) have None.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from meshdsl.gradients.replay import Cotangents, Replay, passes, pull_back
from meshdsl.ops.control.body import subgraph
from meshdsl.ops.creation import zeros
from meshdsl.tensors.dtypes import is_differentiable
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.trace import Trace, bind, current, located, tracing

Tangents = list[Tensor | None]


def push(
    graph: Graph, inputs: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tangents]:
    """Emits a graph with its tangents; returns its outputs and their tangents."""
    trace = current()
    values = dict(zip(graph.inputs, (trace.own(t) for t in inputs), strict=True))
    moving = {
        t: trace.own(tangent)
        for t, tangent in zip(graph.inputs, tangents, strict=True)
        if tangent is not None
    }
    for op in graph.prune().operations:
        arguments = [values[t] for t in op.inputs]
        arriving = [moving.get(t) for t in op.inputs]
        with located(op.source):
            outputs, pushed = _pushed(op, arguments, arriving)
        values.update(zip(op.outputs, outputs, strict=True))
        for tensor, tangent in zip(op.outputs, pushed, strict=True):
            if tangent is not None:
                moving[tensor] = tangent.transpose(tensor.shape.names)
    return [values[t] for t in graph.outputs], [moving.get(t) for t in graph.outputs]


def _pushed(
    op: Operation, arguments: Sequence[Tensor], arriving: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    if not any(t is not None for t in arriving) or not passes(op):
        return bind(op.primitive, arguments, op.params).outputs, [None] * len(op.outputs)
    if op.primitive.push is not None:
        return op.primitive.push(op, arguments, arriving)
    wanted = [t is not None for t in arriving]
    if op.primitive.replay is not None:
        outputs, pullback = op.primitive.replay(op, arguments, wanted)
    else:
        emitted = bind(op.primitive, arguments, op.params)
        outputs, pullback = emitted.outputs, functools.partial(pull_back, emitted)
    # Results for the gradient alone have no tangent: they are functions of the operands.
    hidden = op.primitive.for_gradient
    seeded = [i not in hidden and is_differentiable(t.dtype) for i, t in enumerate(outputs)]
    seeds = [t for t, on in zip(outputs, seeded, strict=True) if on]
    reached: list[Tensor] = []  # the tangents of inputs that have a gradient

    def backward(*cotangents: Tensor) -> list[Tensor]:
        remaining = iter(cotangents)
        gradients = pullback([next(remaining) if on else None for on in seeded], wanted)
        pairs = [(g, t) for g, t in zip(gradients, arriving, strict=True) if g is not None]
        reached[:] = [t for _, t in pairs if t is not None]
        return [g for g, t in pairs if t is not None]

    linear, consts, _ = subgraph(backward, seeds)
    gradients = iter(_transposed(linear, consts, seeds, reached))
    return outputs, [next(gradients) if on else None for on in seeded]


def _transposed(
    linear: Graph, consts: Sequence[Tensor], seeds: Sequence[Tensor], reached: Sequence[Tensor]
) -> Tangents:
    """Returns the results of the transpose of a graph that is linear in its last inputs.

    Args:
        consts: the graph's first inputs.
        seeds: tensors like its last inputs.
        reached: the cotangents of its outputs.
    """
    there: list[bool] = []

    def onward(*tangents: Tensor) -> list[Tensor]:
        blank = [zeros(t.shape, t.dtype) for t in seeds]  # any point will do: `linear` is linear
        active = [False] * len(consts) + [True] * len(seeds)
        replayed = Replay(linear, [*consts, *blank], active)
        cotangents: Cotangents = [
            t if on else None for t, on in zip(tangents, replayed.active_outputs, strict=True)
        ]
        gradients = replayed.backward(cotangents)[len(consts) :]
        there[:] = [t is not None for t in gradients]
        return [t for t in gradients if t is not None]

    graph, captured, _ = subgraph(onward, reached)
    values = dict(zip(graph.inputs, [*captured, *reached], strict=True))
    for op in graph.prune().operations:
        emitted = bind(op.primitive, [values[t] for t in op.inputs], op.params)
        values.update(zip(op.outputs, emitted.outputs, strict=True))
    outputs = iter(graph.outputs)
    return [values[next(outputs)] if on else None for on in there]


class PushedBody:
    """A body traced together with its tangents.

    Attributes:
        inputs: the body's inputs, as this trace has them.
        given: the tangents of the active ones, in order.
        results: the body's outputs.
        moving: for each, whether it has a tangent.
    """

    def __init__(self, body: Graph, active: Sequence[bool]) -> None:
        self._trace = Trace(current())
        with tracing(self._trace):
            self.inputs = [self._trace.input(t.shape, t.dtype, t.source) for t in body.inputs]
            tangents = [
                self._trace.input(t.shape, t.dtype, t.source) if on else None
                for t, on in zip(body.inputs, active, strict=True)
            ]
            self.results, self._found = push(body, self.inputs, tangents)
        self._tangents = tangents
        self.moving = [t is not None for t in self._found]

    def taking(self, start: int, stop: int) -> list[Tensor]:
        """Returns some of the inputs, followed by the tangents that they have."""
        tangents = [t for t in self._tangents[start:stop] if t is not None]
        return [*self.inputs[start:stop], *tangents]

    def giving(self, start: int, stop: int, moving: Sequence[bool]) -> list[Tensor]:
        """Returns some of the outputs, followed by the tangents of those marked in `moving`."""
        with tracing(self._trace):
            tangents = [
                zeros(t.shape, t.dtype) if tangent is None else tangent
                for t, tangent, on in zip(
                    self.results[start:stop], self._found[start:stop], moving, strict=True
                )
                if on
            ]
        return [*self.results[start:stop], *tangents]

    def graph(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Graph:
        """Returns the body with its tangents."""
        assert not self._trace.captured, "bodies use nothing but their inputs"
        return Graph(tuple(inputs), tuple(self._trace.operations), tuple(outputs)).prune()


def with_tangents(
    arguments: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    active: Sequence[bool],
) -> list[Tensor]:
    """Returns arguments, followed by the tangents of the active ones, zeros where there is none."""
    more = [
        zeros(a.shape, a.dtype) if t is None else t
        for a, t, on in zip(arguments, tangents, active, strict=True)
        if on
    ]
    return [*arguments, *more]


def apart(
    outputs: Sequence[Tensor], moving: Sequence[bool]
) -> tuple[Sequence[Tensor], list[Tensor | None]]:
    """Undoes `with_tangents` for outputs; those marked in `moving` have tangents."""
    rest = iter(outputs[len(moving) :])
    return outputs[: len(moving)], [next(rest) if on else None for on in moving]
