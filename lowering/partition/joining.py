"""Partition rules of putting tensors together along a dim.

Along a split dim, each device fetches the parts of the operands that make up its shard. Stacking
moves nothing: each device selects the operands of its shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from meshdsl.lowering.communication.exchange import Interval, Run, bounds, gather
from meshdsl.lowering.partition.slicing import is_device, local_window
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape


def concat(case: Case) -> Strategy:
    """The operands have the layout of the result, and devices exchange elements."""
    op, (layout,) = case.operation, case.results
    (out,), name = op.outputs, op.params["dim"]
    axes = layout.axes(name)
    sizes = [x.shape.get(name).size for x in op.inputs]
    shards = bounds(sum(sizes), axes, case.mesh)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        here = inputs[0].layout
        if len(shards) == 1:
            return builder.add("concat", inputs, [(out.shape, out.dtype, here)], {"dim": name})
        starts = list(itertools.accumulate(sizes, initial=0))
        runs = [
            [
                Run(Interval(met.start - start, met.stop - start), met.start - shard.start, number)
                for number, (start, stop) in enumerate(itertools.pairwise(starts))
                if (met := shard.meet(Interval(start, stop))).size
            ]
            for shard in shards
        ]
        length = -(-out.shape.get(name).size // len(shards))
        fetched = gather(builder, inputs, name, axes, runs, length)
        if fetched.shape != out.shape:
            fetched = builder.one("reshape", (fetched,), out.shape, out.dtype, here)
        return (fetched,)

    operands, additive = (layout,) * len(op.inputs), op.primitive.additive
    return Strategy(operands, (layout,), emit, op.linear, additive, frozenset(axes))


def split_into(case: Case) -> Strategy:
    """The operand has the layout of the parts; one exchange fetches all parts."""
    op = case.operation
    layout, name = case.results[0], op.params["dim"]
    axes = layout.axes(name)
    devices = case.mesh.extent(axes)
    outs = [out.shape.get(name) for out in op.outputs]
    offsets = list(itertools.accumulate((-(-dim.size // devices) for dim in outs), initial=0))

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (x,) = inputs
        if devices == 1:
            starts = [start for start, _ in op.params["parts"]]
            return [local_window(builder, x, d, s) for d, s in zip(outs, starts, strict=True)]
        runs: list[list[Run]] = [[] for _ in range(devices)]
        for (start, size), offset in zip(op.params["parts"], offsets, strict=False):
            for run, shard in zip(runs, bounds(size, axes, case.mesh), strict=True):
                run.append(Run(Interval(shard.start + start, shard.stop + start), offset))
        fetched = gather(builder, [x], name, axes, runs, offsets[-1])
        return [local_window(builder, fetched, d, at) for d, at in zip(outs, offsets, strict=False)]

    return Strategy((layout,), (layout,) * len(outs), emit, fixed=frozenset(axes))


def stack(case: Case) -> Strategy:
    """Every device joins the operands that make up its shard."""
    op, (layout,) = case.operation, case.results
    (out,), name = op.outputs, op.params["dim"]
    axes = layout.axes(name)
    each = layout.restrict(op.inputs[0].shape.names)
    shards = bounds(len(op.inputs), axes, case.mesh)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        here = layout.add_partial(inputs[0].layout.partial_axes)
        varying = inputs[0].layout.add_partial(axes, "varying")
        slot = Shape([Dimension(name, len(shards)), *op.inputs[0].shape])
        slots = []
        for place in range(-(-len(inputs) // len(shards))):
            value = inputs[place]
            for device, shard in enumerate(shards[1:], 1):
                if place < shard.size:
                    mine = is_device(builder, axes, device)
                    choice = (mine, inputs[shard.start + place], value)
                    value = builder.one("select", choice, value.shape, value.dtype, varying)
            slots.append(builder.one("reshape", (value,), slot, out.dtype, here))
        if len(slots) == 1 and slot == out.shape:
            return slots
        return builder.add("concat", slots, [(out.shape, out.dtype, here)], {"dim": name})

    operands, additive = (each,) * len(op.inputs), op.primitive.additive
    return Strategy(operands, (layout,), emit, op.linear, additive, frozenset(axes))


RULES = {"concat": concat, "split_into": split_into, "stack": stack}
