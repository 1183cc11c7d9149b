"""Partition rules of rename, split, merge, broadcast, transpose, and barrier.

All of them are local wherever the layouts of operand and result allow it: a split dim gives its
axes to its parts, major first, as far as the sizes divide. Where the two layouts disagree, the
rule keeps one of them, whichever costs fewer bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.exchange import Interval, Run, bounds, gather
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.partition.plan import Case, Plan
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape


def axes_of_parts(axes: Sequence[str], parts: Shape, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Hands the axes of a dim to the parts it is split into; axes that do not fit are left out."""
    given: dict[str, tuple[str, ...]] = {part.name: () for part in parts}
    position, left = 0, parts[0].size
    for axis in axes:
        size = mesh.sizes[axis]
        while left == 1 and size > 1 and position + 1 < len(parts):
            position += 1
            left = parts[position].size
        if left % size:
            break
        given[parts[position].name] += (axis,)
        left //= size
    return given


def axes_of_whole(layout: TensorLayout, parts: Shape, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Returns, of the axes of some dims, those that their merged dim can keep, by part.

    A part's axes can stay only if they divide it and every part before it is split to size 1.
    """
    kept: dict[str, tuple[str, ...]] = {part.name: () for part in parts}
    layout = layout.restrict(parts.names).even(parts, mesh)
    for part in parts:
        kept[part.name] = layout.axes(part.name)
        if mesh.extent(kept[part.name]) != part.size:
            break
    return kept


def _split_ends(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout]:
    """Returns operand and result layout of a `split`, one of them as asked for."""
    op = case.operation
    whole, parts = op.params["whole"], op.params["parts"]
    return _ends(case.operands[0], case.results[0], whole, parts, case.mesh, led_by_result)


def _merge_ends(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout]:
    """Returns operand and result layout of a `merge`, one of them as asked for."""
    op = case.operation
    whole, parts = op.params["whole"], op.params["parts"]
    one, several = _ends(
        case.results[0], case.operands[0], whole, parts, case.mesh, not led_by_result
    )
    return several, one


def _ends(
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


def _rename_ends(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout]:
    names = case.operation.params["names"]
    if led_by_result:
        return case.results[0].rename({v: k for k, v in names.items()}), case.results[0]
    return case.operands[0], case.operands[0].rename(names)


_ENDS = {"split": _split_ends, "merge": _merge_ends, "rename": _rename_ends}


def led_by_operand(case: Case) -> TensorLayout:
    """Returns where a rename, split or merge leaves its result if it moves nothing before."""
    return _ENDS[case.operation.name](case, False)[1]


def _crossing(case: Case, led_by_result: bool) -> tuple[TensorLayout, TensorLayout] | None:
    """Returns layouts of operand and result in which the whole is split as its first part is.

    Where the sizes do not divide, shards of the two end at different places, and what lies between
    is exchanged. None, if there is nothing to split.
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


def _held(case: Case, axes: Sequence[str]) -> tuple[list[Interval], list[Interval]]:
    """Returns the positions of the whole that each device has, as a whole and as parts."""
    parts = case.operation.params["parts"]
    row = parts.volume // parts[0].size
    pieces = bounds(parts[0].size, axes, case.mesh)
    return bounds(parts.volume, axes, case.mesh), [Interval(a * row, b * row) for a, b in pieces]


def _boundary_cost(case: Case, ends: tuple[TensorLayout, TensorLayout]) -> float:
    """Returns the bytes that some device needs of others in a crossing."""
    op, split = case.operation, case.operation.name == "split"
    where, x = (ends[0], op.inputs[0]) if split else (ends[1], op.outputs[0])
    whole, parts = _held(case, where.axes(op.params["whole"]))
    have, want = (whole, parts) if split else (parts, whole)
    missing = max(w.size - w.meet(h).size for w, h in zip(want, have, strict=True))
    row = where.local(x.shape.without([op.params["whole"]]), case.mesh).volume
    return missing * row * x.dtype.itemsize


def _chosen(case: Case) -> tuple[TensorLayout, TensorLayout, bool]:
    """Returns the layouts of operand and result, and whether shards have to be exchanged."""
    op = case.operation

    def cost(ends: tuple[TensorLayout, TensorLayout]) -> float:
        return _cost_around(case, ends)

    local = min((_ENDS[op.name](case, led) for led in (True, False)), key=cost)
    if op.name == "rename" or not cost(local):
        return *local, False
    crossing = [ends for led in (True, False) if (ends := _crossing(case, led))]
    best = min(crossing, key=lambda e: cost(e) + _boundary_cost(case, e), default=local)
    if best != local and cost(best) + _boundary_cost(case, best) < cost(local):
        return *best, True
    return *local, False


def _cost_around(case: Case, ends: tuple[TensorLayout, TensorLayout]) -> float:
    """Returns the bytes that a device sends before and after, to compute between two layouts."""
    (x,), (y,), size = case.operation.inputs, case.operation.outputs, case.operation.inputs[0].dtype
    there = reshard_cost(x.shape, size.itemsize, case.operands[0], ends[0], case.mesh)
    return there + reshard_cost(y.shape, size.itemsize, ends[1], case.results[0], case.mesh)


def bytes_sent(case: Case) -> float:
    """Returns the bytes that a device sends for a rename, split or merge."""
    operand, result, crossing = _chosen(case)
    boundary = _boundary_cost(case, (operand, result)) if crossing else 0
    return _cost_around(case, (operand, result)) + boundary


def reshape(case: Case) -> Plan:
    """Split, merge and rename: the cheaper of keeping the operand's and the result's layout."""
    op = case.operation
    (y,) = op.outputs
    operand, result, crossing = _chosen(case)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (value,) = inputs
        if crossing:
            value = _as_parts(builder, value, case)
        here = result.add_partial(value.layout.partial_axes)
        return builder.add(
            _LOCAL[op.name], (value,), [(y.shape, y.dtype, here)], _local_params(case)
        )

    used = result.split_axes if crossing else frozenset()
    return Plan((operand,), (result,), emit, linear=(0,), fixed=used)


def _as_parts(builder: BlockBuilder, value: Value, case: Case) -> Value:
    """Gives every device the positions of the whole that make up its shard of the first part."""
    name, parts = case.operation.params["whole"], case.operation.params["parts"]
    axes = value.layout.axes(name)
    _, wanted = _held(case, axes)
    length = -(-parts[0].size // len(wanted)) * (parts.volume // parts[0].size)
    return gather(builder, [value], name, axes, [[Run(want)] for want in wanted], length)


def _as_whole(builder: BlockBuilder, value: Value, case: Case) -> Value:
    """Gives every device its shard of the whole; `value` has it as merged shards of its parts."""
    name, volume = case.operation.params["whole"], case.operation.params["parts"].volume
    axes = value.layout.axes(name)
    wanted, held = _held(case, axes)
    runs, length = [[Run(want)] for want in wanted], -(-volume // len(wanted))
    return gather(builder, [value], name, axes, runs, length, held=[held])


_LOCAL = {"split": "reshape", "merge": "reshape", "rename": "rename"}


def _local_params(case: Case) -> dict:
    op = case.operation
    return {"names": tuple(op.params["names"].items())} if op.name == "rename" else {}


def in_place(case: Case) -> Plan:
    """Broadcast and transpose: local in the layout of the result."""
    op, (layout,) = case.operation, case.results
    (y,) = op.outputs

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        here = layout.add_partial(inputs[0].layout.partial_axes)
        return builder.add(op.name, inputs, [(y.shape, y.dtype, here)])

    return Plan((layout.restrict(op.inputs[0].shape.names),), (layout,), emit, linear=(0,))


def merge_order(case: Case) -> Plan:
    """Merge, whose parts must lie next to each other, major first, before they become one."""
    operand, result, crossing = _chosen(case)
    op = case.operation
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
    return Plan((operand,), (result,), emit, linear=(0,), fixed=used)


def barrier(case: Case) -> Plan:
    """A barrier leaves everything where it is."""

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        results = [(v.shape, v.dtype, v.layout) for v in inputs]
        return builder.add("barrier", inputs, results, {"id": id(case.operation)})

    return Plan(case.operands, case.operands, emit)


RULES = {
    "rename": reshape,
    "split": reshape,
    "merge": merge_order,
    "broadcast": in_place,
    "transpose": in_place,
    "barrier": barrier,
}
