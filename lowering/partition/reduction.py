"""Partition rules of reductions: local, then partial over the axes of the dims reduced over.

There are no partial products: the devices' products are gathered and multiplied. The position of an
extreme needs two all_reduces: of the extremes, then of the positions on the devices that have it.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.tensor_layout import Kind, TensorLayout
from meshdsl.lowering.communication.totals import (
    DEVICES,
    combine_along,
    combine_before,
    in_row,
    scaled_product,
    unscaled,
)
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BOOL, INT32, BlockBuilder
from meshdsl.tensors.dtypes import identity, is_float


def reduction(case: Case) -> Strategy:
    """Local in the layout of the operand; split dims leave partial results."""
    op, (layout,) = case.operation, case.operands
    result, over = op.outputs[0], op.params["over"]
    axes = [axis for name in over for axis in layout.axes(name)]
    kind = op.primitive.combines
    assert kind is not None
    left = layout.restrict(result.shape.names).add_partial(axes, kind)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        here = left.add_partial(inputs[0].layout.partial_axes)
        inputs = [builder.mask_pads(inputs[0], over, identity(kind, result.dtype))]
        return builder.add(op.name, inputs, [(result.shape, result.dtype, here)], op.params)

    return Strategy(
        operands=(layout,),
        results=(left,),
        emit=emit,
        linear=op.linear,
        fixed=frozenset(axes),
    )


def _rest(case: Case) -> tuple[TensorLayout, list[str]]:
    """Returns the layout of the result, and the axes that split the reduced dims."""
    (layout,), (out,) = case.operands, case.operation.outputs
    left = layout.restrict(out.shape.names)
    gone = layout.split_axes - left.split_axes
    order = [axis for _, axes in layout.splits for axis in axes if axis in gone]
    return left, [axis for axis in order if case.mesh.sizes[axis] > 1]


def product(case: Case) -> Strategy:
    """Local, then the devices' products are gathered and multiplied.

    They are sent as mantissas and exponents: one that leaves the range may be multiplied by zero.
    """
    op, (layout,) = case.operation, case.operands
    (out,), (left, axes) = op.outputs, _rest(case)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        x = builder.mask_pads(inputs[0], op.params["over"], 1)
        over, shape = op.params["over"], out.shape
        if not axes:
            return builder.add("prod", (x,), [(shape, out.dtype, left)], {"over": over})
        own = left.add_partial(axes, "varying")
        totals = scaled_product(builder, (x,), over, shape, own)

        def multiply(totals: Sequence[Value]) -> Sequence[Value]:
            like = totals[0].layout.restrict(totals[0].shape.without([DEVICES]).names)
            rest = totals[0].shape.without([DEVICES])
            return [unscaled(builder, scaled_product(builder, totals, (DEVICES,), rest, like))]

        rows = [in_row(builder, total, axes) for total in totals]
        return combine_along(builder, rows, axes, multiply, out.dtype.itemsize)

    return Strategy((layout,), (left,), emit)


def others(case: Case) -> Strategy:
    """The product of all other elements: of other devices' and of the device's own."""
    op, (layout,), (out,) = case.operation, case.operands, case.operation.outputs
    over, result = op.params["over"], [(out.shape, out.dtype, layout)]
    split = [axis for name in over for axis in layout.axes(name)]
    axes = [axis for axis in split if case.mesh.sizes[axis] > 1]

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        x = builder.mask_pads(inputs[0], over, 1)
        if not axes:
            return builder.add(op.name, (x,), result, op.params)
        rest = out.shape.without(over)
        own = layout.restrict(rest.names).add_partial(axes, "varying")
        totals = scaled_product(builder, (x,), over, rest, own)

        def besides(totals: Sequence[Value]) -> Sequence[Value]:
            rows = [(total.shape, total.dtype, total.layout) for total in totals]
            return builder.add("products_besides", totals, rows, {"over": (DEVICES,)})

        back = sum(total.dtype.itemsize for total in totals)
        outside = combine_before(builder, totals, axes, besides, back)
        return builder.add(op.name, (x, *outside), result, op.params)

    return Strategy((layout,), (layout,), emit, fixed=frozenset(axes))


def arg_extreme(case: Case) -> Strategy:
    """Local, then the first position on the devices that have the extreme."""
    op, (layout,) = case.operation, case.operands
    ((x,), (out,)), (left, axes) = (op.inputs, op.outputs), _rest(case)
    kind: Kind = "max" if op.name == "argmax" else "min"
    dim = x.shape.get(op.params["dim"])
    shape = out.shape

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        value = builder.mask_pads(inputs[0], [dim.name], identity(kind, x.dtype))
        own = left.add_partial(axes, "varying")
        place = builder.one(op.name, (value,), shape, INT32, own, dim=dim.name)
        if not axes:
            return (place,)
        positions = builder.positions(dim, axes)
        look_up = {"dim": dim.name, "pairs": ()}
        place = builder.one("take", (positions, place), shape, INT32, own, **look_up)
        several = left.add_partial(axes, kind)
        mine = builder.one(kind, (value,), shape, x.dtype, several, over=(dim.name,))
        if is_float(x.dtype):  # a compiler may compute it twice, with different precision
            mine = builder.one("barrier", (mine,), shape, x.dtype, several)
        params = {"axes": tuple(axes), "kind": kind}
        best = builder.one("all_reduce", (mine,), shape, x.dtype, left, **params)
        reached = builder.one("equal", (mine, best), shape, BOOL, own)
        if is_float(x.dtype):  # NaN counts as the extreme
            unequal = builder.one("not_equal", (mine, mine), shape, BOOL, own)
            reached = builder.one("logical_or", (reached, unequal), shape, BOOL, own)
        past = builder.number(dim.size, INT32)
        several = left.add_partial(axes, "min")
        place = builder.one("select", (reached, place, past), shape, INT32, several)
        params = {"axes": tuple(axes), "kind": "min"}
        return builder.add("all_reduce", (place,), [(shape, INT32, left)], params)

    return Strategy((layout,), (left,), emit)


RULES = {
    "sum": reduction,
    "max": reduction,
    "min": reduction,
    "prod": product,
    "prod_others": others,
    "argmax": arg_extreme,
    "argmin": arg_extreme,
}
