"""Factorizations and solvers of matrices: the order of dims before and after the computation.

Each framework computes with its own functions; numpy, the reference, shares only this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.common.machine import BaseMachine
from meshdsl.lowering.backends.contract import Emitter
from meshdsl.lowering.parameters import Matrices, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape

Arrays = Sequence[Any]


def factors(function: Callable[[Any], Any]) -> Emitter:
    """Returns the emitter of a function of matrices [..., rows, columns]."""

    def emit(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
        local, names = instruction.inputs[0].local, _matrix_dims(instruction)
        ordered = Shape([*local.without(names), *local.select(names)])
        results = function(align(machine.xp, inputs[0], local, ordered))
        if instruction.op == "cholesky":  # its result has the operand's dims, in that order
            return align(machine.xp, results, ordered, local)
        return tuple(results)

    return emit


def solve(function: Callable[[Instruction, Any, Any], Any]) -> Emitter:
    """Returns the emitter of a solver; right-hand sides are the columns of a matrix."""

    def emit(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
        xp, (left, right) = machine.xp, (value.local for value in instruction.inputs)
        (out,), (row, column) = instruction.outputs, left.select(_matrix_dims(instruction))
        batch = left.without([row.name, column.name])
        sides = right.without([row.name, *batch.names])
        a = align(xp, inputs[0], left, Shape([*batch, row, column]))
        b = align(xp, inputs[1], right, Shape([*batch, row, *sides]))
        front = (*b.shape[: xp.LEAD], *batch.sizes)
        x = function(instruction, a, xp.reshape(b, (*front, row.size, sides.volume)))
        x = xp.reshape(x, (*front, column.size, *sides.sizes))
        return align(xp, x, Shape([*batch, column, *sides]), out.local)

    return emit


def _matrix_dims(instruction: Instruction) -> list[str]:
    """Returns the names of the dims of rows and columns."""
    params = parameters_of(instruction, Matrices)
    return [params["rows"], params["columns"]]
