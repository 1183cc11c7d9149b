"""Partition rules of cumulative operations: local, then what came before each shard.

Along a split dim the devices gather their totals, one each; a device combines those before it with
every element of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshdsl.dtypes import identity
from meshdsl.lowering.builder import BlockBuilder
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value
from meshdsl.lowering.totals import DEVICES, gather_totals, own_total

_COMBINE = {"sum": "add", "prod": "multiply", "max": "maximum", "min": "minimum"}


def _split_over(case: Case) -> list[str]:
    axes = case.operands[-1].axes(case.operation.params["dim"])
    return [axis for axis in axes if case.mesh.sizes[axis] > 1]


def _over_devices(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "dim": DEVICES, "exclusive": True}


def cumulative(case: Case) -> Plan:
    """Sums, products and extremes."""
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
        totals = gather_totals(builder, total, axes)
        before = builder.add(
            op.name, (totals,), [(totals.shape, dtype, totals.layout)], _over_devices(params)
        )
        earlier = own_total(builder, before[0], axes)
        return builder.add(_COMBINE[kind], (local, earlier), [(out.shape, dtype, here)])

    linear = (0,) if op.name == "cumsum" else ()
    return Plan((layout,), (layout,), emit, linear=linear, fixed=frozenset(axes))


def recurrence(case: Case) -> Plan:
    """Linear recurrences; a shard turns the state before it into decays times it plus its own."""
    op, layout, axes = case.operation, case.operands[1], _split_over(case)
    params, dim = dict(op.params), op.params["dim"]
    (out,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        decay = builder.mask_pads(inputs[0], [dim], 1)
        x = builder.mask_pads(inputs[1], [dim], 0)
        here, dtype, rest = x.layout, out.dtype, out.shape.without([dim])
        own = here.restrict(rest.names).add_partial(axes, "varying")
        results = [(out.shape, dtype, here), (rest, dtype, own)]
        local, last = builder.add(op.name, (decay, x), results, params)
        if not axes:
            return (local,)
        alone = decay.layout.restrict(rest.names).add_partial(axes, "varying")
        through = builder.one("prod", (decay,), rest, dtype, alone, over=(dim,))
        ends = [gather_totals(builder, total, axes) for total in (through, last)]
        shape, there = ends[1].shape, ends[1].layout
        results = [(shape, dtype, there), (rest, dtype, there.restrict(rest.names))]
        states, _ = builder.add(op.name, ends, results, _over_devices(params))
        earlier = own_total(builder, states, axes)
        reach = builder.one("cumprod", (decay,), out.shape, dtype, decay.layout, **params)
        carried = builder.one("multiply", (reach, earlier), out.shape, dtype, here)
        return builder.add("add", (local, carried), [(out.shape, dtype, here)])

    return Plan((layout, layout), (layout,), emit, linear=(1,), fixed=frozenset(axes))


RULES = {
    "cumsum": cumulative,
    "cumprod": cumulative,
    "cummax": cumulative,
    "cummin": cumulative,
    "linear_recurrence": recurrence,
}
