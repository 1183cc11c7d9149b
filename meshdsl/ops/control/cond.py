"""Cond: one of two branches; a scalar chooses it while the program runs.

A cond's branches are graphs with the same inputs: what they capture, then the operands. Its
gradient is a cond on the same predicate. The forward branches also return the values that the
backward branches read, in slots that both share. A branch without a value for a slot returns zeros.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from meshdsl.gradients.replay import Cotangents
from meshdsl.gradients.tangents import PushedBody, apart, with_tangents
from meshdsl.ops.control.body import leaves_of, share_captured, subgraph
from meshdsl.ops.creation import as_tensor, zeros
from meshdsl.ops.operation import at_once, reported_as
from meshdsl.ops.shapes.joint import Joint
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Operand, Tensor
from meshdsl.tracing.graph import Aval, Graph, Operation, Primitive, TracedTensor
from meshdsl.tracing.trace import bind

R = TypeVar("R")


@at_once
def cond(
    predicate: Operand, if_true: Callable[..., R], if_false: Callable[..., R], *operands: Any
) -> R:
    """Returns `if_true(*operands)` where the predicate holds, else `if_false(*operands)`.

    Both are traced and one runs, the same one on every device. So the predicate has no dims. To
    choose element by element, use `md.where`.

        y = md.cond(step < 100, lambda x: x * 0.1, lambda x: x, x)

    Args:
        predicate: a bool tensor without dims.
        if_true, if_false: take the operands and return trees of tensors, with the same structure,
            dims and dtypes; they may use other tensors around them.
        operands: trees of tensors.

    Raises:
        ValueError: the predicate is no bool scalar, or the results differ; it names all
            differences.

    Examples:
        >>> x = md.named([1.0, 2.0], ["embed"])
        >>> print(md.cond(md.sum(x) > 2.0, lambda x: x * 10.0, lambda x: x, x))
        f32[embed=2] [10. 20.]
    """
    with reported_as("cond"):
        predicate = as_tensor(predicate)
        check_predicate("the predicate", predicate)
        inputs, tree = leaves_of(operands)

    def chosen(*leaves: Tensor) -> Any:
        return if_true(*jax.tree.unflatten(tree, leaves))

    first, captured, out_tree = subgraph(chosen, inputs)

    def other(*leaves: Tensor) -> Any:
        result = if_false(*jax.tree.unflatten(tree, leaves))
        results, structure = leaves_of(result)
        with reported_as("cond"):
            _check_alike(first.outputs, out_tree, results, structure)
        return [
            t.transpose(like.shape.names) for t, like in zip(results, first.outputs, strict=True)
        ]

    rest, also_captured, _ = subgraph(other, inputs)
    branches, consts = share_captured([(first, captured), (rest, also_captured)])
    params = {"if_true": branches[0].prune(), "if_false": branches[1].prune()}
    outputs = bind(COND, [predicate, *consts, *inputs], params).outputs
    return jax.tree.unflatten(out_tree, outputs)


def check_predicate(what: str, tensor: Tensor) -> None:
    """Raises ValueError unless a tensor can decide what all devices do."""
    if tensor.shape or tensor.dtype.name != "bool":
        raise ValueError(
            f"{what} must be bool[], the same for the whole program, got "
            f"{short(tensor.dtype)}{tensor.shape} (made at {tensor.source}); compare or reduce it "
            "first, as in md.sum(x) > 0, or choose element by element with md.where"
        )


def _check_alike(
    one: Sequence[Tensor], one_tree: Any, other: Sequence[Tensor], other_tree: Any
) -> None:
    if one_tree != other_tree:
        raise ValueError(
            f"the branches return different structures: {one_tree} if true, {other_tree} if false"
        )
    tree = jax.tree.unflatten(one_tree, range(len(one)))
    paths = [path_of(keys, "result") for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    problems = [
        f"{path} is {a} if true (made at {a.source}) and {b} if false (made at {b.source})"
        for path, a, b in zip(paths, one, other, strict=True)
        if set(a.shape) != set(b.shape) or a.dtype != b.dtype
    ]
    if problems:
        raise ValueError(
            "the branches must return the same dims and dtypes: " + "; ".join(problems)
        )


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(t.shape, t.dtype) for t in params["if_true"].outputs]


def _replay(
    op: Operation, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Sequence[Tensor], Callable]:
    predicate, *operands = arguments
    joints = [Joint(body, wanted[1:]) for body in op.bodies]
    seeded = [any(both) for both in zip(*(j.active_results for j in joints), strict=True)]
    gradients = [joint.pull(seeded) for joint in joints]
    wants = [any(g is not None for g in both) for both in zip(*gradients, strict=True)]
    halves = [_Half(joint, own, wants) for joint, own in zip(joints, gradients, strict=True)]
    returned = sorted(set().union(*(half.returned for half in halves)))
    slots = functools.reduce(operator.or_, (half.needs for half in halves))  # the larger counts
    forward = _params(half.forward(slots) for half in halves)
    emitted = bind(COND, arguments, forward).outputs
    outputs = emitted[: len(op.outputs)]
    saved = [*(outputs[i] for i in returned), *emitted[len(op.outputs) :]]

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        arriving = [
            zeros(t.shape, t.dtype) if c is None else c.transpose(t.shape.names)
            for c, t, on in zip(cotangents, outputs, seeded, strict=True)
            if on
        ]
        backward = _params(half.backward(returned, slots) for half in halves)
        results = iter(bind(COND, [predicate, *operands, *saved, *arriving], backward).outputs)
        return [None, *(next(results) if on else None for on in wants)]

    return outputs, pullback


def _push(
    op: Operation, arguments: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    predicate, *inputs = arguments
    active = [t is not None for t in tangents[1:]]
    bodies = [PushedBody(body, active) for body in op.bodies]
    moving = [any(both) for both in zip(*(body.moving for body in bodies), strict=True)]
    branches = _params(
        body.graph(body.taking(0, len(active)), body.giving(0, len(moving), moving))
        for body in bodies
    )
    operands = [predicate, *with_tangents(inputs, tangents[1:], active)]
    return apart(bind(COND, operands, branches).outputs, moving)


COND = Primitive("cond", _rule, replay=_replay, push=_push, result_graphs=("if_true", "if_false"))


def _params(branches: Iterable[Graph]) -> dict[str, Graph]:
    return dict(zip(("if_true", "if_false"), branches, strict=True))


class _Half:
    """One branch, forward and backward.

    Attributes:
        returned: the numbers of the results that its backward part reads.
        needs: how many slots of which dims and dtype the other values that it reads need.
    """

    def __init__(self, joint: Joint, cotangents: Cotangents, wants: Sequence[bool]) -> None:
        def gradients() -> list[Tensor]:
            rows = zip(cotangents, joint.inputs, wants, strict=True)
            return [zeros(t.shape, t.dtype) if g is None else g for g, t, on in rows if on]

        self._joint = joint
        self._gradients = joint.extend(gradients)
        inputs = set(joint.inputs)
        reads, self._operations = joint.cut(self._gradients, inputs)
        numbers = {t: i for i, t in enumerate(joint.results)}
        self.returned = {numbers[t] for t in reads if t in numbers and t not in inputs}
        self._saved = [t for t in reads if t not in inputs and t not in numbers]
        self.needs = collections.Counter((t.shape, t.dtype) for t in self._saved)

    def forward(self, slots: collections.Counter) -> Graph:
        return self._joint.forward_graph(self._fill(slots))

    def backward(self, returned: Sequence[int], slots: collections.Counter) -> Graph:
        joint = self._joint
        results = [
            t if i in self.returned else TracedTensor(t.shape, t.dtype, t.source)
            for i, t in ((i, joint.results[i]) for i in returned)
        ]
        seeds = [seed for seed in joint.seeds if seed is not None]
        inputs = (*joint.inputs, *results, *self._fill(slots), *seeds)
        return Graph(inputs, self._operations, tuple(self._gradients)).prune()

    def _fill(self, slots: collections.Counter) -> list[Tensor]:
        """Returns a tensor for every slot: one that this branch saved, or zeros."""
        waiting = collections.defaultdict(list)
        for tensor in reversed(self._saved):
            waiting[tensor.shape, tensor.dtype].append(tensor)
        filled = []
        for shape, dtype in slots.elements():
            own = waiting[shape, dtype]
            filled.append(own.pop() if own else TracedTensor(shape, dtype))
        return filled
