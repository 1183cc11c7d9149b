"""Calls of a user's own function: all backends check its results against the instruction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshdsl.lowering.parameters import Local, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import short


def call(instruction: Instruction, function: Callable, arrays: Sequence[Any]) -> list[Any]:
    """Runs a user's function on the arrays of one device; its errors name the line of the call.

    Raises:
        ValueError: the results do not fit the instruction; all differences are listed.
    """
    try:
        results = function(*arrays, **dict(parameters_of(instruction, Local)["params"]))
    except Exception as error:
        name, source = parameters_of(instruction, Local)["definition"].name, instruction.source
        arguments = ", ".join(f"{short(a.dtype)}{list(a.shape)}" for a in arrays)
        tensors = ", ".join(str(v.shape) for v in instruction.inputs)
        error.add_note(
            f"{name} was given {arguments}, one device's part of {tensors}\n"
            f"  at {source}  {source.code}".rstrip()
        )
        raise
    return checked(instruction, results)


def checked(instruction: Instruction, results: Any) -> list[Any]:
    """Returns the results of a function on one device, as a list.

    Raises:
        ValueError: their number, shapes or dtypes are not the instruction's; all differences
            are listed.
    """
    name, outputs = parameters_of(instruction, Local)["definition"].name, instruction.outputs
    arrays: Sequence[Any] = results if isinstance(results, list | tuple) else (results,)
    problems = []
    if len(arrays) != len(outputs):
        problems.append(f"{len(arrays)} arrays were returned for {len(outputs)} results")
    for number, (array, value) in enumerate(zip(arrays, outputs, strict=False), 1):
        expected = f"{short(value.dtype)}{list(value.local.sizes)}"
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            problems.append(f"result {number} is a {type(array).__name__}, not an array")
        elif tuple(array.shape) != value.local.sizes or array.dtype != value.dtype:
            problems.append(
                f"result {number} is {short(array.dtype)}{list(array.shape)}, but its shard of "
                f"{value.shape} is {expected}"
            )
    if problems:
        raise ValueError(
            f"{name}: "
            + "; ".join(problems)
            + f"\n  at {instruction.source}  {instruction.source.code}".rstrip()
        )
    return list(arrays)
