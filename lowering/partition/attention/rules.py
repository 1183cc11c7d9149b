"""Partition rules of attention: every dim can stay split but the contracted features.

Each way of splitting the dims (`divisions`) is a strategy; here its instructions are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition.attention.divisions import (
    Attended,
    Division,
    offered,
    problem_of,
    summed,
    wanted,
)
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
from meshdsl.lowering.partition.attention.schedule import schedule
from meshdsl.lowering.partition.attention.zigzag import dealt
from meshdsl.lowering.partition.strategy import Case, Strategies, Strategy, Work
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tracing.graph import Graph, Operation


def unused(cases: Sequence[Case], cheapest: Callable[[Sequence[Work]], int]) -> Iterator[str]:
    """Yields, in words, the options for attention that change nothing in a program that has it.

    Args:
        cheapest: the number of the strategy that is taken.
    """
    problems = [problem_of(c, c.results[0]) for c in cases if c.operation.name == "attention"]
    if not problems:
        return
    context = problems[0].context
    if context != "auto" and not any(wanted(problem) for problem in problems):
        need = "an axis that splits the memory of an attention, as in `memory_length:context`"
        if context == "ring":
            need = (
                "an axis that splits both the length and the memory of an attention, as in "
                "`length:context; memory_length:context`"
            )
        yield f"context={context} changes nothing: it needs {need}"
    taken = []
    for problem in problems if problems[0].zigzag else ():
        divisions, work = offered(problem)
        taken.append((problem, divisions[cheapest(work)]))
    if taken and not any(problem.order(division) for problem, division in taken):
        yield (
            "zigzag changes nothing: it needs a causal attention without a window, of a length to "
            "a memory of the same size, that is computed in a ring (context=ring)"
        )


def readers(block: Graph) -> dict[Operation, int]:
    """Returns, for the attentions of a block, how many of them read the same operands."""
    attentions = [op for op in block.operations if op.name in RULES]
    times = Counter(op.inputs[:3] for op in attentions)
    return {op: times[op.inputs[:3]] for op in attentions}


def _operands(case: Case, problem: Attended, division: Division) -> list[TensorLayout]:
    """Returns the layouts of queries, keys, values and masks."""
    may = (*problem.queries.names, problem.memory)
    count = 3 + len(case.operation.params["given"])
    masks = [
        TensorLayout.of({d: division.splits.get(d, ()) for d in t.shape.names if d in may})
        for t in case.operation.inputs[3:count]
    ]
    return [*(problem.end(division, which) for which in range(3)), *masks]


def attention(case: Case) -> Strategies:
    """Local for every split dim of queries and value features; parts of the memory are merged."""
    problem = problem_of(case, case.results[0])
    divisions, work = offered(problem)
    return Strategies(work, lambda number: _forward(case, problem, divisions[number]))


def _forward(case: Case, problem: Attended, division: Division) -> Strategy:
    op = case.operation
    left = problem.end(division, 3)
    sums = left.complete().restrict(problem.queries.names)
    parts = division.over(problem.memory)
    whole, narrow = (t.dtype for t in (op.outputs[1], op.outputs[0]))
    kinds = [at.complete().add_partial(parts, "varying") for at in (left, sums)]
    dtype = whole if division.ring else narrow
    results = [
        (op.outputs[0].shape, dtype, kinds[0]),
        (op.outputs[1].shape, whole, kinds[1]),
    ]

    order = problem.order(division)

    def compute(builder: BlockBuilder, given: Operands) -> Kept:
        return Kept(given.attend(builder, "attention", results))

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        values = dict(zip(("q", "k", "v", *op.params["given"]), inputs, strict=True))
        given = Operands(values, op.params)
        if not division.ring:
            given = for_parts(builder, given, problem, division)
            mixed, part = compute(builder, given).stay
        elif order is None:
            steps = schedule(problem.sight(division))
            given = for_ring(builder, given, problem, division, steps)
            ring = Ring(division.ring, steps, _moving(problem, given), compute, merged)
            mixed, part = ring.run(builder, given).stay
        else:
            steps, given = dealt(order.devices), order.dealt(builder, given)
            moving = _moving(problem, given)
            ring = Ring(division.ring, steps, moving, order.forward(results), merged)
            found = zip(ring.run(builder, given).stay, op.outputs, strict=True)
            mixed, part = (order.back(builder, value, t.shape) for value, t in found)
        if parts:
            return whole_of(builder, mixed, part, parts, left, narrow)
        return cast(builder, mixed, narrow), part

    used = frozenset(axis for axes in division.splits.values() for axis in axes)
    return Strategy(tuple(_operands(case, problem, division)), (left, sums), emit, fixed=used)


def attention_gradient(case: Case) -> Strategies:
    """Local likewise; what lacks a split dim gets summands of its gradient.

    Split value features leave summands of everything but the gradient of the values. Queries in
    pads would be summed with the others and are therefore made to count for nothing. Parts of the
    memory know the log-sum-exp of all scores, and so need nothing of each other.
    """
    problem = problem_of(case, case.operands[-1])
    divisions, work = offered(problem)
    return Strategies(work, lambda number: _backward(case, problem, divisions[number]))


def _backward(case: Case, problem: Attended, division: Division) -> Strategy:
    op = case.operation
    operands = _operands(case, problem, division)
    out = problem.end(division, 3).complete()
    sums = out.restrict(problem.queries.names)
    count = len(operands)
    names = ("q", "k", "v", *op.params["given"])
    targets = [0, 1, 2]
    if op.params["bias_gradient"]:
        targets.append(names.index("bias"))
    results = tuple(
        operands[i].add_partial(summed(problem, division, op.inputs[i].shape, i == 2))
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
        if not division.ring:
            part = bool(division.over(problem.memory))
            given = for_parts(builder, given, problem, division)
            given = given if not part else given.of_a_part()
            return given.attend(builder, "attention_gradient", left)
        return _around(builder, given, problem, division, [names[i] for i in targets], left)

    used = frozenset(axis for axes in division.splits.values() for axis in axes)
    return Strategy((*operands, out, sums, out), results, emit, fixed=used)


def _around(
    builder: BlockBuilder,
    given: Operands,
    problem: Attended,
    division: Division,
    targets: Sequence[str],
    left: Sequence[Result],
) -> list[Value]:
    """Writes the ring of a gradient, and returns the gradients by `targets`."""
    order = problem.order(division)
    given = given.of_a_part()
    if order is None:
        steps = schedule(problem.sight(division))
        given = for_ring(builder, given, problem, division, steps)
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
    kept = Ring(division.ring, steps, moving, step, added, sent).run(builder, given)
    found = dict(zip((*stay, *travel), (*kept.stay, *kept.travel), strict=True))
    axes, ends = division.splits[problem.memory], []
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
