"""Divisions: which axes split which dims of an attention, and what this sends and computes.

- An axis may split a dim of the queries (shared with the keys, or their own, such as the length) or
  of the value features. Then the computation is local.
- It may split the memory. Then each device attends to its part, and the results are weighed by the
  log-sum-exp of their scores and added up.
- It may split both a dim of the queries' own and the memory. Then keys and values travel around a
  ring (`ring`).

Operands that several devices use get partial sums as gradients. The contracted features are never
split.
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
from meshdsl.lowering.communication.reshard import cost_of_sending, reshard_cost
from meshdsl.lowering.options import Context, dtype_of_sums
from meshdsl.lowering.partition.attention.schedule import Sight, schedule
from meshdsl.lowering.partition.attention.zigzag import Zigzag
from meshdsl.lowering.partition.strategy import Case, Work
from meshdsl.tensors.dims import Dimension, Shape

# A ring is preferred if it sends at most this many times the bytes of others: it needs less memory.
_NEAR = 1.02


class AxisUse(NamedTuple):
    """The dim that an axis splits, and whether it splits the memory as well."""

    dim: str
    ring: bool = False


@dataclass(frozen=True)
class Division:
    """The axes that split each dim; those of `ring` split a dim of the queries and the memory."""

    splits: Mapping[str, tuple[str, ...]]
    ring: tuple[str, ...] = ()

    def over(self, axes_of: str, ring: bool = False) -> tuple[str, ...]:
        """Returns the axes of a dim that are in the ring, or those that are not."""
        return tuple(a for a in self.splits.get(axes_of, ()) if (a in self.ring) is ring)


@dataclass(frozen=True)
class Attended:
    """The facts about an attention on which its divisions depend.

    Attributes:
        shapes, layouts: of queries, keys, values and result; layouts by the layout rules.
        itemsize, size_of_sums: the bytes of an element, and of one of a partial sum.
        offset: of the first query's position; None if positions are tensors.
        fixed: the dims of the queries that a mask of the memory has too.
        readers: how many operations of the block read the same operands.
    """

    shapes: tuple[Shape, Shape, Shape, Shape]
    layouts: tuple[TensorLayout, TensorLayout, TensorLayout, TensorLayout]
    itemsize: int
    size_of_sums: int
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

    def layout(self, division: Division, which: int) -> TensorLayout:
        """Returns the layout that a division needs of an operand, or gives to the result."""
        dims = [d for d in self.local(which) if self.shapes[which].find(d)]
        split = TensorLayout.of({d: division.splits.get(d, ()) for d in dims})
        return split.add_partial(division.over(self.memory)) if which == 3 else split

    def order(self, division: Division) -> Zigzag | None:
        """Returns the zigzag order of a ring's queries and memory, or None."""
        length = self.queries.find(self.length)
        around = [division.splits.get(dim) == division.ring for dim in (self.length, self.memory)]
        alike = length is not None and length.size == self.columns.size and all(around)
        one_sided = self.causal and self.window is None and self.offset == 0
        if not (self.zigzag and division.ring and alike and one_sided):
            return None
        return Zigzag(self.queries.get(self.length), self.columns, division.ring, self.mesh)

    def sight(self, division: Division) -> Sight:
        """Returns what is known of the positions that each device of a ring attends to."""
        axes = division.splits[self.memory]
        block = -(-self.columns.size // self.mesh.extent(axes))
        rows = None
        if axes != division.ring:  # the ring is one of several, which differ
            columns = [Interval(0, block)] * self.mesh.extent(division.ring)
        else:
            columns = bounds(self.columns.size, axes, self.mesh)
            if division.splits.get(self.length) == division.ring and self.offset is not None:
                queries = bounds(self.queries.get(self.length).size, axes, self.mesh)
                rows = tuple(Interval(a + self.offset, b + self.offset) for a, b in queries)
        return Sight(self.causal, self.window, tuple(columns), block, rows)


@lru_cache(maxsize=1 << 14)
def offered(problem: Attended) -> tuple[list[Division], list[Work]]:
    """Returns the divisions that `Options.context` selects, or all, and what each costs."""
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
    """Returns the divisions that `Options.context` selects."""
    split = [a for layout in problem.layouts[1:3] for a in layout.axes(problem.memory)]
    if problem.context == "auto" or problem.mesh.extent(split) == 1:
        return []
    divisions = _divisions(problem)
    if problem.context == "ring":
        most = max(len(division.ring) for division in divisions)
        return [division for division in divisions if len(division.ring) == most > 0]
    if problem.context == "sums":
        return [
            division
            for division in divisions
            if division.over(problem.memory) and not division.ring
        ]
    return [c for c in divisions if not {*split} & problem.layout(c, 1).split_axes]


@lru_cache(maxsize=1 << 14)
def _divisions(problem: Attended) -> list[Division]:
    axes = [axis for axis in problem.mesh.names if _candidates(problem, axis)]
    divisions = []
    for uses in itertools.product(*(_candidates(problem, axis) for axis in axes)):
        splits: dict[str, tuple[str, ...]] = {}
        for axis, use in zip(axes, uses, strict=True):
            if use is not None:
                for dim in (use.dim, problem.memory) if use.ring else (use.dim,):
                    splits[dim] = (*splits.get(dim, ()), axis)
        ordered = {dim: _ordered(problem, dim, of_dim) for dim, of_dim in splits.items()}
        ring = [axis for axis, use in zip(axes, uses, strict=True) if use and use.ring]
        memory = ordered.get(problem.memory, ())
        divisions.append(Division(ordered, tuple(axis for axis in memory if axis in ring)))
    return divisions


def _candidates(problem: Attended, axis: str) -> list[AxisUse | None]:
    """Returns the dims that an axis may split: the one it splits already if all tensors agree.

    Otherwise it may also split any other dim of the queries that it divides evenly, or both a dim
    of the queries and the memory.
    """
    split = [layout.dim_of(axis) for layout in problem.layouts]
    dims = dict.fromkeys(d for i in (3, 0, 1, 2) if (d := split[i]) and d in problem.local(i))
    if len(dims) == 1 and problem.memory not in dims:
        (dim,) = dims
        have = [i for i in range(4) if problem.shapes[i].find(dim) and dim in problem.local(i)]
        if all(split[i] == (dim if i in have else None) for i in range(4)):
            return [AxisUse(dim)]
    if not any(split):
        return []
    size = problem.mesh.sizes[axis]
    rings = []
    if problem.memory in dims and size > 1:
        rings = [AxisUse(dim, True) for dim in dims if dim in problem.own]
    even = [d.name for d in problem.queries if d.size % size == 0]
    return [*rings, *(AxisUse(dim) for dim in dict.fromkeys([*dims, *even])), None]


def _ordered(problem: Attended, dim: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    for layout in (problem.layouts[3], *problem.layouts[:3]):
        if set(layout.axes(dim)) >= set(axes):
            return tuple(sorted(axes, key=layout.axes(dim).index))
    return axes


def _work(problem: Attended, division: Division) -> Work:
    """Returns what one device sends and computes in a division."""
    size, wide_size, mesh = problem.itemsize, problem.size_of_sums, problem.mesh
    layouts = [problem.layout(division, which) for which in range(4)]
    tensors = list(zip(problem.shapes, problem.layouts, layouts, strict=True))
    *_, (shape, have, left) = tensors
    wire = sum(reshard_cost(shape, size, have, take, mesh) for shape, have, take in tensors[:3])
    wire /= problem.readers
    if problem.gradient:
        moved = 1 if problem.readers > 1 else 2  # the result is still where it was computed
        wire += moved * reshard_cost(shape, size, have, left.complete(), mesh)
        for which, (shape, have, take) in enumerate(tensors[:3]):
            summands = take.add_partial(summed(problem, division, shape, which == 2))
            each = wide_size if summands.partial else size
            wire += reshard_cost(shape, each, summands, have, mesh)
    else:
        wire += reshard_cost(shape, wide_size if left.partial else size, left, have, mesh)
    blocks = 1
    if division.ring:
        steps = schedule(problem.sight(division))
        elements = sum(layouts[i].local(problem.shapes[i], mesh).volume for i in (1, 2))

        def hop(sent: float) -> float:
            return cost_of_sending("permute", sent, division.ring, mesh)

        sent = elements * size
        wire += steps.hops * hop(sent)
        if problem.gradient:
            wire += steps.hops * hop(elements * wide_size)
        starts = bool(steps.ahead) + bool(steps.behind)  # first moves are those of all readers
        wire -= starts * (hop(sent) - hop(sent / problem.readers))
        blocks = sum(step.way != "none" for step in steps.steps)
    rows = layouts[3].local(problem.queries, mesh).volume
    features = problem.shapes[0].get(problem.features).size
    wide = features + layouts[3].local(problem.values, mesh).volume
    columns = blocks * layouts[1].local(problem.shapes[1], mesh).get(problem.memory).size
    flops = (5.0 if problem.gradient else 2.0) * rows * columns * wide
    return Work(wire, flops)


def summed(problem: Attended, division: Division, shape: Shape, of_values: bool) -> list[str]:
    """Returns the axes over which a gradient of that shape is a partial sum.

    Along a ring, a gradient that has the memory visits every device, and one that has a dim of the
    queries meets every block: both are complete. A gradient that has neither is a partial sum.
    """
    values = problem.values.names if of_values else ()
    owned = {*problem.queries.names, problem.memory, *values} & {*shape.names}
    complete = {a for dim in owned for a in division.splits.get(dim, ()) if a in division.ring}
    axes = [axis for dim, of_dim in division.splits.items() if dim not in owned for axis in of_dim]
    return [axis for axis in dict.fromkeys(axes) if axis not in complete]


def problem_of(case: Case, result: TensorLayout) -> Attended:
    """Returns what the divisions of an attention, or of its gradient, depend on."""
    op, params = case.operation, case.operation.params
    q, k, v = op.inputs[:3]
    memory, features, masked = params["memory"], params["features"], params["given"]
    queries = q.shape.without([features])
    out = Shape([*queries, *v.shape.without([memory, *queries.names])])
    masks = [mask.shape for mask in op.inputs[3 : 3 + len(masked)] if mask.shape.find(memory)]
    return Attended(
        (q.shape, k.shape, v.shape, out),
        (*case.operands[:3], result),  # type: ignore[arg-type]
        q.dtype.itemsize,
        dtype_of_sums(q.dtype, case.options).itemsize,
        memory,
        features,
        case.mesh,
        params["length"],
        params["causal"],
        params["window"],
        None if {"positions", "memory_positions"} & {*masked} else params["offset"],
        frozenset(name for shape in masks for name in shape.names if name != memory),
        op.name == "attention_gradient",
        case.readers,
        case.options.context,
        case.options.zigzag,
    )
