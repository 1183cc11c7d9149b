"""Partition rules of rename, split, merge, broadcast and transpose.

All of them are local wherever the layouts of operand and result allow it: a split dim gives its
axes to its parts, major first, as far as the sizes divide. Where the two layouts disagree, a
strategy keeps one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.exchange import Interval, Run, bounds, gather
from meshdsl.lowering.partition.strategy import (
    Case,
    Rule,
    Strategies,
    Strategy,
    Work,
    bytes_moved,
)
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape


def axes_of_parts(axes: Sequence[str], parts: Shape, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Returns the axes of a split dim by its parts; axes that do not fit are left out."""
    kept: dict[str, tuple[str, ...]] = {part.name: () for part in parts}
    position, left = 0, parts[0].size
    for axis in axes:
        size = mesh.sizes[axis]
        while left == 1 and size > 1 and position + 1 < len(parts):
            position += 1
            left = parts[position].size
        if left % size:
            break
        kept[parts[position].name] += (axis,)
        left //= size
    return kept


def axes_of_whole(layout: TensorLayout, parts: Shape, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Returns the axes of some dims that their merged dim can keep, by part.

    A part keeps its axes only if they divide it and every part before it is split to size 1.
    """
    stay: dict[str, tuple[str, ...]] = {part.name: () for part in parts}
    layout = layout.restrict(parts.names).even(parts, mesh)
    for part in parts:
        stay[part.name] = layout.axes(part.name)
        if mesh.extent(stay[part.name]) != part.size:
            break
    return stay


def _split_layouts(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout]:
    """Returns operand and result layout of a `split`, one of them as asked for."""
    op = case.operation
    whole, parts = op.params["whole"], op.params["parts"]
    return _layouts(case.operands[0], case.results[0], whole, parts, case.mesh, led_by_result)


def _merge_layouts(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout]:
    """Returns operand and result layout of a `merge`, one of them as asked for."""
    op = case.operation
    whole, parts = op.params["whole"], op.params["parts"]
    one, several = _layouts(
        case.results[0], case.operands[0], whole, parts, case.mesh, not led_by_result
    )
    return several, one


def _layouts(
    one: TensorLayout,
    several: TensorLayout,
    whole: str,
    parts: Shape,
    mesh: Mesh,
    led_by_parts: bool,
) -> tuple[TensorLayout, TensorLayout]:
    """Returns matching layouts of the tensor with the whole dim and of the one with its parts."""
    if led_by_parts:
        kept = axes_of_whole(several, parts, mesh)
        axes = tuple(axis for part in parts for axis in kept[part.name])
        lead = several
    else:
        kept = axes_of_parts(one.axes(whole), parts, mesh)
        axes = tuple(axis for part in parts for axis in kept[part.name])
        lead = one
    rest = {d: a for d, a in lead.splits if d != whole and d not in kept}
    return TensorLayout.of({**rest, whole: axes}), TensorLayout.of({**rest, **kept})


def _rename_layouts(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout]:
    names = case.operation.params["names"]
    if led_by_result:
        return case.results[0].rename({v: k for k, v in names.items()}), case.results[0]
    return case.operands[0], case.operands[0].rename(names)


_LAYOUTS = {"split": _split_layouts, "merge": _merge_layouts, "rename": _rename_layouts}


def led_by_operand(case: Case) -> TensorLayout:
    """Returns the layout of a rename's, split's or merge's result if its operand is not moved."""
    return _LAYOUTS[case.operation.name](case, False)[1]


def _crossing(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout] | None:
    """Returns layouts of operand and result that split the merged dim as its first part.

    If the sizes do not divide, shards of the two have different boundaries, and devices exchange
    what lies between. Returns None if there is nothing to split.
    """
    op = case.operation
    whole, parts = op.params["whole"], op.params["parts"]
    lead = (case.results if led_by_result else case.operands)[0]
    axes = lead.axes(whole if led_by_result == (op.name == "merge") else parts[0].name)
    if not axes:
        return None
    rest = {d: a for d, a in lead.splits if d != whole and d not in parts.names}
    one = TensorLayout.of({**rest, whole: axes})
    several = TensorLayout.of({**rest, parts[0].name: axes})
    return (one, several) if op.name == "split" else (several, one)


def _positions(case: Case, axes: Sequence[str]) -> tuple[list[Interval], list[Interval]]:
    """Returns the positions of the whole that each device has, as a whole and as parts."""
    parts = case.operation.params["parts"]
    row = parts.volume // parts[0].size
    pieces = bounds(parts[0].size, axes, case.mesh)
    return bounds(parts.volume, axes, case.mesh), [Interval(a * row, b * row) for a, b in pieces]


def _boundary_bytes(case: Case, layouts: _Between) -> float:
    """Returns the most bytes that a device needs of others in a crossing."""
    op, split = case.operation, case.operation.name == "split"
    where, x = (layouts.operand, op.inputs[0]) if split else (layouts.result, op.outputs[0])
    whole, parts = _positions(case, where.axes(op.params["whole"]))
    have, want = (whole, parts) if split else (parts, whole)
    missing = max(w.size - w.meet(h).size for w, h in zip(want, have, strict=True))
    row = where.local(x.shape.without([op.params["whole"]]), case.mesh).volume
    return missing * row * x.dtype.itemsize


class _Between(NamedTuple):
    """Layouts of operand and result, and whether shards are exchanged between them."""

    operand: TensorLayout
    result: TensorLayout
    crossing: bool = False


def _offered(case: Case, strategy: Callable[[Case, _Between], Strategy]) -> Strategies:
    """Offers the layout of the result, that of the operand, and crossings if these are not free."""
    op = case.operation
    (x,), (y,) = op.inputs, op.outputs
    between = [_Between(*_LAYOUTS[op.name](case, led)) for led in (True, False)]

    def work(each: _Between) -> Work:
        moves = (x, case.operands[0], each.operand), (y, each.result, case.results[0])
        sends = bytes_moved(moves, case.mesh)
        return Work(sends + _boundary_bytes(case, each) if each.crossing else sends)

    costs = [work(each) for each in between]
    if op.name != "rename" and all(cost.sends for cost in costs):
        crossings = [_crossing(case, led) for led in (True, False)]
        between += [_Between(*each, True) for each in crossings if each is not None]
        costs += [work(each) for each in between[2:]]
    return Strategies(costs, lambda number: strategy(case, between[number]))


def reshape(case: Case) -> Strategies:
    """Split and rename: in the layout of the result or of the operand, or from one to the other."""
    return _offered(case, _reshape)


def _reshape(case: Case, between: _Between) -> Strategy:
    op, (operand, result, crossing) = case.operation, between
    (y,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (value,) = inputs
        if crossing:
            value = _as_parts(builder, value, case)
        here = result.add_partial(value.layout.partial_axes)
        return builder.add(
            _LOCAL[op.name], (value,), [(y.shape, y.dtype, here)], _local_params(case)
        )

    used = result.split_axes if crossing else frozenset()
    return Strategy((operand,), (result,), emit, linear=op.linear, fixed=used)


def _as_parts(builder: BlockBuilder, value: Value, case: Case) -> Value:
    """Gives every device the positions of the whole that make up its shard of the first part."""
    name, parts = case.operation.params["whole"], case.operation.params["parts"]
    axes = value.layout.axes(name)
    _, wanted = _positions(case, axes)
    length = -(-parts[0].size // len(wanted)) * (parts.volume // parts[0].size)
    return gather(builder, [value], name, axes, [[Run(want)] for want in wanted], length)


def _as_whole(builder: BlockBuilder, value: Value, case: Case) -> Value:
    """Gives every device its shard of the whole; `value` has it as merged shards of its parts."""
    name, volume = case.operation.params["whole"], case.operation.params["parts"].volume
    axes = value.layout.axes(name)
    wanted, had = _positions(case, axes)
    runs, length = [[Run(want)] for want in wanted], -(-volume // len(wanted))
    return gather(builder, [value], name, axes, runs, length, owned=[had])


_LOCAL = {"split": "reshape", "merge": "reshape", "rename": "rename"}


def _local_params(case: Case) -> dict:
    op = case.operation
    return {"names": tuple(op.params["names"].items())} if op.name == "rename" else {}


def in_place(case: Case) -> Strategy:
    """Broadcast and transpose: local in the layout of the result."""
    op, (layout,) = case.operation, case.results
    (y,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        here = layout.add_partial(inputs[0].layout.partial_axes)
        return builder.add(op.name, inputs, [(y.shape, y.dtype, here)])

    return Strategy((layout.restrict(op.inputs[0].shape.names),), (layout,), emit, linear=op.linear)


def merge_order(case: Case) -> Strategies:
    """Merge: transposes the parts next to each other, major first, and reshapes."""
    return _offered(case, _merge_order)


def _merge_order(case: Case, between: _Between) -> Strategy:
    op, (operand, result, crossing) = case.operation, between
    (x,) = op.inputs
    parts = op.params["parts"]
    first = min(x.shape.position(part.name) for part in parts)
    rest = x.shape.without(parts.names)
    ordered = Shape([*rest[:first], *parts, *rest[first:]])

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (value,) = inputs
        if ordered != x.shape:
            value = builder.one("transpose", inputs, ordered, x.dtype, value.layout)
        here = result.add_partial(value.layout.partial_axes)
        joined = op.outputs[0].shape.get(op.params["whole"])
        if crossing:
            shards = case.mesh.extent(here.axes(joined.name))
            row = joined.size // parts[0].size
            joined = Dimension(joined.name, -(-parts[0].size // shards) * shards * row)
        merged = Shape([*rest[:first], joined, *rest[first:]])
        value = builder.one("reshape", (value,), merged, x.dtype, here)
        if crossing:
            value = _as_whole(builder, value, case)
            joined = op.outputs[0].shape.get(joined.name)
            merged = Shape([*rest[:first], joined, *rest[first:]])
            value = builder.one("reshape", (value,), merged, x.dtype, here)
        if merged != op.outputs[0].shape:
            value = builder.one("transpose", (value,), op.outputs[0].shape, x.dtype, here)
        return (value,)

    used = result.split_axes if crossing else frozenset()
    return Strategy((operand,), (result,), emit, linear=op.linear, fixed=used)


RULES: dict[str, Rule] = {
    "rename": reshape,
    "split": reshape,
    "merge": merge_order,
    "broadcast": in_place,
    "transpose": in_place,
}
