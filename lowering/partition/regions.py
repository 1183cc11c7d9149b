"""Partition rules of what leads into the regions of a pipeline and out of them; all are local.

The dim `stage` is split over the axes of the pipeline, one position per device. The tensor without
that dim has one value per stage: its layout does not mention these axes, and no sum passes that is
partial over them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.exchange import Interval, Run, gather
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor


def _axes(case: Case, tensor: Tensor, layout: TensorLayout) -> tuple[str, ...]:
    """Returns the axes that split the dim `stage`, all positions of it."""
    stage = case.operation.params["stage"]
    axes = layout.axes(stage.name)
    assert case.mesh.extent(axes) == tensor.shape.get(stage.name).size, (stage, axes)
    return axes


def _reshaped(
    case: Case, before: TensorLayout, after: TensorLayout, axes: Sequence[str]
) -> Strategy:
    (out,) = case.operation.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        return builder.add("reshape", inputs, [(out.shape, out.dtype, after)])

    return Strategy((before,), (after,), emit, fixed=frozenset(axes))


def enter(case: Case) -> Strategy:
    """Each device has one position of the dim `stage`, and drops that dim."""
    (x,), stage = case.operation.inputs, case.operation.params["stage"]
    axes = _axes(case, x, case.operands[0])
    (after,) = case.results
    return _reshaped(case, after.split(stage.name, axes), after, axes)


def leave(case: Case) -> Strategy:
    """Each device's value becomes its position of the dim `stage`."""
    (out,), stage = case.operation.outputs, case.operation.params["stage"]
    axes = _axes(case, out, case.results[0])
    (before,) = case.operands
    return _reshaped(case, before, before.split(stage.name, axes), axes)


def vary(case: Case) -> Strategy:
    """The value itself; it is no partial sum."""
    (layout,) = case.results

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        return inputs

    return Strategy((layout,), (layout,), emit)


def deal(case: Case) -> Strategy:
    """Each device fetches its chunks from the devices that store these layers."""
    op, (out,), (after,) = case.operation, case.operation.outputs, case.results
    layers, axes, stages, rounds, chunk = _dealt(case)
    before = after.split(layers.name, axes)
    placement = _rounds(case, stages)
    runs = [
        [
            _run((turn * stages + of_round.index(stage)) * chunk, chunk, turn)
            for turn, of_round in enumerate(placement)
        ]
        for stage in range(stages)
    ]

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        own = inputs[0]
        if rounds > 1:
            own = gather(builder, inputs, layers.name, axes, runs, rounds * chunk)
        here = after.add_partial(own.layout.partial_axes)
        return builder.add("reshape", (own,), [(out.shape, out.dtype, here)])

    return Strategy((before,), (after,), emit, linear=op.linear, fixed=frozenset(axes))


def collect(case: Case) -> Strategy:
    """Each device fetches the layers that it stores from the stages that have their chunks."""
    op, (out,), (before,) = case.operation, case.operation.outputs, case.operands
    layers, axes, stages, rounds, chunk = _dealt(case)
    after = before.split(layers.name, axes)
    own = rounds * chunk  # layers of a stage
    placement = _rounds(case, stages)
    runs = [
        [
            _run(placement[c // stages][c % stages] * own + c // stages * chunk, chunk, i)
            for i, c in enumerate(range(stage * rounds, (stage + 1) * rounds))
        ]
        for stage in range(stages)
    ]

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (value,) = inputs
        here = after.add_partial(value.layout.partial_axes)
        shape = _front(value.shape, op.params["own"])
        x = builder.one("transpose", (value,), shape, value.dtype, value.layout)
        x = builder.one("reshape", (x,), out.shape, out.dtype, here)
        return (gather(builder, [x], layers.name, axes, runs, own) if rounds > 1 else x,)

    return Strategy((before,), (after,), emit, linear=op.linear, fixed=frozenset(axes))


def _dealt(case: Case) -> tuple[Dimension, tuple[str, ...], int, int, int]:
    """Returns the layers, the axes of the stages, and how many stages, rounds, layers per chunk."""
    params = case.operation.params
    layers, axes, (*rounds, inside) = params["layers"], params["axes"], params["own"]
    stages, count = case.mesh.extent(axes), math.prod(d.size for d in rounds)
    assert layers.size == stages * count * inside.size, (layers, params["own"], axes)
    return layers, axes, stages, count, inside.size


def _rounds(case: Case, stages: int) -> list[tuple[int, ...]]:
    """Returns the stages of the chunks of each round, in the order of the model."""
    placement = case.operation.params["placement"]
    return [placement[at : at + stages] for at in range(0, len(placement), stages)]


def _front(shape: Shape, dims: Sequence[Dimension]) -> Shape:
    return Shape([*dims, *shape.without([d.name for d in dims])])


def _run(first: int, size: int, place: int) -> Run:
    """Returns a run of `size` layers that becomes the chunk number `place` of a window."""
    return Run(Interval(first, first + size), place * size)


RULES = {
    "deal_to_stages": deal,
    "collect_from_stages": collect,
    "enter_stages": enter,
    "leave_stages": leave,
    "vary_over_stages": vary,
}
