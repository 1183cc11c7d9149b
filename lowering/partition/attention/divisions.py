"""Divisions: which axes split what of an attention, and what each division sends and computes.

An axis may split a dim of the queries (shared with the keys, or their own, such as the length) or
of the value features; then everything is local. It may split the memory: then each device attends
to its part, and the results are weighed by the log-sum-exp of their scores and added up. Where it
splits both a dim of the queries' own and the memory, keys and values travel around a ring
(`ring`). What several devices attend to, or with, gets summands of its gradient. Only the
contracted features are never split.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.exchange import Interval, bounds
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.options import Context
from meshdsl.lowering.partition.attention.schedule import Sight, schedule
from meshdsl.lowering.partition.attention.zigzag import Zigzag
from meshdsl.lowering.partition.strategy import Case, Work
from meshdsl.tensors.dims import Dimension, Shape

# A ring is taken where it sends at most this much more than what else there is: it holds less.
_NEAR = 1.02


class Taken(NamedTuple):
    """The dim that an axis splits, and whether it splits the memory as well."""

    dim: str
    ring: bool = False


@dataclass(frozen=True)
class Division:
    """The axes that split each dim; those of the `ring` split one of the queries and the memory."""

    splits: Mapping[str, tuple[str, ...]]
    ring: tuple[str, ...] = ()

    def over(self, axes_of: str, ring: bool = False) -> tuple[str, ...]:
        """Returns the axes of a dim that are of the ring, or that are not."""
        return tuple(a for a in self.splits.get(axes_of, ()) if (a in self.ring) is ring)


@dataclass(frozen=True)
class Attended:
    """An attention, as far as its divisions depend on it.

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

    def end(self, division: Division, which: int) -> TensorLayout:
        """Returns the layout in which one of the four is taken or left."""
        dims = [d for d in self.local(which) if self.shapes[which].find(d)]
        layout = TensorLayout.of({d: division.splits.get(d, ()) for d in dims})
        return layout.add_partial(division.over(self.memory)) if which == 3 else layout

    def order(self, division: Division) -> Zigzag | None:
        """Returns the order in which a ring deals out queries and memory, if it does."""
        length = self.queries.find(self.length)
        held = [division.splits.get(dim) == division.ring for dim in (self.length, self.memory)]
        alike = length is not None and length.size == self.columns.size and all(held)
        one_sided = self.causal and self.window is None and self.offset == 0
        if not (self.zigzag and division.ring and alike and one_sided):
            return None
        return Zigzag(self.queries.get(self.length), self.columns, division.ring, self.mesh)

    def sight(self, division: Division) -> Sight:
        """Returns what is known of who sees what in a ring."""
        held = division.splits[self.memory]
        block = -(-self.columns.size // self.mesh.extent(held))
        rows = None
        if held != division.ring:  # the ring is one of several, which differ
            columns = [Interval(0, block)] * self.mesh.extent(division.ring)
        else:
            columns = bounds(self.columns.size, held, self.mesh)
            if division.splits.get(self.length) == division.ring and self.offset is not None:
                found = bounds(self.queries.get(self.length).size, held, self.mesh)
                rows = tuple(Interval(a + self.offset, b + self.offset) for a, b in found)
        return Sight(self.causal, self.window, tuple(columns), block, rows)


@lru_cache(maxsize=1 << 14)
def offered(problem: Attended) -> tuple[list[Division], list[Work]]:
    """Returns the divisions that `Options.context` asks for, else all, and what each costs."""
    passes = [problem]
    if problem.readers > 1:  # both passes stand beside each other, and share what they move
        passes = [replace(problem, gradient=gradient) for gradient in (False, True)]
    divisions = wanted(problem) or _divisions(problem)
    work = []
    for division in divisions:
        each = [_work(one, division) for one in passes]
        favour = _NEAR if division.ring else 1.0
        work.append(Work(sum(w.sends for w in each), sum(w.flops for w in each), favour))
    return divisions, work


def wanted(problem: Attended) -> list[Division]:
    """Returns the divisions that `Options.context` asks for."""
    split = [a for layout in problem.layouts[1:3] for a in layout.axes(problem.memory)]
    if problem.context == "auto" or problem.mesh.extent(split) == 1:
        return []
    found = _divisions(problem)
    if problem.context == "ring":
        most = max(len(division.ring) for division in found)
        return [division for division in found if len(division.ring) == most > 0]
    if problem.context == "sums":
        return [
            division for division in found if division.over(problem.memory) and not division.ring
        ]
    return [c for c in found if not {*split} & problem.end(c, 1).split_axes]


@lru_cache(maxsize=1 << 14)
def _divisions(problem: Attended) -> list[Division]:
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
        found.append(Division(ordered, tuple(axis for axis in memory if axis in ring)))
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


def _work(problem: Attended, division: Division) -> Work:
    """Returns what one device sends and computes by a division."""
    size, mesh = problem.itemsize, problem.mesh
    ends = [problem.end(division, which) for which in range(4)]
    tensors = list(zip(problem.shapes, problem.layouts, ends, strict=True))
    *_, (shape, have, left) = tensors
    wire = sum(reshard_cost(shape, size, have, take, mesh) for shape, have, take in tensors[:3])
    wire /= problem.readers
    if problem.gradient:
        moved = 1 if problem.readers > 1 else 2  # the result is still where it was computed
        wire += moved * reshard_cost(shape, size, have, left.complete(), mesh)
        for which, (shape, have, take) in enumerate(tensors[:3]):
            summands = take.add_partial(summed(problem, division, shape, which == 2))
            wire += reshard_cost(shape, size, summands, have, mesh)
    else:
        wire += reshard_cost(shape, size, left, have, mesh)
    blocks = 1
    if division.ring:
        steps = schedule(problem.sight(division))
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
    return Work(wire, flops)


def summed(problem: Attended, division: Division, shape: Shape, of_values: bool) -> list[str]:
    """Returns the axes over which a gradient of that shape is left in summands.

    Along a ring, what has the memory goes to every device, and what has a dim of the queries meets
    every block; only what has neither is left in summands.
    """
    values = problem.values.names if of_values else ()
    kept = {*problem.queries.names, problem.memory, *values} & {*shape.names}
    whole = {a for dim in kept for a in division.splits.get(dim, ()) if a in division.ring}
    axes = [axis for dim, held in division.splits.items() if dim not in kept for axis in held]
    return [axis for axis in dict.fromkeys(axes) if axis not in whole]


def problem_of(case: Case, result: TensorLayout) -> Attended:
    """Returns what the divisions of an attention, or of its gradient, depend on."""
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
        case.readers,
        case.options.context,
        case.options.zigzag,
    )
