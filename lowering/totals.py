"""Totals: one value per device along some axes, known to all of them, and each device's own.

They stand along a dim `devices_`, in the order of the devices, major axis first.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.dims import Dimension, Shape
from meshdsl.lowering.builder import BlockBuilder
from meshdsl.lowering.program import Value

DEVICES = "devices_"


def gather_totals(builder: BlockBuilder, total: Value, axes: Sequence[str]) -> Value:
    """Returns what the devices along `axes` hold as `total`: [devices_, *its dims]."""
    axes = tuple(axes)
    shape = Shape([Dimension(DEVICES, builder.mesh.extent(axes)), *total.shape])
    rest = total.layout.drop(axes)
    apart = rest.split(DEVICES, axes)
    value = builder.one("reshape", (total,), shape, total.dtype, apart)
    return builder.one("all_gather", (value,), shape, total.dtype, rest, axes=axes, dim=DEVICES)


def own_total(builder: BlockBuilder, totals: Value, axes: Sequence[str]) -> Value:
    """Returns this device's element along the devices' dim."""
    axes = tuple(axes)
    apart = totals.layout.split(DEVICES, axes)
    value = builder.one(
        "slice", (totals,), totals.shape, totals.dtype, apart, axes=axes, dim=DEVICES
    )
    own = totals.layout.add_partial(axes, "varying")
    return builder.one("reshape", (value,), totals.shape.without([DEVICES]), totals.dtype, own)
