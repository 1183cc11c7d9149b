"""Totals: one value per device along some axes, which are combined.

They are joined along a dim `devices_`, in the order of the devices, major axis first. There are two
ways, and the one that sends fewer bytes is used:

- every device gathers all totals and combines them: it sends n-1 times all elements;
- every device gets all totals of its share of the elements, combines them, and sends the results:
  two times (n-1)/n of the elements, with one collective more.

A product of some factors may leave the range of its dtype where the product of all is in range. So
products of floating-point numbers are sent as a mantissa and an exponent (`scaled_product`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import AllToAll, Reduction, SplitDim
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import INT32, BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import is_differentiable

DEVICES = "devices_"
ELEMENTS = "elements_"
_STEP = 0.75  # of the bytes that one step sends, two must not send more


def in_row(builder: BlockBuilder, total: Value, axes: Sequence[str]) -> Value:
    """Returns a total with a first dim `devices_`, split over `axes`."""
    shape = Shape([Dimension(DEVICES, builder.mesh.extent(axes)), *total.shape])
    apart = total.layout.drop(axes).split(DEVICES, axes)
    return builder.one("reshape", (total,), shape, total.dtype, apart)


def scaled_product(
    builder: BlockBuilder,
    values: Sequence[Value],
    over: Sequence[str],
    shape: Shape,
    layout: TensorLayout,
) -> list[Value]:
    """Returns the product of each device's own elements: a mantissa and an s32 exponent.

    It neither over- nor underflows, for any elements. The product of integers has no exponent.

    Args:
        values: the factors, or their mantissas and exponents.
    """
    dtype = values[0].dtype
    params: Reduction = {"over": tuple(over)}
    if not is_differentiable(dtype):
        return [builder.one("prod", values, shape, dtype, layout, **params)]
    results = [(shape, dtype, layout), (shape, INT32, layout)]
    return list(builder.add("scaled_prod", values, results, params))


def unscaled(builder: BlockBuilder, parts: Sequence[Value]) -> Value:
    """Returns the numbers that mantissas and exponents stand for."""
    if len(parts) == 1:
        return parts[0]
    return builder.one("scale", parts, parts[0].shape, parts[0].dtype, parts[0].layout)


def combine_along(
    builder: BlockBuilder,
    values: Sequence[Value],
    axes: Sequence[str],
    combine: Callable[[Sequence[Value]], Sequence[Value]],
    back: int,
) -> list[Value]:
    """Combines values along their first dim, which is split, for every device along `axes`.

    Args:
        values: of one shape, the first dim split over `axes`.
        combine: takes the values with that dim unsplit, and all other dims perhaps merged into one.
            Its results have any dims, or none, in place of the first.
        back: the bytes of its results, for one element of the other dims.

    Returns:
        The results of `combine`, with the other dims as the values have them.
    """
    axes, like = tuple(axes), values[0]
    if _gathers(builder, values, axes, back):
        return list(combine([_whole(builder, value, axes) for value in values]))
    others = like.shape.without([like.shape[0].name])
    rest, results = like.layout.restrict(others.names), []
    for value in combine([_share(builder, value, axes) for value in values]):
        here = value.layout.split(ELEMENTS, value.layout.axes(ELEMENTS)[: -len(axes)])
        params: SplitDim = {"axes": axes, "dim": ELEMENTS}
        flat = builder.one("all_gather", (value,), value.shape, value.dtype, here, **params)
        shape = Shape([*value.shape.without([ELEMENTS]), *others])
        results.append(builder.one("reshape", (flat,), shape, value.dtype, rest))
    return results


def combine_before(
    builder: BlockBuilder,
    totals: Sequence[Value],
    axes: Sequence[str],
    combine: Callable[[Sequence[Value]], Sequence[Value]],
    back: int,
) -> list[Value]:
    """Returns this device's row of `combine` of all devices' totals.

    Args:
        combine: takes the totals of all devices, with a first dim `devices_`, and all other dims
            perhaps merged into one. It returns values of the same dims: a row for each device.
        back: the bytes of its results, for one element of the other dims.
    """
    axes, like = tuple(axes), totals[0]
    rows = [in_row(builder, total, axes) for total in totals]
    layout, results = like.layout.add_partial(axes, "varying"), []
    gathers = _gathers(builder, rows, axes, back)
    for combined in combine([(_whole if gathers else _share)(builder, row, axes) for row in rows]):
        if gathers:
            apart = combined.layout.split(DEVICES, axes)
            params: SplitDim | AllToAll = {"axes": axes, "dim": DEVICES}
        else:
            rest = combined.layout.axes(ELEMENTS)[: -len(axes)]
            apart = combined.layout.split(ELEMENTS, rest).split(DEVICES, axes)
            params = {"axes": axes, "concat": ELEMENTS, "split": DEVICES}
        op = "slice" if gathers else "all_to_all"
        own = builder.one(op, (combined,), combined.shape, combined.dtype, apart, **params)
        results.append(builder.one("reshape", (own,), like.shape, combined.dtype, layout))
    return results


def _gathers(
    builder: BlockBuilder, values: Sequence[Value], axes: tuple[str, ...], back: int
) -> bool:
    """Whether all values are gathered: this sends less, or a little more in one step, not two."""
    # What several operations gather is gathered only once.
    like = values[0]
    there = sum(v.local.get(like.shape[0].name).size * v.dtype.itemsize for v in values)
    count = like.local.without([like.shape[0].name]).volume
    share = -(-count // builder.mesh.extent(axes))
    return share * (there + back) > _STEP * count * there


def _whole(builder: BlockBuilder, value: Value, axes: tuple[str, ...]) -> Value:
    dim = value.shape[0].name
    layout = value.layout.split(dim, ())
    return builder.one("all_gather", (value,), value.shape, value.dtype, layout, axes=axes, dim=dim)


def _share(builder: BlockBuilder, value: Value, axes: tuple[str, ...]) -> Value:
    """Returns this device's share of the other dims' elements, with the first dim unsplit."""
    mesh, (first, *_) = builder.mesh, value.shape
    others = tuple(
        axis for dim, split in value.layout.splits if dim != first.name for axis in split
    )
    size = value.local.without([first.name]).volume * mesh.extent(others)
    shape = Shape([first, Dimension(ELEMENTS, size)])
    sums = dict(value.layout.partial)
    apart = TensorLayout.of({first.name: axes, ELEMENTS: others}, sums)
    flat = builder.one("reshape", (value,), shape, value.dtype, apart)
    there = TensorLayout.of({ELEMENTS: (*others, *axes)}, sums)
    params: AllToAll = {"axes": axes, "concat": first.name, "split": ELEMENTS}
    return builder.one("all_to_all", (flat,), shape, value.dtype, there, **params)
