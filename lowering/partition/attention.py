"""Partition rules of attention: every dim can stay split but the contracted features.

An axis may split a dim of the queries (shared with the keys, or their own, such as the length) or
of the value features; then everything is local. It may split the memory: then each device attends
to its part, and the results are weighed by the log-sum-exp of their scores and added up. Where a
layout splits several of these over one axis, or the features, whichever moves fewest bytes is done;
the axis may also go to another dim of the queries. What several devices attend to, or with, gets
summands of its gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from meshdsl.dims import Shape
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.builder import INT32, BlockBuilder
from meshdsl.lowering.partition.einsum import FLOPS_PER_WIRE_BYTE
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value
from meshdsl.lowering.reshard import reshard_cost
from meshdsl.mesh import Mesh

Splits = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Attended:
    """The shapes of queries, keys, values and result, and the layouts that the rules give them."""

    shapes: tuple[Shape, Shape, Shape, Shape]
    layouts: tuple[TensorLayout, TensorLayout, TensorLayout, TensorLayout]
    itemsize: int
    memory: str
    features: str
    mesh: Mesh

    @property
    def queries(self) -> Shape:
        return self.shapes[0].without([self.features])

    @property
    def values(self) -> Shape:
        return self.shapes[3].without(self.queries.names)

    def local(self, which: int) -> tuple[str, ...]:
        """Returns the dims that can stay split: of queries (0), keys, values or the result (3)."""
        memory = (self.memory,) if which in (1, 2) and self.memory_divides else ()
        values = self.values.names if which >= 2 else ()
        return (*self.queries.names, *values, *memory)

    @property
    def memory_divides(self) -> bool:
        """Whether shards of the memory have no pads, which would have to be hidden."""
        size = self.shapes[1].get(self.memory).size
        return size % self.mesh.extent(self.layouts[1].axes(self.memory)) == 0

    def ends(self, splits: Splits) -> tuple[TensorLayout, ...]:
        """Returns the layouts of queries, keys, values and result, given what is split."""
        found = [
            TensorLayout.of(
                {d: a for d, a in splits.items() if d in self.local(i) and shape.find(d)}
            )
            for i, shape in enumerate(self.shapes)
        ]
        return (*found[:3], found[3].add_partial(splits.get(self.memory, ())))


@lru_cache(maxsize=1 << 14)
def choose(problem: Attended) -> Splits:
    """Returns the axes that split each dim of the result."""
    axes = [axis for axis in problem.mesh.names if _candidates(problem, axis)]
    found = []
    for dims in itertools.product(*(_candidates(problem, axis) for axis in axes)):
        splits: Splits = {}
        for axis, dim in zip(axes, dims, strict=True):
            if dim is not None:
                splits[dim] = (*splits.get(dim, ()), axis)
        found.append({dim: _ordered(problem, dim, held) for dim, held in splits.items()})
    return min(found, key=lambda splits: _cost(problem, splits))


def _candidates(problem: Attended, axis: str) -> list[str | None]:
    """Returns the dims that an axis may split: the one it splits already, if everybody agrees.

    Otherwise it may as well split any other dim of the queries that it divides evenly.
    """
    split = [layout.dim_of(axis) for layout in problem.layouts]
    kept = dict.fromkeys(d for i in (3, 0, 1, 2) if (d := split[i]) and d in problem.local(i))
    if len(kept) == 1 and problem.memory not in kept:
        (dim,) = kept
        have = [i for i in range(4) if problem.shapes[i].find(dim) and dim in problem.local(i)]
        if all(split[i] == (dim if i in have else None) for i in range(4)):
            return [dim]
    if not any(split):
        return []
    even = [d.name for d in problem.queries if d.size % problem.mesh.sizes[axis] == 0]
    return [*dict.fromkeys([*kept, *even]), None]


def _ordered(problem: Attended, dim: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    for layout in (problem.layouts[3], *problem.layouts[:3]):
        if set(layout.axes(dim)) >= set(axes):
            return tuple(sorted(axes, key=layout.axes(dim).index))
    return axes


def _cost(problem: Attended, splits: Splits) -> float:
    size, mesh = problem.itemsize, problem.mesh
    ends = problem.ends(splits)
    tensors = list(zip(problem.shapes, problem.layouts, ends, strict=True))
    wire = sum(reshard_cost(shape, size, have, take, mesh) for shape, have, take in tensors[:3])
    shape, have, left = tensors[3]
    wire += reshard_cost(shape, size, left, have, mesh)
    rows = ends[3].local(problem.queries, mesh).volume
    features = problem.shapes[0].get(problem.features).size
    wide = features + ends[3].local(problem.values, mesh).volume
    columns = ends[1].local(problem.shapes[1], mesh).get(problem.memory).size
    flops = 2.0 * rows * columns * wide
    return wire + flops / FLOPS_PER_WIRE_BYTE


def _problem(case: Case, result: TensorLayout) -> Attended:
    op = case.operation
    q, k, v = op.inputs[:3]
    memory, features = op.params["memory"], op.params["features"]
    queries = q.shape.without([features])
    out = Shape([*queries, *v.shape.without([memory, *queries.names])])
    return Attended(
        (q.shape, k.shape, v.shape, out),
        (*case.operands[:3], result),  # type: ignore[arg-type]
        q.dtype.itemsize,
        memory,
        features,
        case.mesh,
    )


def _operands(case: Case, problem: Attended, splits: Splits) -> list[TensorLayout]:
    """Returns the layouts of queries, keys, values and masks."""
    may = (*problem.queries.names, problem.memory)
    scores = TensorLayout.of({dim: axes for dim, axes in splits.items() if dim in may})
    count = 3 + len(case.operation.params["given"])
    masks = [scores.restrict(t.shape.names) for t in case.operation.inputs[3:count]]
    return [*problem.ends(splits)[:3], *masks]


def _add_positions(
    builder: BlockBuilder, inputs: Sequence[Value], params: dict, problem: Attended, splits: Splits
) -> tuple[list[Value], dict]:
    """Adds the positions of a split length or memory, which each device counts from elsewhere."""
    given, masks = [*params["given"]], [*inputs[3:]]
    if not params["causal"] and params["window"] is None:
        return list(inputs), params
    memory = problem.shapes[1].get(problem.memory)
    if (axes := splits.get(memory.name, ())) and "memory_positions" not in given:
        given.append("memory_positions")
        masks.append(builder.positions(memory, axes))
    if (axes := splits.get(params["length"], ())) and "positions" not in given:
        dim = problem.queries.get(params["length"])
        index = builder.positions(dim, axes)
        if params["offset"]:
            start = builder.number(params["offset"], INT32)
            index = builder.one("add", (index, start), Shape([dim]), INT32, index.layout)
        given.append("positions")
        masks.append(index)
    return [*inputs[:3], *masks], {**params, "given": tuple(given)}


def attention(case: Case) -> Plan:
    """Local for every split dim of queries and value features; parts of the memory are merged."""
    op = case.operation
    problem = _problem(case, case.results[0])
    splits = choose(problem)
    operands = _operands(case, problem, splits)
    left = problem.ends(splits)[3]
    sums = left.complete().restrict(problem.queries.names)
    parts = splits.get(problem.memory, ())

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        given, params = _add_positions(builder, inputs, dict(op.params), problem, splits)
        kinds = [at.complete().add_partial(parts, "varying") for at in (left, sums)]
        results = [(t.shape, t.dtype, at) for t, at in zip(op.outputs, kinds, strict=True)]
        mixed, part = builder.add("attention", given, results, params)
        return _merged(builder, mixed, part, parts, left) if parts else (mixed, part)

    used = frozenset(axis for axes in splits.values() for axis in axes)
    return Plan(tuple(operands), (left, sums), emit, fixed=used)


def _merged(
    builder: BlockBuilder, mixed: Value, part: Value, axes: Sequence[str], left: TensorLayout
) -> tuple[Value, Value]:
    """Weighs the results of parts of the memory as summands of the whole's.

    Args:
        part: the log-sum-exp of each part's scores.

    Returns:
        The summands, and the log-sum-exp of all scores.
    """
    shape, dtype, each = part.shape, part.dtype, part.layout
    whole = each.drop(axes)

    def reduced(value: Value, kind: str) -> Value:
        return builder.one("all_reduce", (value,), shape, dtype, whole, axes=tuple(axes), kind=kind)

    def one(name: str, *operands: Value) -> Value:
        layout = each if any(v.layout == each for v in operands) else whole
        return builder.one(name, operands, shape, dtype, layout)

    largest = reduced(part, "max")
    total = reduced(one("exp", one("subtract", part, largest)), "sum")
    sums = one("add", one("log", total), largest)
    weight = one("exp", one("subtract", part, sums))
    wide = builder.one("cast", (mixed,), mixed.shape, dtype, mixed.layout)
    weighed = builder.one("multiply", (wide, weight), mixed.shape, dtype, left)
    return builder.one("cast", (weighed,), mixed.shape, mixed.dtype, left), sums


def attention_gradient(case: Case) -> Plan:
    """Local likewise; what lacks a split dim gets summands of its gradient.

    Split value features leave summands of everything but the gradient of the values. Queries in
    pads would be summed with the others and are therefore made to count for nothing. Parts of the
    memory know the log-sum-exp of all scores, and so need nothing of each other.
    """
    op = case.operation
    problem = _problem(case, case.operands[-1])
    splits = choose(problem)
    operands = _operands(case, problem, splits)
    out = problem.ends(splits)[3].complete()
    sums = out.restrict(problem.queries.names)
    count = len(operands)
    targets = [0, 1, 2]
    if op.params["bias_gradient"]:
        targets.append(3 + op.params["given"].index("bias"))
    results = tuple(
        operands[i].add_partial(_summed(problem, splits, op.inputs[i].shape, i == 2))
        for i in targets
    )
    lacking = [
        d for d in problem.queries.names if any(d not in op.inputs[i].shape.names for i in targets)
    ]
    mixed = {i: [*lacking] for i in range(len(op.inputs))}
    for i in (2, count, count + 2):
        mixed[i] += problem.values.names

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        clean = [
            builder.mask_pads(v, [d for d in mixed[i] if v.shape.find(d)], 0)
            for i, v in enumerate(inputs)
        ]
        start, ends = clean[:count], clean[count:]
        given, params = _add_positions(builder, start, dict(op.params), problem, splits)
        left = [(t.shape, t.dtype, at) for t, at in zip(op.outputs, results, strict=True)]
        return builder.add("attention_gradient", [*given, *ends], left, params)

    used = frozenset(axis for axes in splits.values() for axis in axes)
    return Plan((*operands, out, sums, out), results, emit, fixed=used)


def _summed(problem: Attended, splits: Splits, shape: Shape, of_values: bool) -> list[str]:
    """Returns the axes over which a gradient of that shape is left in summands."""
    values = problem.values.names if of_values else ()
    kept = {*problem.queries.names, problem.memory, *values} & {*shape.names}
    return [axis for dim, axes in splits.items() if dim not in kept for axis in axes]


RULES = {"attention": attention, "attention_gradient": attention_gradient}
