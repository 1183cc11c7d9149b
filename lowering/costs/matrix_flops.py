"""Flops of linear algebra and Fourier transforms, by their leading terms.

Per matrix of m rows and n columns, m >= n; Golub and Van Loan 2013, "Matrix computations": sections
3.2 (elimination), 4.2 (Cholesky), 5.2 (QR with its factors), 8.3 (symmetric eigenvalues) and 8.6
(singular values). A complex transform of n numbers counts 5 n log2 n, a real one half of it.
"""

from __future__ import annotations

import math

from meshdsl.tensors.dtypes import is_complex
from meshdsl.lowering.program import Instruction

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
MATRIX_OPERATIONS = frozenset([*_FACTORING, *_TRANSFORMS])


def matrix_flops(instruction: Instruction) -> int:
    """Returns the floating-point operations of one of `MATRIX_OPERATIONS` on one device."""
    local, op, params = instruction.inputs[0].local, instruction.op, instruction.params
    if op in _TRANSFORMS:
        shape = instruction.outputs[0].local if op == "irfft" else local
        size = params["into"].size if op == "irfft" else shape.get(params["dim"]).size
        return int(_TRANSFORMS[op] * shape.volume * math.log2(size))
    rows, columns = local.get(params["rows"]).size, local.get(params["columns"]).size
    m, n = max(rows, columns), min(rows, columns)
    total = _FACTORING[op](m, n) * (local.volume // (m * n))
    if op in _PER_SIDE:
        total += _PER_SIDE[op] * n * instruction.outputs[0].local.volume
    return int(total * (4 if is_complex(instruction.outputs[0].dtype) else 1))
