"""Scan: one body, run along a stacked dim; program size does not grow with its length.

A scan's body is a `Graph` with inputs (consts, carry, slices of xs) and outputs (carry, slices of
ys). Its gradient is a scan in the other direction: the body and its gradient are traced once, as
one `Joint`. The forward body also emits, stacked, what the backward body reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from meshdsl.gradients.replay import Cotangents, passes
from meshdsl.gradients.tangents import PushedBody, apart, with_tangents
from meshdsl.ops.control.body import check_carry, leaves_of
from meshdsl.ops.creation import zeros
from meshdsl.ops.operation import at_once, reported_as
from meshdsl.ops.shapes.joint import Joint
from meshdsl.ops.shapes.shape import RENAME
from meshdsl.tensors.dims import Dimension, DimLike, Shape, did_you_mean, name_of
from meshdsl.tensors.dtypes import is_differentiable
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Graph, Operation, Primitive, TracedTensor
from meshdsl.tracing.trace import Trace, bind, current, tracing

C = TypeVar("C")  # the carry
X = TypeVar("X")  # a slice of a loop's inputs
Y = TypeVar("Y")  # a slice of its results


@at_once
def scan(
    body: Callable[[C, X], tuple[C, Y]],
    carry: C,
    xs: X,
    dim: DimLike,
    reverse: bool = False,
) -> tuple[C, Y]:
    """Runs `body` once for each index along a stacked dim: program size does not grow with it.

    The values that the gradient reads of every step are kept, stacked. `md.checkpoint(body)` keeps
    the carries only and recomputes the rest; `md.checkpoint(body, keep=[...])` also keeps the
    values with those names.

        x, losses = md.scan(lambda x, layer: (layer(x), None), x, layers, dim="layers")

    Args:
        body: (carry, slice of xs) -> (carry, slice of ys). The slices lack `dim`.
        carry: a tree of tensors; the body returns the same tree, dims and dtypes.
        xs: a tree of tensors that all have `dim`, or None (then `dim` must be a Dimension).
        reverse: start at the last index.

    Returns:
        The final carry, and ys: the body's second results with `dim` in front.

    Raises:
        ValueError: an x lacks `dim`, or the carry changes its tree, dims or dtypes.

    Examples:
        >>> x = md.named([1.0, 2.0, 3.0], ["length"])
        >>> last, sums = md.scan(lambda sum, x: (sum + x, sum + x), md.zeros([]), x, dim="length")
        >>> print(last, sums)
        f32[] 6. f32[length=3] [1. 3. 6.]
    """
    return _scan("scan", body, carry, xs, dim, reverse)


@at_once
def map(function: Callable[[X], Y], xs: X, dim: DimLike) -> Y:
    """Returns `function` of every slice along a dim, stacked: one after another, in little memory.

    Operations work on all of a dim at once; use `map` where that needs too much memory. Where
    `dim` is split, every device maps over its own slices, unless `function` has a value that is
    split over the same axes, or uses `md.cond` or `md.while_loop`.

        scores = md.map(lambda q: md.softmax(md.einsum(q, k, over="kv"), "memory"), q, dim="heads")

    Args:
        function: (slice of xs) -> slice of the result. The slices lack `dim`.
        xs: a tree of tensors that all have `dim`.

    Returns:
        The function's results with `dim` in front.

    Raises:
        ValueError: an x lacks `dim`, or a result has it already.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["heads", "length"])
        >>> print(md.map(lambda row: md.sum(row * row, "length"), x, dim="heads"))
        f32[heads=2] [ 5. 25.]
    """
    return _scan("map", lambda carry, x: (carry, function(x)), (), xs, dim, False)[1]


def _scan(
    name: str, body: Callable, carry: Any, xs: Any, dim: DimLike, reverse: bool
) -> tuple[Any, Any]:
    with reported_as(name, (carry, xs)):
        carry_in, carry_tree = leaves_of(carry)
        stacked, stacked_tree = leaves_of(xs)
        dim = _stacked_dim(dim, stacked, xs)
    inner = Trace(current())
    with tracing(inner):
        start = [inner.input(t.shape, t.dtype, t.source) for t in carry_in]
        slices = [inner.input(t.shape.without([dim.name]), t.dtype, t.source) for t in stacked]
        result = body(
            jax.tree.unflatten(carry_tree, start), jax.tree.unflatten(stacked_tree, slices)
        )
        with reported_as(name):
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError("the body must return a pair: (carry, slice of ys)")
            carry_out, out_tree = leaves_of(result[0])
            ys, ys_tree = leaves_of(result[1])
            check_carry(carry, carry_in, carry_tree, carry_out, out_tree)
            _check_ys(result[1], ys, dim)
        carry_out = [t.transpose(s.shape.names) for t, s in zip(carry_out, carry_in, strict=True)]
        graph, consts = inner.finish([*carry_out, *ys])
    params = {
        "body": graph.prune(),
        "dim": dim,
        "consts": len(consts),
        "carries": len(carry_in),
        "reverse": reverse,
    }
    outputs = bind(SCAN, [*consts, *carry_in, *stacked], params).outputs
    return (
        jax.tree.unflatten(carry_tree, outputs[: len(carry_in)]),
        jax.tree.unflatten(ys_tree, outputs[len(carry_in) :]),
    )


def _stacked_dim(dim: DimLike, stacked: Sequence[Tensor], xs: Any) -> Dimension:
    name = name_of(dim)
    paths = [path_of(keys, "xs") for keys, _ in jax.tree_util.tree_flatten_with_path(xs)[0]]
    problems = [
        f"{path}: {tensor} has no dim `{name}`{did_you_mean(name, tensor.shape.names)}"
        for path, tensor in zip(paths, stacked, strict=False)
        if tensor.shape.find(name) is None
    ]
    dims = [t.shape.get(name) for t in stacked if t.shape.find(name) is not None]
    dims += [dim] if isinstance(dim, Dimension) else []
    if len(set(dims)) > 1:
        problems.append(f"dim `{name}` has several sizes: {sorted({d.size for d in dims})}")
    if not dims and not problems:
        problems.append(f"nothing gives dim {name!r} a size; pass a md.Dimension")
    if problems:
        raise ValueError("; ".join(problems))
    return dims[0]


def _check_ys(tree: Any, ys: Sequence[Tensor], dim: Dimension) -> None:
    paths = [path_of(keys, "ys") for keys, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    problems = [
        f"{path}: {tensor} (made at {tensor.source})"
        for path, tensor in zip(paths, ys, strict=True)
        if tensor.shape.find(dim.name) is not None
    ]
    if problems:
        raise ValueError(
            f"ys are stacked along `{dim.name}`, which they have already; rename that dim in the "
            "body: " + "; ".join(problems)
        )


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    outputs, carries = params["body"].outputs, params["carries"]
    stacked = [(Shape([params["dim"], *t.shape]), t.dtype) for t in outputs[carries:]]
    return [*((t.shape, t.dtype) for t in outputs[:carries]), *stacked]


def _replay(
    op: Operation, arguments: Sequence[Tensor], wanted: Sequence[bool]
) -> tuple[Sequence[Tensor], Callable]:
    consts, carries, results = op.params["consts"], op.params["carries"], len(op.outputs)
    parts = _Parts(op.params["body"], op.params["dim"], consts, carries, wanted)
    emitted = bind(SCAN, arguments, {**op.params, "body": parts.forward_body()})
    read = dict(zip(parts.inputs[:consts], arguments[:consts], strict=True))
    read.update(zip(parts.inputs[consts + carries :], arguments[consts + carries :], strict=True))
    read.update(zip(parts.saved, emitted.outputs[results:], strict=True))

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        arriving = [
            zeros(t.shape, t.dtype) if c is None else c.transpose(t.shape.names)
            for c, t, on in zip(cotangents, emitted.outputs[:results], parts.seeded, strict=True)
            if on
        ]
        moving = sum(parts.seeded[:carries])
        sums = [zeros(t.shape, t.dtype) for t in parts.sums]
        backward = {
            "body": parts.backward_body(),
            "dim": op.params["dim"],
            "consts": len(parts.read_consts),
            "carries": moving + len(sums),
            "reverse": not op.params["reverse"],
        }
        gradients = iter(
            bind(
                SCAN,
                [
                    *(read[t] for t in parts.read_consts),
                    *arriving[:moving],
                    *sums,
                    *(read[t] for t in parts.read_slices),
                    *arriving[moving:],
                ],
                backward,
            ).outputs
        )
        carried = [next(gradients) if on else None for on in parts.seeded[:carries]]
        of_carry = [
            end if g is not None else None
            for end, g in zip(carried, parts.carry_gradients, strict=True)
        ]
        of_consts = [None if g is None else next(gradients) for g in parts.const_gradients]
        of_slices = [None if g is None else next(gradients) for g in parts.slice_gradients]
        return [*of_consts, *of_carry, *of_slices]

    return emitted.outputs[:results], pullback


def _push(
    op: Operation, arguments: Sequence[Tensor], tangents: Sequence[Tensor | None]
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    consts, body = op.params["consts"], op.params["body"]
    last, count = consts + op.params["carries"], len(body.inputs)
    wanted = [t is not None for t in tangents]
    active = active_inputs(body, wanted, consts, op.params["carries"])
    pushed = PushedBody(body, active)
    moving = [*active[consts:last], *pushed.moving[last - consts :]]
    bounds = [(0, consts), (consts, last), (last, count)]
    result_bounds = [(0, last - consts), (last - consts, len(body.outputs))]
    parts = [with_tangents(arguments[a:b], tangents[a:b], active[a:b]) for a, b in bounds]
    graph = pushed.graph(
        [t for a, b in bounds for t in pushed.taking(a, b)],
        [t for a, b in result_bounds for t in pushed.giving(a, b, moving[a:b])],
    )
    params = {**op.params, "body": graph, "consts": len(parts[0]), "carries": len(parts[1])}
    outputs = bind(SCAN, [t for part in parts for t in part], params).outputs
    carry, carried = apart(outputs[: len(parts[1])], moving[: last - consts])
    ys, stacked = apart(outputs[len(parts[1]) :], moving[last - consts :])
    return [*carry, *ys], [*carried, *stacked]


SCAN = Primitive("scan", _rule, replay=_replay, push=_push, result_graphs=("body",))


class _Parts:
    """The forward and the backward body of a scan.

    Attributes:
        inputs: consts, carry and slices, as the joint graph has them.
        seeded: for each result of the body, whether a cotangent arrives for it.
        sums: running sums of the gradients of the consts that have one.
        const_gradients, carry_gradients, slice_gradients: those of one iteration; None where no
            gradient is wanted.
        saved: what the forward scan stacks for the backward scan.
        read_consts, read_slices: what the backward body reads: consts; slices and `saved`.
    """

    def __init__(
        self, body: Graph, dim: Dimension, consts: int, carries: int, wanted: Sequence[bool]
    ) -> None:
        active = active_inputs(body, wanted, consts, carries)
        joint = Joint(body, active)
        self.inputs, self._results = joint.inputs, joint.results
        self.seeded = [*active[consts : consts + carries], *joint.active_results[carries:]]
        gradients_of = joint.pull(self.seeded)
        self.const_gradients = gradients_of[:consts]
        self.carry_gradients = gradients_of[consts : consts + carries]
        self.slice_gradients = gradients_of[consts + carries :]
        gradients = [g for g in self.const_gradients if g is not None]
        self.sums = [joint.input(t) for t in gradients]

        def outputs() -> list[Tensor]:
            carried = [
                zeros(t.shape, t.dtype) if g is None else g
                for g, t, on in zip(
                    self.carry_gradients,
                    self.inputs[consts : consts + carries],
                    self.seeded[:carries],
                    strict=True,
                )
                if on
            ]
            added = [total + g for total, g in zip(self.sums, gradients, strict=True)]
            return [*carried, *added, *(g for g in self.slice_gradients if g is not None)]

        self._outputs = joint.extend(outputs)
        self._forward = joint.forward
        self._carry_seeds = [seed for seed in joint.seeds[:carries] if seed is not None]
        self._result_seeds = [seed for seed in joint.seeds[carries:] if seed is not None]
        at_hand = set(self.inputs[:consts]) | set(self.inputs[consts + carries :])
        reads, self._backward = joint.cut(self._outputs, at_hand)
        own_consts = set(self.inputs[:consts])
        self.read_consts = [t for t in reads if t in own_consts]
        self.read_slices = [t for t in reads if t not in own_consts]
        self.saved = [t for t in reads if t not in at_hand]
        stored = {t: self._stored(t, dim.name) for t in self.saved}
        self.saved = [stored[t] for t in self.saved]
        self.read_slices = [stored.get(t, t) for t in self.read_slices]

    def _stored(self, tensor: Tensor, name: str) -> Tensor:
        """Returns the tensor to stack for a saved one: it has no dim of the stacked dim's name."""
        if tensor.shape.find(name) is None:
            return tensor
        other = name
        while tensor.shape.find(other) is not None:
            other += "_inside"
        shape = Shape(Dimension(other, d.size) if d.name == name else d for d in tensor.shape)
        stored = TracedTensor(shape, tensor.dtype, tensor.source, tensor.trace)
        there, back = {"names": {name: other}}, {"names": {other: name}}
        save = Operation(RENAME, (tensor,), (stored,), there, tensor.source)
        load = Operation(RENAME, (stored,), (tensor,), back, tensor.source.as_backward())
        self._forward = (*self._forward, save)
        self._backward = (load, *self._backward)
        return stored

    def forward_body(self) -> Graph:
        outputs = (*self._results, *self.saved)
        return Graph(self.inputs, self._forward, outputs).prune()

    def backward_body(self) -> Graph:
        inputs = (
            *self.read_consts,
            *self._carry_seeds,
            *self.sums,
            *self.read_slices,
            *self._result_seeds,
        )
        return Graph(inputs, self._backward, tuple(self._outputs)).prune()


def active_inputs(body: Graph, wanted: Sequence[bool], consts: int, carries: int) -> list[bool]:
    """Extends `wanted` to the carries that depend on a wanted input after some iterations."""
    active = list(wanted)
    while True:
        depends = {t for t, on in zip(body.inputs, active, strict=True) if on}
        for op in body.operations:
            if passes(op) and any(t in depends for t in op.inputs):
                depends.update(t for t in op.outputs if is_differentiable(t.dtype))
        grown = list(active)
        for i in range(carries):
            grown[consts + i] = active[consts + i] or body.outputs[i] in depends
        if grown == active:
            return active
        active = grown
