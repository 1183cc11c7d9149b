"""Partition rules of cumulative operations: local, then what came before each shard.

Along a split dim the devices gather their totals, one each, and a device begins with those before
it combined. A sum or an extreme is combined with every element of the shard. A product or a state
is not: what the shard multiplies it with may leave the range of the dtype on its own, and yet meet
a zero, or a number so small that the result is in range. So the shard is gone along once more from
there, as one device would; and the totals travel as mantissas and exponents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.dtypes import identity, is_differentiable
from meshdsl.lowering.builder import INT32, BlockBuilder
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value
from meshdsl.lowering.totals import DEVICES, combine_before, scaled_product

_COMBINE = {"sum": "add", "max": "maximum", "min": "minimum"}


def _split_over(case: Case) -> list[str]:
    axes = case.operands[-1].axes(case.operation.params["dim"])
    return [axis for axis in axes if case.mesh.sizes[axis] > 1]


def _over(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"reverse": params["reverse"], "dim": DEVICES}


def cumulative(case: Case) -> Plan:
    """Sums and extremes."""
    op, layout, axes = case.operation, case.operands[0], _split_over(case)
    params, kind, dim = dict(op.params), op.name.removeprefix("cum"), op.params["dim"]
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

    linear = (0,) if op.name == "cumsum" else ()
    return Plan((layout,), (layout,), emit, linear=linear, fixed=frozenset(axes))


def product(case: Case) -> Plan:
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

    return Plan((layout,), (layout,), emit, fixed=frozenset(axes))


def recurrence(case: Case) -> Plan:
    """Linear recurrences; a shard turns the state before it into decays times it plus its own."""
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
        totals = [(rest, dtype, own), (rest, dtype, alone)]
        if is_differentiable(dtype):
            totals.append((rest, INT32, alone))
        ends = builder.add("recurrence_totals", (decay, x), totals, params)

        def before(ends: Sequence[Value]) -> Sequence[Value]:
            like, name = ends[0], "states_before"
            return [builder.one(name, ends, like.shape, dtype, like.layout, **_over(params))]

        (start,) = combine_before(builder, ends, axes, before, dtype.itemsize)
        return builder.add("linear_recurrence_from", (decay, x, start), result, params)

    return Plan((layout, layout), (layout,), emit, linear=(1,), fixed=frozenset(axes))


RULES = {
    "cumsum": cumulative,
    "cumprod": product,
    "cummax": cumulative,
    "cummin": cumulative,
    "linear_recurrence": recurrence,
}
