"""Flops: the arithmetic of one device.

A product counts two flops per multiplication and addition, an elementwise instruction one per
element of its result, a reduction and a scatter-add one per element of their operand. Moving and
converting data, comparing, counting and random bits count none. The body of a scan counts as often
as it runs.
"""

from __future__ import annotations

import math

from meshdsl.dtypes import is_float
from meshdsl.lowering.program import Instruction, SpmdProgram
from meshdsl.ops.elementwise import ELEMENTWISE

_ARITHMETIC = ELEMENTWISE - {"cast", "stop_gradient", "select"}
_PER_OPERAND = frozenset(["sum", "max", "min", "scatter_add"])


def flops(program: SpmdProgram) -> int:
    """Returns the floating-point operations of one device in one run of the program."""
    return sum(_flops(instruction) * times for instruction, times in program.block.walk())


def _flops(instruction: Instruction) -> int:
    out = instruction.outputs[0]
    if not is_float(out.dtype):
        return 0
    if instruction.op == "einsum":
        sizes = {dim.name: dim.size for value in instruction.inputs for dim in value.local}
        return 2 * math.prod(sizes.values())
    if instruction.op in _ARITHMETIC:
        return out.local.volume
    if instruction.op in _PER_OPERAND:
        return instruction.inputs[0].local.volume
    return 0
