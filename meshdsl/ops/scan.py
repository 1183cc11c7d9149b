"""Scan: one body, run along a stacked dim; program size does not grow with its length.

A scan's body is a `Graph` with inputs (consts, carry, slices of xs) and outputs (carry, slices of
ys). Its gradient is a scan in the other direction: the body and its gradient are traced once as one
*joint* graph, which is cut in two. The forward body also emits, stacked, what the backward body
reads; what is cheap to compute again from values at hand is not stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshdsl.dims import Dimension, DimLike, Shape
from meshdsl.dtypes import is_float
from meshdsl.graph import Aval, Graph, Operation, Primitive, Tensor
from meshdsl.module import path_of
from meshdsl.ops.body import leaves_of
from meshdsl.ops.creation import zeros
from meshdsl.ops.operation import told_as
from meshdsl.ops.shape import RENAME
from meshdsl.replay import Cotangents, Replay
from meshdsl.trace import Trace, bind, current, tracing

# Operations worth repeating in the backward body rather than stacking what they return.
_CHEAP = frozenset(
    (
        "full arange rename broadcast transpose split merge cast select stop_gradient "
        "negative square add subtract multiply divide maximum minimum equal not_equal "
        "less less_equal greater greater_equal logical_and logical_or logical_not sign "
        "abs"
    ).split()
)


def scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    dim: DimLike,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Runs `body` once for each index along a stacked dim: program size does not grow with it.

    Args:
        body: (carry, slice of xs) -> (carry, slice of ys). The slices lack `dim`.
        carry: a tree of tensors; the body returns the same tree, dims and dtypes.
        xs: a tree of tensors that all have `dim`, or None (then `dim` must be a Dimension).
        reverse: start at the last index.

    Returns:
        The final carry, and ys: the body's second results with `dim` in front.

    Raises:
        ValueError: an x lacks `dim`, or the carry changes its tree, dims or dtypes; all told.
    """
    with told_as("scan"):
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
        with told_as("scan"):
            if not isinstance(result, tuple) or len(result) != 2:
                raise ValueError("the body must return a pair: (carry, slice of ys)")
            carry_out, out_tree = leaves_of(result[0])
            ys, ys_tree = leaves_of(result[1])
            _check_carry(carry, carry_in, carry_tree, carry_out, out_tree)
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
    name = dim if isinstance(dim, str) else dim.name
    paths = [path_of(keys, "xs") for keys, _ in jax.tree_util.tree_flatten_with_path(xs)[0]]
    problems = [
        f"{path}: {tensor} has no dim `{name}`"
        for path, tensor in zip(paths, stacked, strict=False)
        if tensor.shape.find(name) is None
    ]
    found = [t.shape.get(name) for t in stacked if t.shape.find(name) is not None]
    found += [dim] if isinstance(dim, Dimension) else []
    if len(set(found)) > 1:
        problems.append(f"dim `{name}` has several sizes: {sorted({d.size for d in found})}")
    if not found and not problems:
        problems.append(f"nothing gives dim {name!r} a size; pass a md.Dimension")
    if problems:
        raise ValueError("; ".join(problems))
    return found[0]


def _check_carry(
    carry: Any, before: Sequence[Tensor], tree: Any, after: Sequence[Tensor], out_tree: Any
) -> None:
    if tree != out_tree:
        raise ValueError(f"the body returns a carry of another structure: {out_tree}, not {tree}")
    paths = [path_of(keys, "carry") for keys, _ in jax.tree_util.tree_flatten_with_path(carry)[0]]
    problems = [
        f"{path} goes in as {old} and comes out as {new} (made at {new.source})"
        for path, old, new in zip(paths, before, after, strict=True)
        if set(old.shape) != set(new.shape) or old.dtype != new.dtype
    ]
    if problems:
        raise ValueError("the carry must keep its dims and dtypes: " + "; ".join(problems))


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
    joint = _Joint(op.params["body"], op.params["dim"], consts, carries, wanted)
    emitted = bind(SCAN, arguments, {**op.params, "body": joint.forward_body()})
    read = dict(zip(joint.inputs[:consts], arguments[:consts], strict=True))
    read.update(zip(joint.inputs[consts + carries :], arguments[consts + carries :], strict=True))
    read.update(zip(joint.saved, emitted.outputs[results:], strict=True))

    def pullback(cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
        arriving = [
            zeros(t.shape, t.dtype) if c is None else c.transpose(t.shape.names)
            for c, t, on in zip(cotangents, emitted.outputs[:results], joint.seeded, strict=True)
            if on
        ]
        moving = sum(joint.seeded[:carries])
        sums = [zeros(t.shape, t.dtype) for t in joint.sums]
        backward = {
            "body": joint.backward_body(),
            "dim": op.params["dim"],
            "consts": len(joint.read_consts),
            "carries": moving + len(sums),
            "reverse": not op.params["reverse"],
        }
        found = iter(
            bind(
                SCAN,
                [
                    *(read[t] for t in joint.read_consts),
                    *arriving[:moving],
                    *sums,
                    *(read[t] for t in joint.read_slices),
                    *arriving[moving:],
                ],
                backward,
            ).outputs
        )
        of_carry = [next(found) if on else None for on in joint.seeded[:carries]]
        of_consts = [None if g is None else next(found) for g in joint.const_gradients]
        of_slices = [None if g is None else next(found) for g in joint.slice_gradients]
        return [*of_consts, *of_carry, *of_slices]

    return emitted.outputs[:results], pullback


SCAN = Primitive("scan", _rule, replay=_replay)


class _Joint:
    """A scan's body together with its gradient, traced as one graph and cut in two.

    Attributes:
        inputs: consts, carry and slices, as the joint graph has them.
        seeded: for each result of the body, whether a cotangent arrives for it.
        sums: running sums of the gradients of the consts that have one.
        const_gradients, slice_gradients: what one iteration finds; None where nothing is wanted.
        saved: what the forward scan stacks for the backward scan.
        read_consts, read_slices: what the backward body reads: consts; slices and `saved`.
    """

    def __init__(
        self, body: Graph, dim: Dimension, consts: int, carries: int, wanted: Sequence[bool]
    ) -> None:
        active = _active_inputs(body, wanted, consts, carries)
        trace = Trace(current())
        with tracing(trace):
            self.inputs = tuple(trace.input(t.shape, t.dtype, t.source) for t in body.inputs)
            replayed = Replay(body, self.inputs, active)
            self._results = tuple(replayed.outputs)
            self._forward = tuple(trace.operations)
            self.seeded = [*active[consts : consts + carries], *replayed.active_outputs[carries:]]
            seeds = [
                trace.input(t.shape, t.dtype, t.source) if on else None
                for t, on in zip(self._results, self.seeded, strict=True)
            ]
            reaching = zip(seeds, replayed.active_outputs, strict=True)
            found = replayed.backward([seed if on else None for seed, on in reaching])
            found = [
                None if g is None else g.transpose(t.shape.names)
                for g, t in zip(found, self.inputs, strict=True)
            ]
            self.const_gradients = found[:consts]
            self.slice_gradients = found[consts + carries :]
            carried = [
                zeros(t.shape, t.dtype) if g is None else g
                for g, t, on in zip(
                    found[consts : consts + carries],
                    self.inputs[consts : consts + carries],
                    self.seeded[:carries],
                    strict=True,
                )
                if on
            ]
            gradients = [g for g in self.const_gradients if g is not None]
            self.sums = [trace.input(t.shape, t.dtype, t.source) for t in gradients]
            added = [total + g for total, g in zip(self.sums, gradients, strict=True)]
        assert not trace.captured, "gradient rules use nothing but their operation's tensors"
        self._outputs = [*carried, *added, *(g for g in self.slice_gradients if g is not None)]
        backward = trace.operations[len(self._forward) :]
        self._carry_seeds = [seed for seed in seeds[:carries] if seed is not None]
        self._result_seeds = [seed for seed in seeds[carries:] if seed is not None]
        held = set(self.inputs[:consts]) | set(self.inputs[consts + carries :])
        reads, again = _cut(self._forward, backward, self._outputs, self.inputs, held)
        self._backward = (*again, *backward)
        own_consts = set(self.inputs[:consts])
        self.read_consts = [t for t in reads if t in own_consts]
        self.read_slices = [t for t in reads if t not in own_consts]
        self.saved = [t for t in reads if t not in held]
        stored = {t: self._stored(t, dim.name) for t in self.saved}
        self.saved = [stored[t] for t in self.saved]
        self.read_slices = [stored.get(t, t) for t in self.read_slices]

    def _stored(self, tensor: Tensor, name: str) -> Tensor:
        """Returns what is stacked for a saved tensor: one without the stacked dim's name."""
        if tensor.shape.find(name) is None:
            return tensor
        other = name
        while tensor.shape.find(other) is not None:
            other += "_inside"
        shape = Shape(Dimension(other, d.size) if d.name == name else d for d in tensor.shape)
        stored = Tensor(shape, tensor.dtype, tensor.source, tensor.trace)
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


def _active_inputs(body: Graph, wanted: Sequence[bool], consts: int, carries: int) -> list[bool]:
    """Extends `wanted` to the carries that depend on a wanted input after some iterations."""
    active = list(wanted)
    while True:
        depends = {t for t, on in zip(body.inputs, active, strict=True) if on}
        for op in body.operations:
            if op.name != "stop_gradient" and any(t in depends for t in op.inputs):
                depends.update(t for t in op.outputs if is_float(t.dtype))
        grown = list(active)
        for i in range(carries):
            grown[consts + i] = active[consts + i] or body.outputs[i] in depends
        if grown == active:
            return active
        active = grown


def _cut(
    forward: Sequence[Operation],
    backward: Sequence[Operation],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    held: set[Tensor],
) -> tuple[list[Tensor], list[Operation]]:
    """Decides what the backward body reads, and which forward operations it repeats.

    A tensor is computed again where its operation is cheap and this reads fewer bytes: where its
    operands are read anyway, are at hand (`held`: consts and slices), come from nothing, or are
    smaller together than itself.

    Returns:
        The tensors to read, in order of definition, and the operations to repeat.
    """
    maker = {t: op for op in forward for t in op.outputs}
    order = {t: i for i, t in enumerate([*inputs, *maker])}
    read = {t for op in backward for t in op.inputs} | set(outputs)
    read &= order.keys()
    free: set[Tensor] = set()  # what cheap operations make of nothing
    for op in forward:
        if op.name in _CHEAP and all(t in free for t in op.inputs):
            free.update(op.outputs)
    again: set[Tensor] = set()
    for tensor in sorted(maker, key=lambda t: -order[t]):
        if tensor not in read or maker[tensor].name not in _CHEAP:
            continue
        missing = {t for t in maker[tensor].inputs if not (t in read or t in held or t in free)}
        if sum(t.bytes for t in missing) < tensor.bytes:
            again.add(tensor)
            read.discard(tensor)
            read.update(maker[tensor].inputs)
    operations = [op for op in forward if op.outputs[0] in again]
    return sorted(read, key=lambda t: order[t]), operations
