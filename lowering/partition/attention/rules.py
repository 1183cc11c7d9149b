"""Partition rules of attention: every dim can stay split but the contracted features.

An axis may split a dim of the queries (shared with the keys, or their own, such as the length) or
of the value features; then everything is local. It may split the memory: then each device attends
to its part, and the results are weighed by the log-sum-exp of their scores and added up. Where it
splits both a dim of the queries' own and the memory, keys and values travel around a ring
(`ring`). Which of these is done where a layout leaves the choice is said in
`choose`. What several devices attend to, or with, gets summands of its
gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.exchange import Interval, bounds
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.options import Context
from meshdsl.lowering.partition.attention.operands import (
    Operands,
    Result,
    cast,
    for_parts,
    for_ring,
    sized,
    whole_of,
)
from meshdsl.lowering.partition.attention.ring import Kept, Ring, added, merged
from meshdsl.lowering.partition.attention.schedule import Sight, schedule
from meshdsl.lowering.partition.attention.zigzag import Zigzag, dealt
from meshdsl.lowering.partition.einsum import FLOPS_PER_WIRE_BYTE
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tracing.graph import Operation

# A ring is taken where it sends at most this much more than what else there is: it holds less.
_NEAR = 1.02


class Taken(NamedTuple):
    """The dim that an axis splits, and whether it splits the memory as well."""

    dim: str
    ring: bool = False


@dataclass(frozen=True)
class Strategy:
    """The axes that split each dim; those of the `ring` split one of the queries and the memory."""

    splits: Mapping[str, tuple[str, ...]]
    ring: tuple[str, ...] = ()

    def over(self, axes_of: str, ring: bool = False) -> tuple[str, ...]:
        """Returns the axes of a dim that are of the ring, or that are not."""
        return tuple(a for a in self.splits.get(axes_of, ()) if (a in self.ring) is ring)


@dataclass(frozen=True)
class Attended:
    """An attention, as far as the choice of its plan depends on it.

    Attributes:
        shapes, layouts: of queries, keys, values and result, and what the layout rules give them.
        offset: of the first query's position; None: positions are tensors.
        fixed: the dims of the queries that are masked together with the memory.
        readers: how many operations of the block read the same operands, where these are.
    """

    shapes: tuple[Shape, Shape, Shape, Shape]
    layouts: tuple[TensorLayout, TensorLayout, TensorLayout, TensorLayout]
    itemsize: int
    memory: str
    features: str
    mesh: Mesh
    length: str = ""
    causal: bool = False
    window: int | None = None
    offset: int | None = 0
    fixed: frozenset[str] = frozenset()
    gradient: bool = False
    readers: int = 1
    context: Context = "auto"
    zigzag: bool = False

    @property
    def queries(self) -> Shape:
        return self.shapes[0].without([self.features])

    @property
    def values(self) -> Shape:
        return self.shapes[3].without(self.queries.names)

    @property
    def columns(self) -> Dimension:
        return self.shapes[1].get(self.memory)

    @property
    def own(self) -> list[str]:
        """The dims of the queries that keys, values and masks of the memory lack."""
        shared = {*self.shapes[1].names, *self.shapes[2].names, *self.fixed}
        return [name for name in self.queries.names if name not in shared]

    def local(self, which: int) -> tuple[str, ...]:
        """Returns the dims that can stay split: of queries (0), keys, values or the result (3)."""
        memory = (self.memory,) if which in (1, 2) else ()
        values = self.values.names if which >= 2 else ()
        return (*self.queries.names, *values, *memory)

    def end(self, choice: Strategy, which: int) -> TensorLayout:
        """Returns the layout in which one of the four is taken or left."""
        dims = [d for d in self.local(which) if self.shapes[which].find(d)]
        layout = TensorLayout.of({d: choice.splits.get(d, ()) for d in dims})
        return layout.add_partial(choice.over(self.memory)) if which == 3 else layout

    def order(self, choice: Strategy) -> Zigzag | None:
        """Returns the order in which a ring deals out queries and memory, if it does."""
        length = self.queries.find(self.length)
        held = [choice.splits.get(dim) == choice.ring for dim in (self.length, self.memory)]
        alike = length is not None and length.size == self.columns.size and all(held)
        one_sided = self.causal and self.window is None and self.offset == 0
        if not (self.zigzag and choice.ring and alike and one_sided):
            return None
        return Zigzag(self.queries.get(self.length), self.columns, choice.ring, self.mesh)

    def sight(self, choice: Strategy) -> Sight:
        """Returns what is known of who sees what in a ring."""
        held = choice.splits[self.memory]
        block = -(-self.columns.size // self.mesh.extent(held))
        rows = None
        if held != choice.ring:  # the ring is one of several, which differ
            columns = [Interval(0, block)] * self.mesh.extent(choice.ring)
        else:
            columns = bounds(self.columns.size, held, self.mesh)
            if choice.splits.get(self.length) == choice.ring and self.offset is not None:
                found = bounds(self.queries.get(self.length).size, held, self.mesh)
                rows = tuple(Interval(a + self.offset, b + self.offset) for a, b in found)
        return Sight(self.causal, self.window, tuple(columns), block, rows)


@lru_cache(maxsize=1 << 14)
def choose(problem: Attended) -> Strategy:
    """Returns the axes that split each dim of the result, and those of the memory.

    It is the choice that `Options.context` asks for, where there is one, and of those the one that
    sends the fewest bytes, with a ring before what sends as many.
    """
    passes = [problem]
    if problem.readers > 1:  # both passes stand beside each other, and share what they move
        passes = [replace(problem, gradient=gradient) for gradient in (False, True)]
    return min(
        _wanted(problem) or _choices(problem),
        key=lambda choice: sum(_cost(one, choice) for one in passes),
    )


def _wanted(problem: Attended) -> list[Strategy]:
    """Returns the choices that `Options.context` asks for."""
    split = [a for layout in problem.layouts[1:3] for a in layout.axes(problem.memory)]
    if problem.context == "auto" or problem.mesh.extent(split) == 1:
        return []
    found = _choices(problem)
    if problem.context == "ring":
        most = max(len(choice.ring) for choice in found)
        return [choice for choice in found if len(choice.ring) == most > 0]
    if problem.context == "sums":
        return [choice for choice in found if choice.over(problem.memory) and not choice.ring]
    return [c for c in found if not {*split} & problem.end(c, 1).split_axes]


@lru_cache(maxsize=1 << 14)
def _choices(problem: Attended) -> list[Strategy]:
    axes = [axis for axis in problem.mesh.names if _candidates(problem, axis)]
    found = []
    for taken in itertools.product(*(_candidates(problem, axis) for axis in axes)):
        splits: dict[str, tuple[str, ...]] = {}
        for axis, one in zip(axes, taken, strict=True):
            if one is not None:
                for dim in (one.dim, problem.memory) if one.ring else (one.dim,):
                    splits[dim] = (*splits.get(dim, ()), axis)
        ordered = {dim: _ordered(problem, dim, held) for dim, held in splits.items()}
        ring = [axis for axis, one in zip(axes, taken, strict=True) if one and one.ring]
        memory = ordered.get(problem.memory, ())
        found.append(Strategy(ordered, tuple(axis for axis in memory if axis in ring)))
    return found


def _candidates(problem: Attended, axis: str) -> list[Taken | None]:
    """Returns the dims that an axis may split: the one it splits already, if everybody agrees.

    Otherwise it may as well split any other dim of the queries that it divides evenly, or go on to
    split both a dim of the queries and the memory.
    """
    split = [layout.dim_of(axis) for layout in problem.layouts]
    kept = dict.fromkeys(d for i in (3, 0, 1, 2) if (d := split[i]) and d in problem.local(i))
    if len(kept) == 1 and problem.memory not in kept:
        (dim,) = kept
        have = [i for i in range(4) if problem.shapes[i].find(dim) and dim in problem.local(i)]
        if all(split[i] == (dim if i in have else None) for i in range(4)):
            return [Taken(dim)]
    if not any(split):
        return []
    size = problem.mesh.sizes[axis]
    rings = []
    if problem.memory in kept and size > 1:
        rings = [Taken(dim, True) for dim in kept if dim in problem.own]
    even = [d.name for d in problem.queries if d.size % size == 0]
    return [*rings, *(Taken(dim) for dim in dict.fromkeys([*kept, *even])), None]


def _ordered(problem: Attended, dim: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    for layout in (problem.layouts[3], *problem.layouts[:3]):
        if set(layout.axes(dim)) >= set(axes):
            return tuple(sorted(axes, key=layout.axes(dim).index))
    return axes


def _cost(problem: Attended, choice: Strategy) -> float:
    """Returns what a choice costs, in bytes that one device sends."""
    size, mesh = problem.itemsize, problem.mesh
    ends = [problem.end(choice, which) for which in range(4)]
    tensors = list(zip(problem.shapes, problem.layouts, ends, strict=True))
    *_, (shape, have, left) = tensors
    wire = sum(reshard_cost(shape, size, have, take, mesh) for shape, have, take in tensors[:3])
    wire /= problem.readers
    if problem.gradient:
        moved = 1 if problem.readers > 1 else 2  # the result is still where it was computed
        wire += moved * reshard_cost(shape, size, have, left.complete(), mesh)
        for which, (shape, have, take) in enumerate(tensors[:3]):
            summands = take.add_partial(_summed(problem, choice, shape, which == 2))
            wire += reshard_cost(shape, size, summands, have, mesh)
    else:
        wire += reshard_cost(shape, size, left, have, mesh)
    blocks = 1
    if choice.ring:
        steps = schedule(problem.sight(choice))
        sent = sum(ends[i].local(problem.shapes[i], mesh).volume for i in (1, 2)) * size
        wire += steps.hops * sent * (2 if problem.gradient else 1)
        starts = bool(steps.ahead) + bool(steps.behind)  # first moves are those of all readers
        wire -= starts * sent * (1 - 1 / problem.readers)
        blocks = sum(step.way != "none" for step in steps.steps)
    rows = ends[3].local(problem.queries, mesh).volume
    features = problem.shapes[0].get(problem.features).size
    wide = features + ends[3].local(problem.values, mesh).volume
    columns = blocks * ends[1].local(problem.shapes[1], mesh).get(problem.memory).size
    flops = (5.0 if problem.gradient else 2.0) * rows * columns * wide
    cost = wire + flops / FLOPS_PER_WIRE_BYTE
    return cost / _NEAR if choice.ring else cost


def _summed(problem: Attended, choice: Strategy, shape: Shape, of_values: bool) -> list[str]:
    """Returns the axes over which a gradient of that shape is left in summands.

    Along a ring, what has the memory goes to every device, and what has a dim of the queries meets
    every block; only what has neither is left in summands.
    """
    values = problem.values.names if of_values else ()
    kept = {*problem.queries.names, problem.memory, *values} & {*shape.names}
    whole = {a for dim in kept for a in choice.splits.get(dim, ()) if a in choice.ring}
    axes = [axis for dim, held in choice.splits.items() if dim not in kept for axis in held]
    return [axis for axis in dict.fromkeys(axes) if axis not in whole]


def problem_of(case: Case, result: TensorLayout) -> Attended:
    """Returns what the choice for an attention, or for its gradient, depends on."""
    op, params = case.operation, case.operation.params
    q, k, v = op.inputs[:3]
    memory, features, given = params["memory"], params["features"], params["given"]
    queries = q.shape.without([features])
    out = Shape([*queries, *v.shape.without([memory, *queries.names])])
    masks = [mask.shape for mask in op.inputs[3 : 3 + len(given)] if mask.shape.find(memory)]
    return Attended(
        (q.shape, k.shape, v.shape, out),
        (*case.operands[:3], result),  # type: ignore[arg-type]
        q.dtype.itemsize,
        memory,
        features,
        case.mesh,
        params["length"],
        params["causal"],
        params["window"],
        None if {"positions", "memory_positions"} & {*given} else params["offset"],
        frozenset(name for shape in masks for name in shape.names if name != memory),
        op.name == "attention_gradient",
        _readers(case),
        case.options.context,
        case.options.zigzag,
    )


def unused(cases: Sequence[Case]) -> Iterator[str]:
    """Yields, in words, the options for attention that change nothing in a program that has it."""
    problems = [problem_of(c, c.results[0]) for c in cases if c.operation.name == "attention"]
    if not problems:
        return
    context = problems[0].context
    if context != "auto" and not any(_wanted(problem) for problem in problems):
        need = "an axis that splits the memory of an attention, as in `memory_length:context`"
        if context == "ring":
            need = (
                "an axis that splits both the length and the memory of an attention, as in "
                "`length:context; memory_length:context`"
            )
        yield f"context={context} changes nothing: it needs {need}"
    if problems[0].zigzag and not any(problem.order(choose(problem)) for problem in problems):
        yield (
            "zigzag changes nothing: it needs a causal attention without a window, of a length to "
            "a memory of the same size, that is computed in a ring (context=ring)"
        )


def _readers(case: Case) -> int:
    """Returns how many attentions of a block read the same operands, which are moved once."""
    mine = case.operation.inputs[:3]
    near: Sequence[Operation] = case.block.operations if case.block else ()
    alike = [
        all(one is other for one, other in zip(op.inputs, mine, strict=False))
        for op in near
        if op.name in RULES
    ]
    return max(1, sum(alike))


def _operands(case: Case, problem: Attended, choice: Strategy) -> list[TensorLayout]:
    """Returns the layouts of queries, keys, values and masks."""
    may = (*problem.queries.names, problem.memory)
    count = 3 + len(case.operation.params["given"])
    masks = [
        TensorLayout.of({d: choice.splits.get(d, ()) for d in t.shape.names if d in may})
        for t in case.operation.inputs[3:count]
    ]
    return [*(problem.end(choice, which) for which in range(3)), *masks]


# What is written.


def attention(case: Case) -> Plan:
    """Local for every split dim of queries and value features; parts of the memory are merged."""
    op = case.operation
    problem = problem_of(case, case.results[0])
    choice = choose(problem)
    left = problem.end(choice, 3)
    sums = left.complete().restrict(problem.queries.names)
    parts = choice.over(problem.memory)
    whole, narrow = (t.dtype for t in (op.outputs[1], op.outputs[0]))
    kinds = [at.complete().add_partial(parts, "varying") for at in (left, sums)]
    dtype = whole if choice.ring else narrow
    results = [
        (op.outputs[0].shape, dtype, kinds[0]),
        (op.outputs[1].shape, whole, kinds[1]),
    ]

    order = problem.order(choice)

    def compute(builder: BlockBuilder, given: Operands) -> Kept:
        return Kept(given.attend(builder, "attention", results))

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        values = dict(zip(("q", "k", "v", *op.params["given"]), inputs, strict=True))
        given = Operands(values, op.params)
        if not choice.ring:
            given = for_parts(builder, given, problem, choice)
            mixed, part = compute(builder, given).stay
        elif order is None:
            steps = schedule(problem.sight(choice))
            given = for_ring(builder, given, problem, choice, steps)
            ring = Ring(choice.ring, steps, _moving(problem, given), compute, merged)
            mixed, part = ring.run(builder, given).stay
        else:
            steps, given = dealt(order.devices), order.dealt(builder, given)
            moving = _moving(problem, given)
            ring = Ring(choice.ring, steps, moving, order.forward(results), merged)
            found = zip(ring.run(builder, given).stay, op.outputs, strict=True)
            mixed, part = (order.back(builder, value, t.shape) for value, t in found)
        if parts:
            return whole_of(builder, mixed, part, parts, left, narrow)
        return cast(builder, mixed, narrow), part

    used = frozenset(axis for axes in choice.splits.values() for axis in axes)
    return Plan(tuple(_operands(case, problem, choice)), (left, sums), emit, fixed=used)


def attention_gradient(case: Case) -> Plan:
    """Local likewise; what lacks a split dim gets summands of its gradient.

    Split value features leave summands of everything but the gradient of the values. Queries in
    pads would be summed with the others and are therefore made to count for nothing. Parts of the
    memory know the log-sum-exp of all scores, and so need nothing of each other.
    """
    op = case.operation
    problem = problem_of(case, case.operands[-1])
    choice = choose(problem)
    operands = _operands(case, problem, choice)
    out = problem.end(choice, 3).complete()
    sums = out.restrict(problem.queries.names)
    count = len(operands)
    names = ("q", "k", "v", *op.params["given"])
    targets = [0, 1, 2]
    if op.params["bias_gradient"]:
        targets.append(names.index("bias"))
    results = tuple(
        operands[i].add_partial(_summed(problem, choice, op.inputs[i].shape, i == 2))
        for i in targets
    )
    lacking = [
        d for d in problem.queries.names if any(d not in op.inputs[i].shape.names for i in targets)
    ]
    mixed = {i: [*lacking] for i in range(len(op.inputs))}
    for i in (2, count, count + 2):
        mixed[i] += problem.values.names
    left = [(t.shape, t.dtype, at) for t, at in zip(op.outputs, results, strict=True)]

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        clean = [
            builder.mask_pads(v, [d for d in mixed[i] if v.shape.find(d)], 0)
            for i, v in enumerate(inputs)
        ]
        values = dict(zip(names, clean, strict=False))
        given = Operands(values, op.params, clean[count:])
        if not choice.ring:
            part = bool(choice.over(problem.memory))
            given = for_parts(builder, given, problem, choice)
            given = given if not part else given.of_a_part()
            return given.attend(builder, "attention_gradient", left)
        return _around(builder, given, problem, choice, [names[i] for i in targets], left)

    used = frozenset(axis for axes in choice.splits.values() for axis in axes)
    return Plan((*operands, out, sums, out), results, emit, fixed=used)


def _around(
    builder: BlockBuilder,
    given: Operands,
    problem: Attended,
    choice: Strategy,
    targets: Sequence[str],
    left: Sequence[Result],
) -> list[Value]:
    """Writes the ring of a gradient, and returns the gradients by `targets`."""
    order = problem.order(choice)
    given = given.of_a_part()
    if order is None:
        steps = schedule(problem.sight(choice))
        given = for_ring(builder, given, problem, choice, steps)
    else:
        steps, given = dealt(order.devices), order.dealt(builder, given)
    moving = _moving(problem, given)
    travel = [i for i, name in enumerate(targets) if name in moving]
    stay = [i for i, name in enumerate(targets) if name not in moving]
    wide = given.ends[1].dtype  # of the log-sum-exp
    results = [(given.values[n].shape, wide, at) for n, (*_, at) in zip(targets, left, strict=True)]

    def compute(builder: BlockBuilder, given: Operands) -> Kept:
        found = given.attend(builder, "attention_gradient", results)
        return Kept([found[i] for i in stay], [found[i] for i in travel])

    whole = [(shape, wide, at) for shape, _, at in left]
    step = compute if order is None else order.backward(whole, stay, travel)
    sent = tuple(given.values[targets[i]].dtype for i in travel)
    kept = Ring(choice.ring, steps, moving, step, added, sent).run(builder, given)
    found = dict(zip((*stay, *travel), (*kept.stay, *kept.travel), strict=True))
    axes, ends = choice.splits[problem.memory], []
    for i, (shape, dtype, _) in enumerate(left):
        value = cast(builder, found[i], dtype)
        if order is not None:
            ends.append(order.back(builder, value, shape))
        else:
            ends.append(sized(builder, value, problem.memory, axes, shape))
    return ends


def _moving(problem: Attended, given: Operands) -> tuple[str, ...]:
    """Returns the names of what has the memory, and so travels with it."""
    return tuple(name for name, v in given.values.items() if v.shape.find(problem.memory))


RULES = {"attention": attention, "attention_gradient": attention_gradient}
