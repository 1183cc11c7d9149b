"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.backends.numpy.operations.direction import in_rows
from meshdsl.lowering.backends.numpy.operations.scaling import frexp, out_of_range, products, scaled
from meshdsl.lowering.parameters import Cumulative, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity


def _shifted(x: np.ndarray, fill: float) -> np.ndarray:
    """Shifts rows by one position; the first row becomes `fill`."""
    return np.concatenate([np.full_like(x[:1], fill), x[:-1]])


def _cumulative(function: Any, kind: str) -> Emitter:
    """Returns the emitter of a cumulative function; `kind` names its neutral element."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        (x,), params = inputs, parameters_of(instruction, Cumulative)
        at = instruction.inputs[0].local.position(params["dim"]) + 1
        rows = np.moveaxis(wide(x), at, 0)[:: -1 if params["reverse"] else 1]
        result = function.accumulate(rows, axis=0, dtype=rows.dtype)
        if params["exclusive"]:
            result = _shifted(result, identity(kind, x.dtype))
        result = result[:: -1 if params["reverse"] else 1]
        return np.moveaxis(result, 0, at).astype(x.dtype)

    return emit


def _product(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns the products of all elements up to each position, times the start if there is one."""
    (x, *start), params = inputs, parameters_of(instruction, Cumulative)
    rows, back = in_rows(instruction, 0, x)
    first = scaled(*start) if len(start) == 2 else start[0] if start else np.ones_like(rows[0])
    result = np.concatenate([first[None], rows])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        result = np.multiply.accumulate(result, axis=0, dtype=x.dtype)
    # Where a product may have left the range, multiply mantissas and add exponents instead.
    if out_of_range(result):
        begin = start or frexp(first)
        parts = (np.concatenate([b[None], v]) for b, v in zip(begin, frexp(rows), strict=True))
        result = scaled(*products(*parts))
    return back(result[:-1] if params["exclusive"] else result[1:])


def _products_before(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[np.ndarray]:
    """Returns the product of all rows before each row; for floats, mantissas and exponents."""
    rows, backs = zip(*(in_rows(instruction, 0, x) for x in inputs), strict=True)
    if len(rows) == 1:
        return [backs[0](_shifted(np.multiply.accumulate(rows[0], dtype=rows[0].dtype), 1))]
    # 0.5 * 2**1 is 1, the product of no rows.
    columns = zip(backs, products(*rows), (0.5, 1), strict=True)
    return [back(_shifted(v, fill)) for back, v, fill in columns]


def _products_of_others(
    mantissa: np.ndarray, exponent: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mantissas and exponents of the products of all other rows."""
    forwards = products(mantissa, exponent)
    before = [_shifted(v, fill) for v, fill in zip(forwards, (0.5, 1), strict=True)]
    backwards = products(mantissa[::-1], exponent[::-1])
    after = [_shifted(v, fill)[::-1] for v, fill in zip(backwards, (0.5, 1), strict=True)]
    with np.errstate(invalid="ignore"):
        result, more = frexp(before[0] * after[0])
    return result, before[1] + after[1] + more


def _products_besides(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[np.ndarray]:
    """Returns for each row, given by mantissas and exponents, the product of all other rows."""
    at = instruction.inputs[0].local.position(*parameters_of(instruction, Reduction)["over"]) + 1
    parts = _products_of_others(*(np.moveaxis(v, at, 0) for v in inputs))
    return [np.moveaxis(v, 0, at) for v in parts]


def _prod_others(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """Returns the products of all other elements along some dims, times a number if given."""
    (x, *number), local = inputs, instruction.inputs[0].local
    over = [local.position(name) + 1 for name in parameters_of(instruction, Reduction)["over"]]
    moved = np.moveaxis(x, over, range(len(over)))
    rows = moved.reshape(-1, *moved.shape[len(over) :])
    mantissa, exponent = _products_of_others(*frexp(rows))
    if number:
        with np.errstate(invalid="ignore"):
            mantissa, exponent = mantissa * number[0], exponent + number[1]
    result = scaled(mantissa, exponent).reshape(moved.shape)
    return np.moveaxis(result, range(len(over)), over)


EMITTERS: Mapping[str, Emitter] = {
    "cumsum": _cumulative(np.add, "sum"),
    "cumprod": _product,
    "cumprod_from": _product,
    "cummax": _cumulative(np.maximum, "max"),
    "cummin": _cumulative(np.minimum, "min"),
    "products_before": _products_before,
    "products_besides": _products_besides,
    "prod_others": _prod_others,
}
