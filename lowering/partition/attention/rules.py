"""Partition rules of attention: every dim but the contracted features can stay split.

Each way of splitting the dims (`divisions`) is a strategy. This file writes its instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.options import dtype_of_sums
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
from meshdsl.lowering.partition.attention.ring import Computed, Ring, added, merged
from meshdsl.lowering.partition.attention.schedule import schedule
from meshdsl.lowering.partition.attention.zigzag import dealt
from meshdsl.lowering.partition.strategy import Case, Strategies, Strategy, Work
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tracing.graph import Graph, Operation


def unused(cases: Sequence[Case], cheapest: Callable[[Sequence[Work]], int]) -> Iterator[str]:
    """Yields messages about options for attention that have no effect on a program's attentions.

    Args:
        cheapest: returns the number of the strategy that is chosen.
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
    chosen = []
    for problem in problems if problems[0].zigzag else ():
        divisions, work = offered(problem)
        chosen.append((problem, divisions[cheapest(work)]))
    if chosen and not any(problem.order(division) for problem, division in chosen):
        yield (
            "zigzag changes nothing: it needs a causal attention without a window, of a length to "
            "a memory of the same size, that is computed in a ring (context=ring)"
        )


def readers(block: Graph) -> dict[Operation, int]:
    """Returns for each attention of a block how many attentions read its operands."""
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
    return [*(problem.layout(division, which) for which in range(3)), *masks]


def attention(case: Case) -> Strategies:
    """Local for every split dim of queries and value features; parts of the memory are merged."""
    problem = problem_of(case, case.results[0])
    divisions, work = offered(problem)
    return Strategies(work, lambda number: _forward(case, problem, divisions[number]))


def _forward(case: Case, problem: Attended, division: Division) -> Strategy:
    op = case.operation
    left = problem.layout(division, 3)
    sums = left.complete().restrict(problem.queries.names)
    parts = division.over(problem.memory)
    wide, narrow = (t.dtype for t in (op.outputs[1], op.outputs[0]))
    kinds = [at.complete().add_partial(parts, "varying") for at in (left, sums)]
    dtype = wide if division.ring else narrow
    results = [
        (op.outputs[0].shape, dtype, kinds[0]),
        (op.outputs[1].shape, wide, kinds[1]),
    ]

    order = problem.order(division)

    def compute(builder: BlockBuilder, operands: Operands) -> Computed:
        return Computed(operands.attend(builder, "attention", results))

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        values = dict(zip(("q", "k", "v", *op.params["given"]), inputs, strict=True))
        operands = Operands(values, op.params)
        if not division.ring:
            operands = for_parts(builder, operands, problem, division)
            mixed, part = compute(builder, operands).stay
        elif order is None:
            steps = schedule(problem.sight(division))
            operands = for_ring(builder, operands, problem, division, steps)
            ring = Ring(division.ring, steps, _moving(problem, operands), compute, merged)
            mixed, part = ring.run(builder, operands).stay
        else:
            steps, operands = dealt(order.devices), order.dealt(builder, operands)
            moving = _moving(problem, operands)
            ring = Ring(division.ring, steps, moving, order.forward(results), merged)
            ordered = zip(ring.run(builder, operands).stay, op.outputs, strict=True)
            mixed, part = (order.back(builder, value, t.shape) for value, t in ordered)
        if parts:
            return whole_of(builder, mixed, part, parts, left, narrow)
        return cast(builder, mixed, narrow), part

    used = frozenset(axis for axes in division.splits.values() for axis in axes)
    return Strategy(tuple(_operands(case, problem, division)), (left, sums), emit, fixed=used)


def attention_gradient(case: Case) -> Strategies:
    """Local likewise; operands that lack a split dim get a partial sum as gradient.

    If value features are split, all gradients but that of the values are partial sums. Queries in
    pads are set to zero, since they would be summed with the others. Devices with parts of the
    memory have the log-sum-exp of all scores, so they need not communicate.
    """
    problem = problem_of(case, case.operands[-1])
    divisions, work = offered(problem)
    return Strategies(work, lambda number: _backward(case, problem, divisions[number]))


def _backward(case: Case, problem: Attended, division: Division) -> Strategy:
    op = case.operation
    layouts = _operands(case, problem, division)
    out = problem.layout(division, 3).complete()
    sums = out.restrict(problem.queries.names)
    count = len(layouts)
    names = ("q", "k", "v", *op.params["given"])
    targets = [0, 1, 2]
    if op.params["bias_gradient"]:
        targets.append(names.index("bias"))
    results = tuple(
        layouts[i].add_partial(summed(problem, division, op.inputs[i].shape, i == 2))
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
        operands = Operands(values, op.params, clean[count:])
        if not division.ring:
            operands = for_parts(builder, operands, problem, division)
            return operands.attend(builder, "attention_gradient", left)
        sent = [dtype_of_sums(op.inputs[i].dtype, case.options) for i in targets]
        around = dict(zip((names[i] for i in targets), sent, strict=True))
        return _around(builder, operands, problem, division, around, left)

    used = frozenset(axis for axes in division.splits.values() for axis in axes)
    return Strategy((*layouts, out, sums, out), results, emit, fixed=used)


def _around(
    builder: BlockBuilder,
    operands: Operands,
    problem: Attended,
    division: Division,
    targets: Mapping[str, np.dtype],
    left: Sequence[Result],
) -> list[Value]:
    """Writes the ring of a gradient, and returns the gradients by `targets`.

    Args:
        targets: the operands, and the dtypes in which gradients of blocks travel.
    """
    order = problem.order(division)
    if order is None:
        steps = schedule(problem.sight(division))
        operands = for_ring(builder, operands, problem, division, steps)
    else:
        steps, operands = dealt(order.devices), order.dealt(builder, operands)
    moving = _moving(problem, operands)
    travel = [i for i, name in enumerate(targets) if name in moving]
    stay = [i for i, name in enumerate(targets) if name not in moving]
    wide = operands.gradient_inputs[1].dtype  # of the log-sum-exp
    results = [
        (operands.values[n].shape, wide, at) for n, (*_, at) in zip(targets, left, strict=True)
    ]

    def compute(builder: BlockBuilder, operands: Operands) -> Computed:
        gradients = operands.attend(builder, "attention_gradient", results)
        return Computed([gradients[i] for i in stay], [gradients[i] for i in travel])

    whole_shards = [(shape, wide, at) for shape, _, at in left]
    step = compute if order is None else order.backward(whole_shards, stay, travel)
    sent = tuple(dtype for name, dtype in targets.items() if name in moving)
    computed = Ring(division.ring, steps, moving, step, added, sent).run(builder, operands)
    gradients = dict(zip((*stay, *travel), (*computed.stay, *computed.travel), strict=True))
    axes, results_in_order = division.splits[problem.memory], []
    for i, (shape, dtype, _) in enumerate(left):
        value = cast(builder, gradients[i], dtype)
        if order is not None:
            results_in_order.append(order.back(builder, value, shape))
        else:
            results_in_order.append(sized(builder, value, problem.memory, axes, shape))
    return results_in_order


def _moving(problem: Attended, operands: Operands) -> tuple[str, ...]:
    """Returns the names of the operands that have the memory, and so travel."""
    return tuple(name for name, v in operands.values.items() if v.shape.find(problem.memory))


RULES = {"attention": attention, "attention_gradient": attention_gradient}
