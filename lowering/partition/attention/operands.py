"""Operands of attention instructions, by name, with the masks that a split memory needs.

Each device has other positions of a split length or memory, so positions become operands. Pads of a
split memory are set to zero, and hidden by a mask `present`. A step of a ring may also have a mask
`active`, one bool: if it is false, the device attends to nothing and computes nothing.
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
    """The operands of an attention instruction: `q`, `k`, `v` and masks, by name.

    Attributes:
        gradient_inputs: of a gradient: result, log-sum-exp, and gradient of the result.
    """

    values: Mapping[str, Value]
    params: Mapping[str, Any]
    gradient_inputs: Sequence[Value] = ()

    def attend(self, builder: BlockBuilder, op: str, results: Sequence[Result]) -> list[Value]:
        """Writes the instruction."""
        masks = {name: v for name, v in self.values.items() if name not in ("q", "k", "v")}
        params = {**self.params, "given": tuple(masks)}
        inputs = [*(self.values[name] for name in "qkv"), *masks.values(), *self.gradient_inputs]
        return list(builder.add(op, inputs, results, params))

    def at(self, step: Step, active: Value | None) -> Operands:
        """Returns these operands with the masks that a step needs."""
        values, params = dict(self.values), dict(self.params)
        if step.way != "positions":
            values = {name: v for name, v in values.items() if name not in POSITIONS}
            params["offset"] = step.offset
        if step.way == "all":
            params |= {"causal": False, "window": None, "offset": 0}
        if active is not None:
            values["active"] = active
        return Operands(values, params, self.gradient_inputs)


def for_parts(
    builder: BlockBuilder, operands: Operands, problem: Attended, division: Division
) -> Operands:
    """Adds the positions of a split length or memory, which differ among devices."""
    axes = division.splits.get(problem.memory, ())
    rows = division.splits.get(problem.length, ())
    if problem.causal or problem.window is not None:
        operands = _with_positions(builder, operands, problem, axes, rows)
    if builder.has_pads(problem.columns, axes):
        operands = _without_pads(builder, operands, problem, axes, True)
    return operands


def for_ring(
    builder: BlockBuilder,
    operands: Operands,
    problem: Attended,
    division: Division,
    steps: Schedule,
) -> Operands:
    """Adds the positions that a ring needs, and lengthens the memory to equal blocks."""
    axes, dim = division.splits[problem.memory], problem.columns
    if steps.by_positions:
        rows = division.splits.get(problem.length, ())
        operands = _with_positions(builder, operands, problem, axes, rows, always=True)
    if not builder.has_pads(dim, axes):
        return operands
    operands = _without_pads(builder, operands, problem, axes, steps.pads or axes != division.ring)
    devices = builder.mesh.extent(axes)
    longer = Dimension(dim.name, -(-dim.size // devices) * devices)
    values = {
        name: sized(builder, v, dim.name, axes, Shape(longer if d == dim else d for d in v.shape))
        for name, v in operands.values.items()
    }
    return Operands(values, operands.params, operands.gradient_inputs)


def _with_positions(
    builder: BlockBuilder,
    operands: Operands,
    problem: Attended,
    axes: tuple[str, ...],
    rows: tuple[str, ...],
    always: bool = False,
) -> Operands:
    """Adds positions of the memory, split over `axes`, and of the queries, split over `rows`."""
    values = dict(operands.values)
    if (axes or always) and "memory_positions" not in values:
        values["memory_positions"] = builder.positions(problem.columns, axes)
    if (rows or always) and "positions" not in values:
        dim = problem.queries.get(problem.length)
        index = builder.positions(dim, rows)
        if operands.params["offset"]:
            start = builder.number(operands.params["offset"], INT32)
            index = builder.one("add", (index, start), Shape([dim]), INT32, index.layout)
        values["positions"] = index
    return Operands(values, operands.params, operands.gradient_inputs)


def _without_pads(
    builder: BlockBuilder, operands: Operands, problem: Attended, axes: tuple[str, ...], hide: bool
) -> Operands:
    """Sets pads of the memory to zero, and adds a mask that hides them.

    Positions of pads stay as they are: they lie past the last position, so `causal` may hide them.
    """
    dim = problem.columns
    values = {
        name: builder.mask_pads(v, [dim.name], 0)
        if v.shape.find(dim.name) and not is_integer(v.dtype)
        else v
        for name, v in operands.values.items()
    }
    if hide:
        index = builder.positions(dim, axes)
        end = builder.number(dim.size, INT32)
        values["present"] = builder.one("less", (index, end), Shape([dim]), BOOL, index.layout)
    return Operands(values, operands.params, operands.gradient_inputs)


def sized(
    builder: BlockBuilder, value: Value, name: str, axes: tuple[str, ...], shape: Shape
) -> Value:
    """Returns a value whose dim has another size and the same shards, with more or fewer pads."""
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
    """Weighs the results of parts of the memory, so that their sum is the result of all of it.

    Args:
        mixed: the result of each part.
        part: the log-sum-exp of each part's scores.
        dtype: of the returned partial sums.

    Returns:
        The partial sums, and the log-sum-exp of all scores.
    """
    shape, wide, each = part.shape, part.dtype, part.layout
    complete = each.drop(axes)

    def reduced(value: Value, kind: str) -> Value:
        return builder.one(
            "all_reduce", (value,), shape, wide, complete, axes=tuple(axes), kind=kind
        )

    def one(name: str, *operands: Value) -> Value:
        layout = each if any(v.layout == each for v in operands) else complete
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
