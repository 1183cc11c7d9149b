"""What attention instructions read: operands by name, with the masks that a split memory needs.

A split length or memory is counted from elsewhere on each device, so positions become operands.
Pads of a split memory are cleared, and hidden by a mask `present`. A step of a ring may also have a
mask `active`, one bool: where it is false nothing is seen, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.exchange import local_slice
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BOOL, INT32, BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import is_integer

if TYPE_CHECKING:
    from meshdsl.lowering.partition.attention.divisions import Attended, Division
    from meshdsl.lowering.partition.attention.schedule import Schedule, Step

POSITIONS = ("positions", "memory_positions")
Result = tuple[Shape, np.dtype, TensorLayout]


@dataclass(frozen=True)
class Operands:
    """What an attention instruction reads, by name; `q`, `k`, `v` and the names of masks."""

    values: Mapping[str, Value]
    params: Mapping[str, Any]
    ends: Sequence[Value] = ()  # of a gradient: result, log-sum-exp and arriving gradient

    def attend(self, builder: BlockBuilder, op: str, results: Sequence[Result]) -> list[Value]:
        """Writes the instruction."""
        masks = {name: v for name, v in self.values.items() if name not in ("q", "k", "v")}
        params = {**self.params, "given": tuple(masks)}
        inputs = [*(self.values[name] for name in "qkv"), *masks.values(), *self.ends]
        return list(builder.add(op, inputs, results, params))

    def at(self, step: Step, active: Value | None) -> Operands:
        """Returns these with the masks that a step needs."""
        values, params = dict(self.values), dict(self.params)
        if step.way != "positions":
            values = {name: v for name, v in values.items() if name not in POSITIONS}
            params["offset"] = step.offset
        if step.way == "all":
            params |= {"causal": False, "window": None, "offset": 0}
        if active is not None:
            values["active"] = active
        return Operands(values, params, self.ends)

    def of_a_part(self) -> Operands:
        """Returns these where the log-sum-exp is that of more than this memory."""
        return Operands(self.values, {**self.params, "part": True}, self.ends)


def for_parts(
    builder: BlockBuilder, given: Operands, problem: Attended, division: Division
) -> Operands:
    """Adds the positions of a split length or memory, which each device counts from elsewhere."""
    axes = division.splits.get(problem.memory, ())
    rows = division.splits.get(problem.length, ())
    if problem.causal or problem.window is not None:
        given = _with_positions(builder, given, problem, axes, rows)
    if builder.has_pads(problem.columns, axes):
        given = _without_pads(builder, given, problem, axes, True)
    return given


def for_ring(
    builder: BlockBuilder, given: Operands, problem: Attended, division: Division, steps: Schedule
) -> Operands:
    """Adds what a ring needs of positions, and makes blocks that have no pads by their type."""
    axes, dim = division.splits[problem.memory], problem.columns
    if steps.by_positions:
        rows = division.splits.get(problem.length, ())
        given = _with_positions(builder, given, problem, axes, rows, always=True)
    if not builder.has_pads(dim, axes):
        return given
    given = _without_pads(builder, given, problem, axes, steps.pads or axes != division.ring)
    devices = builder.mesh.extent(axes)
    longer = Dimension(dim.name, -(-dim.size // devices) * devices)
    values = {
        name: sized(builder, v, dim.name, axes, Shape(longer if d == dim else d for d in v.shape))
        for name, v in given.values.items()
    }
    return Operands(values, given.params, given.ends)


def _with_positions(
    builder: BlockBuilder,
    given: Operands,
    problem: Attended,
    axes: tuple[str, ...],
    rows: tuple[str, ...],
    always: bool = False,
) -> Operands:
    """Adds positions of the memory, split over `axes`, and of the queries, split over `rows`."""
    values = dict(given.values)
    if (axes or always) and "memory_positions" not in values:
        values["memory_positions"] = builder.positions(problem.columns, axes)
    if (rows or always) and "positions" not in values:
        dim = problem.queries.get(problem.length)
        index = builder.positions(dim, rows)
        if given.params["offset"]:
            start = builder.number(given.params["offset"], INT32)
            index = builder.one("add", (index, start), Shape([dim]), INT32, index.layout)
        values["positions"] = index
    return Operands(values, given.params, given.ends)


def _without_pads(
    builder: BlockBuilder, given: Operands, problem: Attended, axes: tuple[str, ...], hide: bool
) -> Operands:
    """Clears pads of the memory, and adds a mask that hides them.

    Positions of pads are left: they are past the last position, which may be what hides them.
    """
    dim = problem.columns
    values = {
        name: builder.mask_pads(v, [dim.name], 0)
        if v.shape.find(dim.name) and not is_integer(v.dtype)
        else v
        for name, v in given.values.items()
    }
    if hide:
        index = builder.positions(dim, axes)
        end = builder.number(dim.size, INT32)
        values["present"] = builder.one("less", (index, end), Shape([dim]), BOOL, index.layout)
    return Operands(values, given.params, given.ends)


def sized(
    builder: BlockBuilder, value: Value, name: str, axes: tuple[str, ...], shape: Shape
) -> Value:
    """Returns shards as they are, as those of a dim of another size, with more pads or fewer."""
    if value.shape == shape:
        return value
    starts = [0] * builder.mesh.extent(axes)
    return local_slice(builder, value, name, axes, starts, shape.get(name))


def whole_of(
    builder: BlockBuilder,
    mixed: Value,
    part: Value,
    axes: Sequence[str],
    left: TensorLayout,
    dtype: np.dtype,
) -> tuple[Value, Value]:
    """Weighs the results of parts of the memory as summands of the whole's.

    Args:
        part: the log-sum-exp of each part's scores.
        dtype: of the summands.

    Returns:
        The summands, and the log-sum-exp of all scores.
    """
    shape, wide, each = part.shape, part.dtype, part.layout
    whole = each.drop(axes)

    def reduced(value: Value, kind: str) -> Value:
        return builder.one("all_reduce", (value,), shape, wide, whole, axes=tuple(axes), kind=kind)

    def one(name: str, *operands: Value) -> Value:
        layout = each if any(v.layout == each for v in operands) else whole
        return builder.one(name, operands, shape, wide, layout)

    largest = reduced(part, "max")
    total = reduced(one("exp", one("subtract", part, largest)), "sum")
    sums = one("add", one("log", total), largest)
    weight = one("exp", one("subtract", part, sums))
    mixed = cast(builder, mixed, wide)
    weighed = builder.one("multiply", (mixed, weight), mixed.shape, wide, left)
    return cast(builder, weighed, dtype), sums


def cast(builder: BlockBuilder, value: Value, dtype: np.dtype) -> Value:
    """Returns a value in a dtype."""
    if value.dtype == dtype:
        return value
    return builder.one("cast", (value,), value.shape, dtype, value.layout)
