"""Partition rules of cumulative operations: a local one, and the total of all shards before.

Along a split dim every device computes one total of its shard. The totals of all devices are
gathered, and each device combines those before its own (`combine_before`).

- Sums and extremes: a device accumulates along its shard, and combines every element with the total
  before the shard.
- Products: totals are mantissas and exponents, and so is the product before a shard. The device
  multiplies along the shard starting from that product. The shard's own products may leave the
  range where the results do not: after a zero, or after a number so small that the product fits.
- Recurrences: a total is the function that a shard applies to the state before it. It is `factor *
  state + offset`, the factor a mantissa and an exponent; besides, its values for states that are
  infinite or become so on the way (`backends.transfers`). The device runs along the shard starting
  from the state before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.lowering.communication.totals import DEVICES, combine_before, scaled_product
from meshdsl.lowering.partition.strategy import Case, Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import INT32, BlockBuilder
from meshdsl.tensors.dtypes import identity, is_differentiable

_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}


def _split_over(case: Case) -> list[str]:
    axes = case.operands[-1].axes(case.operation.params["dim"])
    return [axis for axis in axes if case.mesh.sizes[axis] > 1]


def _over(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"reverse": params["reverse"], "dim": DEVICES}


def cumulative(case: Case) -> Strategy:
    """Sums and extremes."""
    op, layout, axes = case.operation, case.operands[0], _split_over(case)
    params, kind, dim = dict(op.params), op.primitive.combines, op.params["dim"]
    assert kind is not None
    (out,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (x,) = inputs
        here, dtype = x.layout, out.dtype
        if not axes:
            return builder.add(op.name, (x,), [(out.shape, dtype, here)], params)
        x = builder.mask_pads(x, [dim], identity(kind, dtype))
        local = builder.one(op.name, (x,), out.shape, dtype, here, **params)
        rest = out.shape.without([dim])
        own = here.restrict(rest.names).add_partial(axes, "varying")
        total = builder.one(kind, (x,), rest, dtype, own, over=(dim,))

        def before(totals: Sequence[Value]) -> Sequence[Value]:
            (row,), devices = totals, {**_over(params), "exclusive": True}
            return [builder.one(op.name, totals, row.shape, dtype, row.layout, **devices)]

        (earlier,) = combine_before(builder, [total], axes, before, dtype.itemsize)
        return builder.add(_COMBINE[kind], (local, earlier), [(out.shape, dtype, here)])

    return Strategy((layout,), (layout,), emit, linear=op.linear, fixed=frozenset(axes))


def product(case: Case) -> Strategy:
    """Products; a shard starts with that of all elements before it."""
    op, layout, axes = case.operation, case.operands[0], _split_over(case)
    params, dim = dict(op.params), op.params["dim"]
    (out,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (x,), result = inputs, [(out.shape, out.dtype, layout)]
        if not axes:
            return builder.add(op.name, (x,), result, params)
        x = builder.mask_pads(x, [dim], 1)
        rest = out.shape.without([dim])
        own = layout.restrict(rest.names).add_partial(axes, "varying")
        totals = scaled_product(builder, (x,), (dim,), rest, own)

        def before(totals: Sequence[Value]) -> Sequence[Value]:
            rows = [(total.shape, total.dtype, total.layout) for total in totals]
            return builder.add("products_before", totals, rows, _over(params))

        back = sum(total.dtype.itemsize for total in totals)
        start = combine_before(builder, totals, axes, before, back)
        return builder.add("cumprod_from", (x, *start), result, params)

    return Strategy((layout,), (layout,), emit, fixed=frozenset(axes))


def recurrence(case: Case) -> Strategy:
    """Linear recurrences; a shard starts with the state before it."""
    op, layout, axes = case.operation, case.operands[1], _split_over(case)
    params, dim = dict(op.params), op.params["dim"]
    (out,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        decay = builder.mask_pads(inputs[0], [dim], 1)
        x = builder.mask_pads(inputs[1], [dim], 0)
        here, dtype, rest = x.layout, out.dtype, out.shape.without([dim])
        result = [(out.shape, dtype, here)]
        if not axes:
            return builder.add(op.name, (decay, x), result, params)
        own = here.restrict(rest.names).add_partial(axes, "varying")
        alone = decay.layout.restrict(rest.names).add_partial(axes, "varying")
        types = [(rest, dtype, own), (rest, dtype, alone)]
        if is_differentiable(dtype):
            types.append((rest, INT32, alone))
        totals = builder.add("recurrence_totals", (decay, x), types, params)

        def before(totals: Sequence[Value]) -> Sequence[Value]:
            like, name = totals[0], "states_before"
            return [builder.one(name, totals, like.shape, dtype, like.layout, **_over(params))]

        (start,) = combine_before(builder, totals, axes, before, dtype.itemsize)
        return builder.add("linear_recurrence_from", (decay, x, start), result, params)

    return Strategy((layout, layout), (layout,), emit, linear=op.linear, fixed=frozenset(axes))


RULES = {
    "cumsum": cumulative,
    "cumprod": product,
    "cummax": cumulative,
    "cummin": cumulative,
    "linear_recurrence": recurrence,
}
