"""Flops: the arithmetic of one device.

A product counts two flops per multiplication and addition (eight of complex numbers), an
elementwise instruction one per element of its result, a reduction, a scatter and a cumulative
operation one per element of their operand (a linear recurrence two). A convolution is a product of
each element with the windows that meet it (zeros between elements are not counted), and pooling one
operation for each element in a window. Moving and converting data, comparing, counting and random
bits count none. The body of a scan counts as often as it runs, that of a while loop once, and of a
cond the branch that has more. Attention counts its products with all scores, hidden ones too.
"""

from __future__ import annotations

import math

from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.costs.matrix_flops import MATRIX_OPERATIONS, matrix_flops
from meshdsl.lowering.program import Instruction, SpmdProgram
from meshdsl.ops.elementwise.arithmetic import ELEMENTWISE
from meshdsl.tensors.dtypes import is_complex, is_differentiable
from meshdsl.tracing.graph import Work

_PER_OPERAND = frozenset(
    (
        "sum prod prod_others scaled_prod max min scatter_add scatter_max scatter_min "
        "cumsum cumprod cumprod_from cummax cummin "
        "linear_recurrence linear_recurrence_from recurrence_totals"
    ).split()
)
_WINDOWS = frozenset(["window_sum", "window_max", "window_match"])


def flops(program: SpmdProgram) -> int:
    """Returns the floating-point operations of one device in one run of the program."""
    counted = program.block.counted(instruction_flops)
    return sum(instruction_flops(one) * times for one, times in counted)


def instruction_flops(instruction: Instruction) -> int:
    """Returns the floating-point operations of one instruction, without those of its bodies."""
    out = instruction.outputs[0]
    if not is_differentiable(out.dtype):
        return 0
    if instruction.op == "einsum":
        sizes = {dim.name: dim.size for value in instruction.inputs for dim in value.local}
        return (8 if is_complex(out.dtype) else 2) * math.prod(sizes.values())
    if instruction.op == "convolve":
        return (8 if is_complex(out.dtype) else 2) * _met(instruction)
    if instruction.op in _WINDOWS:
        return _met(instruction)
    if instruction.op == "attention":
        return AttentionSizes.of(instruction).flops(1, 1)
    if instruction.op == "attention_gradient":  # the scores are computed again
        return AttentionSizes.of(instruction).flops(3, 2)
    if instruction.op in MATRIX_OPERATIONS:
        return matrix_flops(instruction)
    known = ELEMENTWISE.get(instruction.op)
    if known is not None and known.work > Work.NONE:
        return out.local.volume
    if instruction.op in _PER_OPERAND:
        steps = 2 if "recurrence" in instruction.op else 1
        return steps * instruction.inputs[0].local.volume
    return 0


def _met(instruction: Instruction) -> int:
    """Returns how many elements all windows of an instruction meet, for all its other dims."""
    out, slides = instruction.outputs[0].local, instruction.params["slides"]
    if instruction.op == "convolve":
        x, window = (value.local for value in instruction.inputs)
        others = {d.name: d.size for d in x.without(s.x for s in slides)}
        others |= {d.name: d.size for d in window.without(s.window for s in slides)}
        sizes = [window.get(slide.window).size for slide in slides]
    else:
        others = {d.name: d.size for d in out.without(s.out for s in slides)}
        sizes = instruction.params["sizes"]
    total = math.prod(others.values())
    for slide, size in zip(slides, sizes, strict=True):
        total *= -(-out.get(slide.out).size * size // slide.base)
    return total
