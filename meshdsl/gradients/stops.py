"""Stops: which operations keep a gradient from reaching an input.

With respect to one input, a tensor is *smooth*, *stopped* or free. A smooth one depends on the
input differentiably. A stopped one depends on it, but every path passes an operation without a
slope, such as rounding or a comparison. A free one does not depend on it. The result of
`md.stop_gradient` is free. So are the results that operations made by differentiation compute from
stopped tensors: the slope of a slope that jumps is zero on purpose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from meshdsl.tensors.dtypes import is_differentiable
from meshdsl.tracing.graph import Graph, Operation

# The operations are those at which paths were stopped, in their order in the graph.
State = tuple[Operation, ...] | Literal["smooth"] | None


def stopped_at(graph: Graph, number: int) -> tuple[Operation, ...]:
    """Returns the operations that stop the gradient of the first output by one input.

    On each path from the input, that is the first operation without a slope. The result is empty if
    there is a differentiable path, or no path at all.
    """
    states: list[State] = [None] * len(graph.inputs)
    states[number] = "smooth"
    (end,) = _flow(replace(graph, outputs=graph.outputs[:1]).prune(), states)
    return end if isinstance(end, tuple) else ()


def smooth_ends(body: Graph, wanted: Sequence[bool], consts: int) -> list[bool]:
    """Returns which results of a loop depend differentiably on the wanted ones of its inputs."""
    states: list[State] = ["smooth" if on else None for on in wanted]
    _, results = _loop(body, states, consts, len(body.outputs))
    return [end == "smooth" for end in results]


def _flow(graph: Graph, states: Sequence[State]) -> list[State]:
    """Returns the states of a graph's outputs, given those of its inputs."""
    known = {t: s for t, s in zip(graph.inputs, states, strict=True) if s is not None}
    for op in graph.operations:
        arriving = [known.get(t) for t in op.inputs]
        if op.name == "stop_gradient" or not any(arriving):
            continue
        for tensor, state in zip(op.outputs, _through(op, arriving), strict=True):
            if state is not None:
                known[tensor] = state
    return [known.get(t) for t in graph.outputs]


def _through(op: Operation, arriving: Sequence[State]) -> Sequence[State]:
    params = op.params
    if op.name == "checkpoint":
        return _flow(params["body"], arriving)
    if op.name == "scan":
        return _loop(params["body"], arriving, params["consts"], params["carries"])[1]
    if op.name == "cond":
        chosen = [arriving[0]] * len(op.outputs)
        branches = (_flow(body, arriving[1:]) for body in op.bodies)
        return [_join(*states) for states in zip(chosen, *branches, strict=True)]
    if op.name == "while_loop":
        consts = params["consts"]
        states, results = _loop(params["body"], arriving, consts, len(op.outputs))
        turns = _flow(params["condition"], states)[0]
        return [(op,) if turns or end else None for end in results]
    smooth = "smooth" in arriving and not op.primitive.flat
    here: State = (op,) if "smooth" in arriving else None
    blocked = None if op.source.backward else _union([*arriving, here])
    return ["smooth" if smooth and is_differentiable(t.dtype) else blocked for t in op.outputs]


def _loop(
    body: Graph, arriving: Sequence[State], consts: int, carries: int
) -> tuple[list[State], list[State]]:
    """Returns the states of a loop's inputs and of its body's outputs after all iterations."""
    states, last = list(arriving), consts + carries
    while True:
        results = _flow(body, states)
        carry = [_join(*pair) for pair in zip(states[consts:last], results[:carries], strict=True)]
        grown = [*states[:consts], *carry, *states[last:]]
        if grown == states:
            return states, results
        states = grown


def _join(*states: State) -> State:
    """Returns the state of what depends on all of these: smooth if any is, else stopped."""
    return "smooth" if "smooth" in states else _union(states)


def _union(states: Sequence[State]) -> tuple[Operation, ...] | None:
    """Returns the operations that stopped any of the paths, each once; None if none did."""
    return tuple(dict.fromkeys(op for s in states if isinstance(s, tuple) for op in s)) or None
