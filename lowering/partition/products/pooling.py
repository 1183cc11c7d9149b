"""Partition rules of pooling: windows over a split dim need a halo exchange, nothing else.

All tensors have the layout of the result. If it splits a dim that windows slide along, each device
gets from its neighbours what its windows reach beyond its own part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshdsl.lowering.communication.halos import cut
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dtypes import identity
from meshdsl.tracing.graph import Operation


def windows(case: Case) -> Strategy:
    """Local after a halo exchange; the first operand of `window_match` has the result's shape."""
    op, (layout,) = case.operation, case.results
    (out,) = op.outputs
    first = 1 if op.name == "window_match" else 0

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        values, slides, shape, cuts = list(inputs), [], out.shape, []
        for slide, size in zip(op.params["slides"], op.params["sizes"], strict=True):
            dim, axes = out.shape.get(slide.out), layout.axes(slide.out)
            if axes:
                halos = cut(slide, dim.size, size, False, axes, case.mesh)
                cuts.append(halos)
                slide, shape = halos.slide, halos.wide(shape, slide.out, case.mesh)
                for number, value in enumerate(values):
                    if number < first:
                        values[number] = halos.widen(builder, value, slide.out)
                    else:
                        values[number] = halos.gather(builder, value, _outside(op, number))
            slides.append(slide)
        here = layout.add_partial(a for value in inputs for a in value.layout.partial_axes)
        params = {**op.params, "slides": tuple(slides)}
        params.pop("out")
        value = builder.one(op.name, values, shape, out.dtype, here, **params)
        for halos in cuts:
            value = halos.narrow(builder, value, out.shape.get(halos.slide.out))
        return (value,)

    fixed = layout.split_axes
    return Strategy((layout,) * len(op.inputs), (layout,), emit, op.linear, fixed=fixed)


def _outside(op: Operation, number: int) -> float:
    """Returns the fill of an operand's halo outside of the tensor: it changes no result."""
    if op.primitive.combines == "max":
        return identity("max", op.inputs[number].dtype)
    return np.nan if op.name == "window_match" and number == 1 else 0


RULES = dict.fromkeys(["window_sum", "window_max", "window_match"], windows)
