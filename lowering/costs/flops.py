"""Flops: the arithmetic of one device.

`arithmetic` has the flops of an instruction of each kind. The body of a scan counts as often as it
runs, the body of a while loop once. A cond counts the branch with more flops.
"""

from __future__ import annotations

from meshdsl.lowering.instructions import kind_of
from meshdsl.lowering.program import Instruction, SpmdProgram
from meshdsl.tensors.dtypes import is_differentiable


def flops(program: SpmdProgram) -> int:
    """Returns the floating-point operations of one device in one run of the program."""
    counted = program.block.counted(instruction_flops)
    return sum(instruction_flops(instruction) * times for instruction, times in counted)


def instruction_flops(instruction: Instruction) -> int:
    """Returns the floating-point operations of one instruction, without those of its bodies."""
    if not is_differentiable(instruction.outputs[0].dtype):
        return 0
    return kind_of(instruction.op).flops(instruction)
