"""While: a body repeated as long as a condition holds.

The number of iterations is known only while the program runs, so nothing can be kept for a backward
pass: a while loop has no gradient. Its two graphs, the condition and the body, have the same
inputs: the captured tensors, then the carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax

from meshdsl.gradients.stops import smooth_ends
from meshdsl.gradients.tangents import PushedBody, apart, with_tangents
from meshdsl.ops.control.body import check_carry, leaves_of, share_captured, subgraph
from meshdsl.ops.control.cond import check_predicate
from meshdsl.ops.control.scan import active_inputs
from meshdsl.ops.operation import at_once, reported_as
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive, TracedTensor
from meshdsl.tracing.trace import bind

C = TypeVar("C")  # the carry


@at_once
def while_loop(condition: Callable[[C], Any], body: Callable[[C], C], carry: C) -> C:
    """Returns the first of carry, body(carry), body(body(carry)), ... that fails the condition.

        x, steps = md.while_loop(
            lambda state: md.sum(state[0]) > 1,
            lambda state: (state[0] * 0.5, state[1] + 1),
            (x, md.full([], 0, "int32")),
        )

    It has no gradient, but `md.jvp` goes through it; for a gradient, use `md.scan` over a fixed
    number of steps. A condition that never fails runs forever. In reports of costs, it counts as
    one iteration.

    Args:
        condition: carry -> a bool tensor without dims: whether to go on.
        body: carry -> carry, with the same tree, dims and dtypes.
        carry: a tree of tensors.

    Raises:
        ValueError: the condition is no bool scalar, or the carry changes; it names all problems.

    Examples:
        >>> x = md.named([3.0, 5.0], ["embed"])
        >>> print(md.while_loop(lambda x: md.sum(x) > 1.0, lambda x: x * 0.5, x))
        f32[embed=2] [0.375 0.625]
    """
    with reported_as("while_loop"):
        start, tree = leaves_of(carry)

    def going_on(*leaves: Tensor) -> Any:
        result = condition(jax.tree.unflatten(tree, leaves))
        with reported_as("while_loop"):
            results, _ = leaves_of(result)
            if len(results) != 1:
                raise ValueError("the condition must return one tensor, bool[]")
            check_predicate("what the condition returns", results[0])
        return results

    def following(*leaves: Tensor) -> Any:
        result = body(jax.tree.unflatten(tree, leaves))
        with reported_as("while_loop"):
            results, out_tree = leaves_of(result)
            check_carry(carry, start, tree, results, out_tree)
        return [t.transpose(like.shape.names) for t, like in zip(results, start, strict=True)]

    traced = [subgraph(function, start)[:2] for function in (going_on, following)]
    graphs, consts = share_captured(traced)
    params = {"condition": graphs[0].prune(), "body": graphs[1].prune(), "consts": len(consts)}
    outputs = bind(WHILE, [*consts, *start], params).outputs
    return jax.tree.unflatten(tree, outputs)


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(t.shape, t.dtype) for t in params["body"].outputs]


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> Sequence:
    smooth = smooth_ends(op.params["body"], wanted, op.params["consts"])
    if not any(on and c is not None for on, c in zip(smooth, cotangents, strict=True)):
        return [None] * len(op.inputs)
    raise ValueError(
        f"while_loop has no gradient, but one is needed{op.source.at}; use md.scan over a fixed "
        "number of steps, or give the loop's start to md.stop_gradient(...)"
    )


def _push(
    op: Operation, arguments: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    consts, body, count = op.params["consts"], op.params["body"], len(arguments)
    active = active_inputs(body, [t is not None for t in tangents], consts, count - consts)
    pushed, moving = PushedBody(body, active), active[consts:]
    bounds = [(0, consts), (consts, count)]
    parts = [with_tangents(arguments[a:b], tangents[a:b], active[a:b]) for a, b in bounds]
    inputs = [t for a, b in bounds for t in pushed.taking(a, b)]
    of_condition = dict(zip(pushed.inputs, op.params["condition"].inputs, strict=True))
    asked = tuple(of_condition.get(t, TracedTensor(t.shape, t.dtype, t.source)) for t in inputs)
    params = {
        "condition": replace(op.params["condition"], inputs=asked),
        "body": pushed.graph(inputs, pushed.giving(0, len(moving), moving)),
        "consts": len(parts[0]),
    }
    return apart(bind(WHILE, [*parts[0], *parts[1]], params).outputs, moving)


WHILE = Primitive("while_loop", _rule, _gradient, push=_push, result_graphs=("body",))
