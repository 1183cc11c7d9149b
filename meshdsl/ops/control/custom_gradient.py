"""Custom gradients: a function together with a rule for its backward pass.

The function and its rule are traced together. A `custom_gradient` operation has two graphs. `body`
returns the function's results and, after them, the other values that the rule reads. `backward`
takes the inputs, the values it reads and the cotangents of the results. Lowering inlines the body.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from meshdsl.gradients.replay import Cotangents, Replay
from meshdsl.ops.control.body import is_array, leaves_of
from meshdsl.ops.creation import as_tensor, zeros
from meshdsl.ops.operation import at_once, reported_as
from meshdsl.tensors.dtypes import is_differentiable
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Graph, Operation, Primitive
from meshdsl.tracing.trace import Trace, bind, current, tracing


def custom_gradient(function: Callable) -> Callable:
    """Decorates a function that returns `(result, backward)` and gives its gradient itself.

    `backward` gets the gradient of the result, with the result's tree (None for what is not
    floating-point). It returns the gradient of the argument; for several arguments, a tuple of
    gradients. None stands for zero. It may use every tensor of the function.

        @md.custom_gradient
        def limited(x):
            return x, lambda g: md.clip(g, -1.0, 1.0)

    The rule is for the first gradient of the results; second gradients differentiate the rule.
    Positional arguments may be trees of tensors; other leaves and keyword arguments belong to the
    function. Tensors that it uses without taking them as arguments are constants to it.

    Raises:
        ValueError: when called: the function returns no such pair, or `backward` returns other
            trees, dims or dtypes; when differentiated: by a tensor that is no argument.

    Examples:
        >>> @md.custom_gradient
        ... def limited(x):
        ...     return x, lambda g: md.clip(g, -1.0, 1.0)
        >>> x = md.named([0.25, 3.0], ["embed"])
        >>> print(md.grad(lambda x: md.sum(limited(x) ** 2))(x))
        f32[embed=2] [0.5 1. ]
    """

    @at_once
    @functools.wraps(function)
    def ruled(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(args, is_leaf=is_array)
        places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
        inputs = [as_tensor(leaves[i]) for i in places]
        trace = Trace(current())
        with tracing(trace):
            own = [trace.input(t.shape, t.dtype, t.source) for t in inputs]
            for i, tensor in zip(places, own, strict=True):
                leaves[i] = tensor
            pair = function(*jax.tree.unflatten(tree, leaves), **kwargs)
            with reported_as("custom_gradient"):
                if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])):
                    raise ValueError("the function must return a pair: (result, backward)")
            results, out_tree = leaves_of(pair[0])
            results = [trace.own(t) for t in results]
            forward = tuple(trace.operations)
            trace.numbers.clear()  # else the rule reads the function's, which loops then stack
            seeds = [
                trace.input(t.shape, t.dtype, t.source) if is_differentiable(t.dtype) else None
                for t in results
            ]
            returned = pair[1](jax.tree.unflatten(out_tree, seeds))
            with reported_as("custom_gradient"):
                gradients = _as_gradients(returned, args, places, own)
            gradients = [
                None if g is None else trace.own(g).transpose(t.shape.names)
                for g, t in zip(gradients, own, strict=True)
            ]
            backward = trace.operations[len(forward) :]
        consts = tuple(trace.captured)
        operands = (*trace.captured.values(), *own)
        present = tuple(g for g in gradients if g is not None)
        made = {t for op in forward for t in op.outputs}
        read = [t for op in backward for t in op.inputs] + list(present)
        saved = tuple(dict.fromkeys(t for t in read if t in made))
        places_of = {t: i for i, t in enumerate(results)}
        extra = [t for t in saved if t not in places_of]
        places_of |= {t: len(results) + i for i, t in enumerate(extra)}
        rule = Graph(
            (*operands, *saved, *(seed for seed in seeds if seed is not None)),
            tuple(replace(op, source=op.source.as_backward()) for op in backward),
            present,
        )
        params = {
            "body": Graph(operands, forward, (*results, *extra)).prune(),
            "backward": rule.prune(),
            "consts": len(consts),
            "results": len(results),
            "reads": tuple(places_of[t] for t in saved),
            "gives": tuple(g is not None for g in gradients),
            "function": getattr(function, "__name__", "function"),
        }
        outputs = bind(CUSTOM_GRADIENT, [*consts, *inputs], params).outputs
        return jax.tree.unflatten(out_tree, outputs[: len(results)])

    return ruled


def _as_gradients(
    returned: Any, args: Sequence[Any], places: Sequence[int], own: Sequence[Tensor]
) -> list[Tensor | None]:
    """Returns one gradient, or None, per tensor argument, from what `backward` returned."""
    if len(args) == 1 and not (isinstance(returned, tuple) and len(returned) == 1):
        returned = (returned,)
    if not isinstance(returned, tuple) or len(returned) != len(args):
        raise ValueError(
            f"backward must return a tuple with one gradient for each of {len(args)} arguments"
        )
    keyed, _ = jax.tree_util.tree_flatten_with_path(tuple(args), is_leaf=is_array)
    tensors = dict(zip((keyed[i][0] for i in places), own, strict=True))
    gradients: dict[Any, Any] = {}
    problems = []

    def is_end(value: Any) -> bool:
        return value is None or is_array(value)

    for keys, value in jax.tree_util.tree_flatten_with_path(returned, is_leaf=is_end)[0]:
        if value is None:  # zero, for a leaf or for a whole argument
            continue
        like, path = tensors.get(keys), path_of(keys, "gradient")
        if like is None:
            problems.append(f"{path} is the gradient of nothing: no tensor stands there")
            continue
        gradient = as_tensor(value, like.dtype)
        if not is_differentiable(like.dtype):
            problems.append(f"{path}: {like} has no gradient; return None")
        elif set(gradient.shape) != set(like.shape) or gradient.dtype != like.dtype:
            problems.append(f"{path} is {gradient} (made at {gradient.source}), not {like}")
        gradients[keys] = gradient
    if problems:
        raise ValueError("backward returns what does not fit the arguments: " + "; ".join(problems))
    return [gradients.get(keys) for keys in tensors]


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(t.shape, t.dtype) for t in params["body"].outputs]


def _replay(
    op: Operation, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Sequence[Tensor], Callable]:
    params, body = op.params, op.params["body"]
    consts, results = params["consts"], params["results"]
    primal = replace(body, outputs=body.outputs[:results]).prune()
    used = {t for inner in primal.operations for t in inner.inputs}.union(primal.outputs)
    captured = zip(arguments[:consts], body.inputs[:consts], wanted[:consts], strict=True)
    outside = [f"{t} (made at {t.source})" for t, own, on in captured if on and own in used]
    with reported_as("custom_gradient"):
        if outside:
            raise ValueError(
                f"`{params['function']}` uses {', '.join(outside)} without taking it as an "
                "argument, so its rule gives no gradient for it; make it an argument, or give it "
                "to md.stop_gradient(...)"
            )
    outputs = bind(op.primitive, arguments, params).outputs

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        pairs = zip(cotangents[:results], outputs[:results], strict=True)
        floats = [(c, t) for c, t in pairs if is_differentiable(t.dtype)]
        gradients: Cotangents = [None] * len(arguments)
        if any(c is not None for c, _ in floats):
            seeds = [
                zeros(t.shape, t.dtype) if c is None else c.transpose(t.shape.names)
                for c, t in floats
            ]
            rule = params["backward"]
            inputs = [*arguments, *(outputs[i] for i in params["reads"]), *seeds]
            values = iter(Replay(rule, inputs, [False] * len(inputs)).outputs)
            gradients[consts:] = [next(values) if on else None for on in params["gives"]]
        if any(c is not None for c in cotangents[results:]):  # the rule itself is differentiated
            rest = replace(body, outputs=body.outputs[results:])
            again = Replay(rest, arguments, wanted)
            reaching = zip(cotangents[results:], again.active_outputs, strict=True)
            more = again.backward([c if on else None for c, on in reaching])
            gradients = [_sum(a, b) for a, b in zip(gradients, more, strict=True)]
        return gradients

    return outputs, pullback


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other


CUSTOM_GRADIENT = Primitive(
    "custom_gradient", _rule, replay=_replay, inlined=True, result_graphs=("body",)
)
