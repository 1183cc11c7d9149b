"""Arithmetic: the floating-point operations of one instruction on one device, by its kind.

* A product counts two flops for a multiplication and an addition; eight for complex numbers.
* An elementwise instruction counts one per element of its result.
* A reduction, a scatter and a cumulative operation count one per element of their operand; a linear
  recurrence counts two.
* A convolution counts a product of each element with each window that contains it; zeros between
  elements are not counted. Pooling counts one operation for each element in a window.
* A grouped product counts a product of each row with its group's matrix. A device that has some of
  the groups counts their share of the rows.
* Attention counts its products with all scores, also with hidden ones.
* Moving and converting data, comparing, counting and random bits count none.

Linear algebra and Fourier transforms count by their leading terms. Per matrix of m rows and n
columns, m >= n; Golub and Van Loan 2013, "Matrix computations": sections 3.2 (elimination), 4.2
(Cholesky), 5.2 (QR with its factors), 8.3 (symmetric eigenvalues) and 8.6 (singular values). A
complex transform of n numbers counts 5 n log2 n, a real one half of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshdsl.lowering.attention_sizes import AttentionSizes
from meshdsl.lowering.parameters import (
    AlongDim,
    Convolve,
    HalfSpectrum,
    Matrices,
    Pool,
    parameters_of,
)
from meshdsl.tensors.dtypes import is_complex

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction


def none(instruction: Instruction) -> int:
    """Returns 0, for instructions that move, compare or count."""
    return 0


def per_result(instruction: Instruction) -> int:
    """Returns one flop for each element of the result."""
    return instruction.outputs[0].local.volume


def per_operand(instruction: Instruction) -> int:
    """Returns one flop for each element of the first operand."""
    return instruction.inputs[0].local.volume


def recurrence(instruction: Instruction) -> int:
    """Returns a multiplication and an addition for each element."""
    return 2 * instruction.inputs[0].local.volume


def einsum(instruction: Instruction) -> int:
    """Returns the flops of a product for each combination of the positions of all dims."""
    sizes = {dim.name: dim.size for value in instruction.inputs for dim in value.local}
    return _flops_per_product(instruction) * math.prod(sizes.values())


def grouped(instruction: Instruction) -> int:
    """Returns the flops of a product for each row; groups are as large as each other."""
    dim = parameters_of(instruction, AlongDim)["dim"]
    values = (*instruction.inputs, *instruction.outputs)
    sizes = {each.name: each.size for value in values for each in value.local}
    share = sizes.pop(dim) / next(v.shape.get(dim).size for v in values if v.shape.find(dim))
    return int(_flops_per_product(instruction) * math.prod(sizes.values()) * share)


def convolution(instruction: Instruction) -> int:
    """Returns the flops of a product for each element in each window."""
    return _flops_per_product(instruction) * _elements_in_windows(instruction)


def windows(instruction: Instruction) -> int:
    """Returns one flop for each element in each window."""
    return _elements_in_windows(instruction)


def attention(instruction: Instruction) -> int:
    """Returns the flops of two products with all scores."""
    return AttentionSizes.of(instruction).flops(1, 1)


def attention_gradient(instruction: Instruction) -> int:
    """Returns the flops of five products with all scores; one of them recomputes the scores."""
    return AttentionSizes.of(instruction).flops(3, 2)


_FACTORING = {
    "cholesky": lambda m, n: n**3 / 3,
    "eigh": lambda m, n: 9 * n**3,
    "qr": lambda m, n: 4 * m * n**2 - 4 * n**3 / 3,
    "slogdet": lambda m, n: 2 * n**3 / 3,
    "solve": lambda m, n: 2 * n**3 / 3,
    "svd": lambda m, n: 14 * m * n**2 + 8 * n**3,
    "triangular_solve": lambda m, n: 0,
}
_PER_SIDE = {"solve": 2, "triangular_solve": 1}
_TRANSFORMS = {"fft": 5.0, "ifft": 5.0, "rfft": 2.5, "irfft": 2.5}


def factorization(instruction: Instruction) -> int:
    """Returns the leading term of the flops of linear algebra, for matrices and right sides."""
    local, op = instruction.inputs[0].local, instruction.op
    params = parameters_of(instruction, Matrices)
    rows, columns = local.get(params["rows"]).size, local.get(params["columns"]).size
    m, n = max(rows, columns), min(rows, columns)
    total = _FACTORING[op](m, n) * (local.volume // (m * n))
    if op in _PER_SIDE:
        total += _PER_SIDE[op] * n * instruction.outputs[0].local.volume
    return int(total * (4 if is_complex(instruction.outputs[0].dtype) else 1))


def transform(instruction: Instruction) -> int:
    """Returns the flops of Fourier transforms along one dim."""
    op = instruction.op
    shape = (instruction.outputs if op == "irfft" else instruction.inputs)[0].local
    if op == "irfft":
        size = parameters_of(instruction, HalfSpectrum)["into"].size
    else:
        size = shape.get(parameters_of(instruction, AlongDim)["dim"]).size
    return int(_TRANSFORMS[op] * shape.volume * math.log2(size))


def _flops_per_product(instruction: Instruction) -> int:
    return 8 if is_complex(instruction.outputs[0].dtype) else 2


def _elements_in_windows(instruction: Instruction) -> int:
    """Returns the number of elements in all windows, for all positions of the other dims."""
    out = instruction.outputs[0].local
    slides = parameters_of(instruction, Convolve)["slides"]  # pooling has these too
    sizes: Sequence[int]
    if instruction.op == "convolve":
        x, window = (value.local for value in instruction.inputs)
        others = {d.name: d.size for d in x.without(s.x for s in slides)}
        others |= {d.name: d.size for d in window.without(s.window for s in slides)}
        sizes = [window.get(slide.window).size for slide in slides]
    else:
        others = {d.name: d.size for d in out.without(s.out for s in slides)}
        sizes = parameters_of(instruction, Pool)["sizes"]
    total = math.prod(others.values())
    for slide, size in zip(slides, sizes, strict=True):
        total *= -(-out.get(slide.out).size * size // slide.base)
    return total
