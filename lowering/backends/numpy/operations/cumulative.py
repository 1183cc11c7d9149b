"""Cumulative instructions along one dim of a shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.backends.numpy.operations.direction import in_rows
from meshdsl.lowering.backends.numpy.operations.scaling import lost, parted, products, scaled
from meshdsl.lowering.parameters import Cumulative, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import identity


def _shifted(x: np.ndarray, fill: float) -> np.ndarray:
    """Moves everything one place on along the first dim, whose first place gets `fill`."""
    return np.concatenate([np.full_like(x[:1], fill), x[:-1]])


def _cumulative(function: Any, kind: str) -> Emitter:
    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
        (x,), params = inputs, parameters_of(instruction, Cumulative)
        at = instruction.inputs[0].local.position(params["dim"]) + 1
        rows = np.moveaxis(wide(x), at, 0)[:: -1 if params["reverse"] else 1]
        found = function.accumulate(rows, axis=0, dtype=rows.dtype)
        if params["exclusive"]:
            found = _shifted(found, identity(kind, x.dtype))
        found = found[:: -1 if params["reverse"] else 1]
        return np.moveaxis(found, 0, at).astype(x.dtype)

    return emit


def _product(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """The products of a start, if there is one, and all elements up to a place."""
    (x, *start), params = inputs, parameters_of(instruction, Cumulative)
    rows, back = in_rows(instruction, 0, x)
    first = scaled(*start) if len(start) == 2 else start[0] if start else np.ones_like(rows[0])
    found = np.concatenate([first[None], rows])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        found = np.multiply.accumulate(found, axis=0, dtype=x.dtype)
    if lost(found):
        begin = start or parted(first)
        parts = (np.concatenate([b[None], v]) for b, v in zip(begin, parted(rows), strict=True))
        found = scaled(*products(*parts))
    return back(found[:-1] if params["exclusive"] else found[1:])


def _products_before(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[np.ndarray]:
    """Before each row the product of those up to there; of floats, mantissas and exponents."""
    rows, backs = zip(*(in_rows(instruction, 0, x) for x in inputs), strict=True)
    if len(rows) == 1:
        return [backs[0](_shifted(np.multiply.accumulate(rows[0], dtype=rows[0].dtype), 1))]
    every = zip(backs, products(*rows), (0.5, 1), strict=True)
    return [back(_shifted(v, fill)) for back, v, fill in every]


def _besides(mantissa: np.ndarray, exponent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mantissas and exponents of the products of all other rows."""
    ahead = products(mantissa, exponent)
    before = [_shifted(v, one) for v, one in zip(ahead, (0.5, 1), strict=True)]
    after = products(mantissa[::-1], exponent[::-1])
    back = [_shifted(v, one)[::-1] for v, one in zip(after, (0.5, 1), strict=True)]
    with np.errstate(invalid="ignore"):
        found, more = parted(before[0] * back[0])
    return found, before[1] + back[1] + more


def _products_besides(
    machine: Machine, instruction: Instruction, inputs: Arrays
) -> Sequence[np.ndarray]:
    """Of rows of mantissas and exponents the product of all others."""
    at = instruction.inputs[0].local.position(*parameters_of(instruction, Reduction)["over"]) + 1
    found = _besides(*(np.moveaxis(v, at, 0) for v in inputs))
    return [np.moveaxis(v, 0, at) for v in found]


def _prod_others(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    """The products of all other elements along some dims, and of a number if there is one."""
    (x, *number), local = inputs, instruction.inputs[0].local
    over = [local.position(name) + 1 for name in parameters_of(instruction, Reduction)["over"]]
    moved = np.moveaxis(x, over, range(len(over)))
    rows = moved.reshape(-1, *moved.shape[len(over) :])
    mantissa, exponent = _besides(*parted(rows))
    if number:
        with np.errstate(invalid="ignore"):
            mantissa, exponent = mantissa * number[0], exponent + number[1]
    found = scaled(mantissa, exponent).reshape(moved.shape)
    return np.moveaxis(found, range(len(over)), over)


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
