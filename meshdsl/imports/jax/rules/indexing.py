"""Look-ups: `gather` and `scatter` in the forms that indexing, `take` and `take_along_axis` make.

Each index is looked up along one dim. A dim that indices count through (a ramp) pairs up with the
indices' own dim. Several indices become one, along a dim that is merged of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

import meshdsl.ops as ops
from meshdsl.imports.jax import conversion, inference
from meshdsl.imports.jax.arrays import Array, fit, plain, single, spare
from meshdsl.imports.jax.conversion import Unfit
from meshdsl.imports.jax.inference import Dims
from meshdsl.imports.jax.rules.positions import updated
from meshdsl.imports.jax.rules.ramps import ramp
from meshdsl.imports.jax.rules.rule import Rule, Table
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.tensor import Tensor

_CLIP = jax.lax.GatherScatterMode.CLIP
_FILL = jax.lax.GatherScatterMode.FILL_OR_DROP


@dataclass(frozen=True)
class _Plan:
    """Which positions of table, indices and the looked-up array belong together.

    Attributes:
        pairs: positions of the table and of the indices that pair up.
        along: positions of the table that indices choose from, each with the index's component.
        rows: positions of the indices, but for the last, in the order of the result.
        batch: of the result, those of `rows`.
        window: of the result, the others, each with the position of the table.
    """

    pairs: tuple[tuple[int, int], ...]
    along: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    batch: tuple[int, ...]
    window: tuple[tuple[int, int], ...]


def _plan(
    jaxpr: Any,
    table: Sequence[int],
    indices: Any,
    rank: int,
    offset: Sequence[int],
    removed: Sequence[int],
    mapped: Sequence[int],
    batching: Sequence[tuple[int, int]],
    chosen: Sequence[int],
) -> _Plan:
    """Returns the plan of a gather, or of a scatter with its updates as the result.

    Args:
        table: the table's sizes.
        rank: of the result.
        offset: the result's positions that are windows.
        removed: the table's positions that the result lacks.
        mapped: the table's position that each component of an index is along.
        chosen: the sizes of windows, by the table's positions.
    """
    shape = indices.aval.shape
    rows = tuple(range(len(shape) - 1))
    pairs, along = list(batching), []
    for component, place in enumerate(mapped):
        if chosen[place] == table[place] != 1:
            continue  # the window is all of it
        at = ramp(jaxpr, indices, component) if place in removed else None
        free = at is not None and at not in {row for _, row in pairs}
        if free and at is not None and at < len(rows) and shape[at] == table[place]:
            pairs.append((place, at))
        else:
            along.append((place, component))
    kept = [p for p in range(len(table)) if p not in removed and p not in {t for t, _ in batching}]
    batch = tuple(p for p in range(rank) if p not in offset)
    window = tuple(zip(offset, kept, strict=True))
    return _Plan(tuple(pairs), tuple(along), rows, batch, window)


def _gather_plan(jaxpr: Any, equation: Any) -> _Plan:
    table, indices = equation.invars
    numbers = equation.params["dimension_numbers"]
    batching = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return _plan(
        jaxpr,
        table.aval.shape,
        indices,
        len(equation.outvars[0].aval.shape),
        numbers.offset_dims,
        numbers.collapsed_slice_dims,
        numbers.start_index_map,
        tuple(batching),
        equation.params["slice_sizes"],
    )


def _scatter_plan(jaxpr: Any, equation: Any) -> _Plan:
    table, indices, updates = equation.invars
    numbers = equation.params["dimension_numbers"]
    removed = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [p for p in range(len(table.aval.shape)) if p not in removed]
    chosen = [1] * len(table.aval.shape)
    for place, window in zip(kept, numbers.update_window_dims, strict=True):
        chosen[place] = updates.aval.shape[window]
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    return _plan(
        jaxpr,
        table.aval.shape,
        indices,
        len(updates.aval.shape),
        numbers.update_window_dims,
        numbers.inserted_window_dims,
        numbers.scatter_dims_to_operand_dims,
        tuple(batching),
        chosen,
    )


# Inference.


def _pair(site: inference.Site, a: Dims, p: int, b: Dims, q: int) -> None:
    site.match(a.pick([p]), b.pick([q]))


def _infer_gather(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    table, indices = operands
    plan = _gather_plan(site.frame.jaxpr, site.equation)
    sizes, own = site.sizes(), site.operand_sizes()
    for place, row in plan.pairs:
        _pair(site, table, place, indices, row)
    nodes, weak = [0] * len(sizes), [False] * len(sizes)
    paired = {row: place for place, row in plan.pairs}
    for place, row in zip(plan.batch, plan.rows, strict=True):
        nodes[place] = indices.nodes[row]
        weak[place] = indices.weak[row]
        if weak[place] and row in paired:
            nodes[place], weak[place] = table.nodes[paired[row]], table.weak[paired[row]]
    for place, mine in plan.window:
        same = own[mine] == sizes[place]
        node = table.nodes[mine]
        nodes[place] = node if same else site.new(sizes[place], like=node)
        weak[place] = table.weak[mine]
    return [Dims(tuple(nodes), tuple(weak))]


def _infer_scatter(site: inference.Site, operands: list[Dims]) -> list[Dims]:
    table, indices, updates = operands
    plan = _scatter_plan(site.frame.jaxpr, site.equation)
    sizes, own = site.operand_sizes(2), site.sizes()
    for place, row in plan.pairs:
        _pair(site, table, place, indices, row)
    for place, row in zip(plan.batch, plan.rows, strict=True):
        _pair(site, updates, place, indices, row)
    for place, mine in plan.window:
        if sizes[place] == own[mine]:
            _pair(site, updates, place, table, mine)
    return [Dims(table.nodes, (False,) * len(table.nodes))]


# Conversion.


def _components(indices: Array, labels: Sequence[str], count: int) -> list[Array]:
    """Returns each component of the indices, without the last position."""
    indices = single(indices, labels)
    last = len(indices.sizes) - 1
    rest = range(last)
    if indices.places[last] is None:
        return [indices.pick(rest)] * count
    name = indices.name(last)
    parts = []
    for number in range(count):
        tensor = ops.index(indices.tensor, name, number)
        parts.append(Array(tensor, indices.places[:last], indices.sizes[:last]))
    return parts


def _gathered(site: conversion.Site, operands: list[Array]) -> list[Array]:
    plan = _gather_plan(site.frame.jaxpr, site.equation)
    chosen = site.params["slice_sizes"]
    labels, mode = site.outputs[0], site.params["mode"]
    table = operands[0]
    starts = _components(
        operands[1], site.inputs[1], len(site.params["dimension_numbers"].start_index_map)
    )
    moved = [(p, c) for p, c in plan.along if chosen[p] != 1]
    if moved and plan.rows:
        raise Unfit("of windows at several places at once")
    if moved:
        return [_window(site, plan, table, starts, chosen)]
    names = _table_names(plan, labels, site.inputs[0])
    needed = [p for p, _ in (*plan.pairs, *plan.along)]
    table = plain(table, names, needed)
    rows = [labels[p] for p in plan.batch]
    paired = [row for _, row in plan.pairs]
    starts = [plain(fit(s, rows), rows, paired) for s in starts]
    if not plan.along:
        tensor = table.tensor
        return [_result(plan, tensor, table, starts, site.sizes())]
    index, inside, dim, tensor = _one_index(table, plan, starts, mode)
    tensor = ops.take(tensor, index, dim)
    if mode == _FILL and inside is not None:
        tensor = _fill(tensor, inside, _filler(site.params["fill_value"], tensor.dtype))
    return [_result(plan, tensor, table, starts, site.sizes())]


def _table_names(plan: _Plan, labels: Sequence[str], given: Sequence[str]) -> list[str]:
    """Returns names for the table's dims: those of the result, and their own for what is chosen."""
    names = [""] * len(given)
    for place, mine in plan.window:
        names[mine] = labels[place]
    for mine, row in plan.pairs:
        names[mine] = labels[plan.batch[row]]
    used = {*labels, *names}
    for mine, name in enumerate(names):
        along = mine in {p for p, _ in plan.along}
        if not name or along:
            name = given[mine]
            while name in used:
                name += "_"
            used.add(name)
            names[mine] = name
    return names


def _one_index(
    table: Array, plan: _Plan, starts: Sequence[Array], mode: Any
) -> tuple[Tensor, Tensor | None, str, Tensor]:
    """Returns one index, whether it is inside, the dim that it is along, and the table."""
    index: Tensor | None = None
    inside: Tensor | None = None
    names = []
    for place, component in plan.along:
        size = table.sizes[place]
        part = starts[component].tensor
        if mode == _CLIP:
            part = ops.clip(part, 0, size - 1)
        elif mode == _FILL or len(plan.along) > 1:
            fits = ops.logical_and(ops.greater_equal(part, 0), ops.less(part, size))
            inside = fits if inside is None else ops.logical_and(inside, fits)
        index = part if index is None else ops.add(ops.multiply(index, size), part)
        names.append(table.name(place))
    assert index is not None
    tensor, dim = table.tensor, names[0]
    if len(names) > 1:
        dim = spare("_".join(names), tensor)
        tensor = ops.merge(tensor, names, dim)
        index = index if inside is None else ops.where(inside, index, -1)
    return index, inside, dim, tensor


def _fill(tensor: Tensor, inside: Tensor, value: Any) -> Tensor:
    """Returns looked-up elements, which are zeros outside of the table, with a value there.

    Numbers are added, so that the result may stay a partial sum, as that of the look-up may.
    """
    if tensor.dtype == np.bool_:
        return ops.where(inside, tensor, value)
    return ops.add(tensor, ops.where(inside, ops.zeros([], tensor.dtype), value))


def _filler(value: Any, dtype: np.dtype) -> Any:
    """Returns what JAX reads outside of a table."""
    if value is not None:
        return np.asarray(value).astype(dtype)[()].item()
    if dtype == np.bool_:
        return True
    if dtype.kind == "i":
        return int(np.iinfo(dtype).min)
    return int(np.iinfo(dtype).max) if dtype.kind == "u" else float("nan")


def _result(
    plan: _Plan, tensor: Tensor, table: Array, starts: Sequence[Array], sizes: tuple[int, ...]
) -> Array:
    places: list[Any] = [None] * len(sizes)
    have = set(tensor.shape.names)
    pairs = {row: table.places[place] for place, row in plan.pairs}
    for place, row in zip(plan.batch, plan.rows, strict=True):
        options = [pairs.get(row), *(s.places[row] for s in starts)]
        places[place] = next((o for o in options if o is not None and set(o) <= have), None)
    for place, mine in plan.window:
        names = table.places[mine]
        chosen = mine in {p for p, _ in plan.along}
        places[place] = None if chosen else names
    return Array(tensor, tuple(places), sizes)


def _window(
    site: conversion.Site, plan: _Plan, table: Array, starts: Sequence[Array], sizes: Sequence[int]
) -> Array:
    """Returns one window, at places along several dims."""
    table = single(table, site.inputs[0])
    tensor = table.tensor
    inside = _inside(site.params["mode"], plan, table, starts, sizes)
    gone = []
    for place, component in plan.along:
        if table.places[place] is None:
            continue
        start = starts[component]
        where = int(start.number) if start.number is not None else start.tensor
        tensor = ops.dynamic_slice(tensor, table.name(place), where, sizes[place])
        if sizes[place] == 1:
            tensor = ops.index(tensor, table.name(place), 0)
            gone.append(place)
    if inside is not True:
        tensor = ops.where(inside, tensor, _filler(site.params["fill_value"], tensor.dtype))
    places: list[Any] = [None] * len(site.sizes())
    for place, mine in plan.window:
        places[place] = None if mine in gone else table.places[mine]
    return Array(tensor, tuple(places), site.sizes())


def _inside(
    mode: Any, plan: _Plan, table: Array, starts: Sequence[Array], sizes: Sequence[int]
) -> Tensor | bool:
    """Returns whether a window is inside of the table; True if the mode lets it be moved there.

    Args:
        sizes: those of the window, by the table's positions.
    """
    inside: Tensor | bool = True
    for place, component in plan.along if mode == _FILL else ():
        start, last = starts[component], table.sizes[place] - sizes[place]
        if start.number is not None:
            if not 0 <= start.number <= last:
                return False
            continue
        fits = ops.logical_and(start.tensor >= 0, start.tensor <= last)
        inside = fits if inside is True else ops.logical_and(inside, fits)
    return inside


def _scattered(mode: str) -> Rule:
    def convert(site: conversion.Site, operands: list[Array]) -> list[Array]:
        plan = _scatter_plan(site.frame.jaxpr, site.equation)
        labels, given = site.outputs[0], site.inputs[2]
        count = len(site.params["dimension_numbers"].scatter_dims_to_operand_dims)
        x, updates = plain(operands[0], labels), operands[2]
        starts = _components(operands[1], site.inputs[1], count)
        own = dict((mine, place) for place, mine in plan.window)
        wide = [p for p, _ in plan.along if p in own and updates.sizes[own[p]] != 1]
        if wide or not plan.along or (mode == "mul" and not plan.rows):
            return [_block(site, plan, x, updates, starts, mode, bool(wide))]
        if mode == "mul":
            raise Unfit("of several products")
        names = list(given)
        for place, mine in plan.window:
            names[place] = labels[mine]
        pairs = {row: place for place, row in plan.pairs}
        for place, row in zip(plan.batch, plan.rows, strict=True):
            if row in pairs:
                names[place] = labels[pairs[row]]
            else:
                while names[place] in labels:
                    names[place] += "_"
                while names[place] in [n for q, n in enumerate(names) if q != place]:
                    names[place] += "_"
        rows = [names[p] for p in plan.batch]
        starts = [plain(fit(s, rows), rows) for s in starts]
        gone = [place for place, mine in plan.window if mine in dict(plan.along)]
        updates = plain(updates, names)
        tensor = updates.tensor
        for place in gone:
            tensor = ops.index(tensor, updates.name(place), 0)
        index, _, dim, table = _one_index(x, plan, starts, site.params["mode"])
        result = ops.scatter(table, index, tensor, dim, mode)
        if len(plan.along) > 1:
            dims = [Dimension(labels[p], x.sizes[p]) for p, _ in plan.along]
            result = ops.split(result, dim, dims)
        return [replace(x, tensor=result, number=None)]

    return Rule(_infer_scatter, convert)


def _block(
    site: conversion.Site,
    plan: _Plan,
    x: Array,
    updates: Array,
    starts: Sequence[Array],
    mode: str,
    wide: bool,
) -> Array:
    """Writes one block, as `x.at[:, 2:5].set(...)` does."""
    if wide and plan.rows:
        raise Unfit("of windows at several places at once")
    labels = site.outputs[0]
    names = list(site.inputs[2])
    for place, mine in plan.window:
        names[place] = labels[mine]
    pairs = {row: place for place, row in plan.pairs}
    for place, row in zip(plan.batch, plan.rows, strict=True):
        names[place] = labels[pairs[row]] if row in pairs else names[place]
    update = plain(updates, names).tensor
    where = []
    absent = []
    own = {mine: place for place, mine in plan.window}
    for mine, component in plan.along:
        start = starts[component]
        at = int(start.number) if start.number is not None else start.tensor
        size = updates.sizes[own[mine]] if mine in own else 1
        if mine not in own:
            absent.append(Dimension(labels[mine], 1))
        where.append((labels[mine], at, size))
    if absent:
        update = ops.broadcast(update, [*absent, *update.shape])
    old = x.tensor
    for name, at, size in where:
        old = ops.dynamic_slice(old, name, at, size)
    combined = {
        "set": lambda a, b: b,
        "add": ops.add,
        "mul": ops.multiply,
        "max": ops.maximum,
        "min": ops.minimum,
    }[mode](old, update)
    chosen = [updates.sizes[own[p]] if p in own else 1 for p in range(len(x.sizes))]
    inside = _inside(site.params["mode"], plan, x, starts, chosen)
    if inside is not True:  # a block that is not inside is not written
        combined = ops.where(inside, combined, old)
    return replace(x, tensor=updated(x.tensor, combined, where), number=None)


TABLE: Table = {
    "gather": Rule(_infer_gather, _gathered),
    "scatter": _scattered("set"),
    "scatter-add": _scattered("add"),
    "scatter-max": _scattered("max"),
    "scatter-min": _scattered("min"),
    "scatter-mul": _scattered("mul"),
}
