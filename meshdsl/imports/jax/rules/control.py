"""Calls, conditions and loops. A custom derivative is not used: the primal is differentiated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import jax.extend.core as jex

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, plain, settled
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.elementwise import elementwise
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import current

# Calls.


def _infer_call(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    (body,) = inference.bodies(site.params)
    return site.body(body, operands)


def _called(site: conversion.Site, operands: list[Array]) -> list[Array]:
    return site.run(0, operands)


_Chain: TypeAlias = tuple[tuple[str, complex], ...]

# What they compute, step by step. Their slopes at 0 and 6 are 0 by their own rules.
_ACTIVATIONS: dict[_Chain, Callable[[Tensor], Tensor]] = {
    (("max", 0.0),): ops.relu,
    (("max", 0.0), ("min", 6.0)): ops.relu6,
}


def _custom_jvp(site: conversion.Site, operands: list[Array]) -> list[Array]:
    (body,) = inference.bodies(site.params)
    activation = _ACTIVATIONS.get(_chain(body) or ())
    if activation is not None:
        return [replace(operands[0], tensor=activation(operands[0].tensor), number=None)]
    return _primal(site, operands)


def _primal(site: conversion.Site, operands: list[Array]) -> list[Array]:
    """Returns what a function computes that has a derivative of its own, to be differentiated.

    As a whole it may be smooth where `abs` in it is not, as `logaddexp` is: there the slope of
    `abs` is the mean of those beside, 0, and not JAX's 1.
    """
    smooth = site.conversion.having({"abs": elementwise(ops.abs).convert})
    return smooth.run(site.body(0), operands)


def _chain(body: Any) -> _Chain | None:
    """Returns the primitives that lead from the operand of a body to its result, in calls too.

    Each has the number beside its operand. None: the body is no such chain.
    """
    jaxpr = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
    if len(jaxpr.invars) != 1 or len(jaxpr.outvars) != 1:
        return None
    (value,) = jaxpr.invars
    steps: list[tuple[str, complex]] = []
    for equation in jaxpr.eqns:
        numbers = [x.val for x in equation.invars if isinstance(x, jex.Literal)]
        read = [x for x in equation.invars if not isinstance(x, jex.Literal)]
        if len(equation.outvars) != 1 or len(read) != 1 or read[0] is not value:
            return None
        (value,) = equation.outvars
        inner = inference.bodies(equation.params)
        if not inner:
            steps.append((equation.primitive.name, complex(*numbers[:1] or [math.nan])))
        elif len(inner) == 1 and (within := _chain(inner[0])) is not None:
            steps += within
        else:
            return None
    return tuple(steps) if jaxpr.outvars[0] is value else None


def _custom_vjp(site: conversion.Site, operands: list[Array]) -> list[Array]:
    current().note(
        f"from_jax: the gradient of jax.custom_vjp{site.source.at} is that of its function, not "
        "the rule that it was given"
    )
    return _primal(site, operands)


def _checkpointed(site: conversion.Site, operands: list[Array]) -> list[Array]:
    results: list[Array] = []

    def body(*tensors: Tensor) -> list[Tensor]:
        arrays = [replace(x, tensor=t) for x, t in zip(operands, tensors, strict=True)]
        results[:] = site.run(0, arrays)
        return [x.tensor for x in results]

    tensors = ops.checkpoint(body)(*(x.tensor for x in operands))
    return [replace(x, tensor=t) for x, t in zip(results, tensors, strict=True)]


# Conditions.


def _infer_cond(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    results = [site.body(branch, operands[1:]) for branch in site.params["branches"]]
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            site.match(mine, theirs)
    chosen = []
    for each in zip(*results, strict=True):
        nodes = tuple(
            next((x.nodes[p] for x in each if not x.weak[p]), node)
            for p, node in enumerate(each[0].nodes)
        )
        chosen.append(Dims(nodes, (False,) * len(nodes)))
    return chosen


def _chosen(site: conversion.Site, operands: list[Array]) -> list[Array]:
    which, *rest = operands
    count = len(site.params["branches"])

    def branch(number: int) -> Callable[[], list[Tensor]]:
        def run() -> list[Tensor]:
            pairs = zip(site.run(number, rest), site.outputs, strict=True)
            return [settled(x, labels) for x, labels in pairs]

        return run

    def among(first: int) -> list[Tensor]:
        if first == count - 1:
            return branch(first)()
        test = which.tensor
        if test.dtype == bool:
            return ops.cond(test, branch(1), branch(0))
        return ops.cond(test <= first, branch(first), lambda: among(first + 1))

    return [_whole(t, labels) for t, labels in zip(among(0), site.outputs, strict=True)]


def _whole(tensor: Tensor, labels: Sequence[str]) -> Array:
    """Returns a tensor whose dims stand at the positions of these names."""
    sizes = tuple(tensor.shape.get(name).size for name in labels)
    return Array(tensor, tuple((name,) for name in labels), sizes)


# Loops.


def _strong(dims: Dims) -> Dims:
    return Dims(dims.nodes, (False,) * len(dims.nodes))


def _infer_scan(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    first, count = site.params["num_consts"], site.params["num_carry"]
    consts, carry = operands[:first], [_strong(x) for x in operands[first : first + count]]
    stacked = operands[first + count :]
    steps = site.new(site.params["length"], hint=f"{site.source.layer}_steps")
    for x in stacked:
        if not x.weak[0]:
            site.unify(steps, x.nodes[0])
    slices = [x.pick(range(1, len(x.nodes))) for x in stacked]
    results = site.body(site.params["jaxpr"], [*consts, *carry, *slices])
    for before, after in zip(carry, results[:count], strict=True):
        site.match(before, after)
    ys = [Dims((steps, *x.nodes), (False, *x.weak)) for x in results[count:]]
    return [*carry, *(_strong(y) for y in ys)]


def _scanned(site: conversion.Site, operands: list[Array]) -> list[Array]:
    first, count = site.params["num_consts"], site.params["num_carry"]
    arguments, outputs = site.labels(0)
    consts, carry, stacked = (
        operands[:first],
        operands[first : first + count],
        operands[first + count :],
    )
    names = [labels[0] for labels in (*site.inputs[first + count :], *site.outputs[count:])]
    dim = names[0] if names else "steps"
    inside = {name for labels in (*arguments, *outputs) for name in labels}
    while dim in inside:
        dim += "_steps"
    length = Dimension(dim, site.params["length"])
    start = [settled(x, labels) for x, labels in zip(carry, arguments[first:], strict=False)]
    xs = [
        plain(x, (dim, *labels), [0])
        for x, labels in zip(stacked, arguments[first + count :], strict=True)
    ]

    def body(state: list[Tensor], slices: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        values = [_whole(t, labels) for t, labels in zip(state, arguments[first:], strict=False)]
        parts = [Array(t, x.places[1:], x.sizes[1:]) for t, x in zip(slices, xs, strict=True)]
        results = site.run(0, [*consts, *values, *parts])
        pairs = zip(results[:count], arguments[first : first + count], strict=True)
        after = [settled(x, ls) for x, ls in pairs]
        ys = [settled(x, ls) for x, ls in zip(results[count:], outputs[count:], strict=True)]
        return after, ys

    end, ys = ops.scan(body, start, [x.tensor for x in xs], length, reverse=site.params["reverse"])
    carried = [_whole(t, labels) for t, labels in zip(end, arguments[first:], strict=False)]
    return [*carried, *(_whole(t, (dim, *ls)) for t, ls in zip(ys, outputs[count:], strict=True))]


def _infer_while(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    params = site.params
    asked, done = params["cond_nconsts"], params["body_nconsts"]
    carry = [_strong(x) for x in operands[asked + done :]]
    site.body(params["cond_jaxpr"], [*operands[:asked], *carry])
    results = site.body(params["body_jaxpr"], [*operands[asked : asked + done], *carry])
    for before, after in zip(carry, results, strict=True):
        site.match(before, after)
    return carry


def _repeated(site: conversion.Site, operands: list[Array]) -> list[Array]:
    asked, done = site.params["cond_nconsts"], site.params["body_nconsts"]
    labels = site.labels(1)[0][done:]
    start = [settled(x, ls) for x, ls in zip(operands[asked + done :], labels, strict=True)]

    def values(state: Sequence[Tensor]) -> list[Array]:
        return [_whole(t, ls) for t, ls in zip(state, labels, strict=True)]

    def going_on(state: Sequence[Tensor]) -> Tensor:
        return site.run(0, [*operands[:asked], *values(state)])[0].tensor

    def following(state: Sequence[Tensor]) -> Sequence[Tensor]:
        results = site.run(1, [*operands[asked : asked + done], *values(state)])
        return [settled(x, ls) for x, ls in zip(results, labels, strict=True)]

    return values(ops.while_loop(going_on, following, start))


_CALLS = ("closed_call", "core_call", "jit", "pjit")
TABLE: Table = {
    **{name: Rule(_infer_call, _called) for name in _CALLS},
    "checkpoint": Rule(_infer_call, _checkpointed),
    "cond": Rule(_infer_cond, _chosen),
    "custom_jvp_call": Rule(_infer_call, _custom_jvp),
    "custom_vjp_call": Rule(_infer_call, _custom_vjp),
    "custom_vjp_call_jaxpr": Rule(_infer_call, _custom_vjp),
    "remat2": Rule(_infer_call, _checkpointed),
    "scan": Rule(_infer_scan, _scanned),
    "while": Rule(_infer_while, _repeated),
}
