"""Products of matrices on GPUs: sizes that their matrix units cannot read are padded with zeros.

The matrix units of NVIDIA GPUs read 16 bytes at once: eight numbers of half precision. For other
sizes, as a vocabulary of 50,257, XLA takes kernels that are 2 to 3 times slower. The zeros change
no number: of a contracted dim they add nothing, and of another one they are cut off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshdsl.lowering.backends.jax import namespace as xp

_ALIGNED = 8  # numbers of half precision that are read at once
_PADDED = 64  # padded sizes are multiples of it
_SMALLEST = 1024  # of smaller dims, the copy takes as long as it saves


def padded_einsum(equation: str, factors: Sequence[Any], dtype: np.dtype) -> Any:
    """Returns an einsum of two factors, as `namespace.einsum`; its factors may be padded."""
    inputs, result = equation.split("->")
    terms = inputs.split(",")
    pads = _pads(terms, factors) if len(terms) == 2 and factors[0].dtype.itemsize == 2 else {}
    if not pads:
        return xp.einsum(equation, factors, dtype)
    larger = [
        xp.pad(x, [(0, pads.get(letter, 0)) for letter in term])
        for term, x in zip(terms, factors, strict=True)
    ]
    product = xp.einsum(equation, larger, dtype)
    for at, letter in enumerate(result):
        if letter in pads:
            product = xp.slice_axis(product, 0, product.shape[at] - pads[letter], at)
    return product


def _pads(terms: Sequence[str], factors: Sequence[Any]) -> dict[str, int]:
    """Returns how much each dim is padded by."""
    sizes = {
        letter: size
        for term, x in zip(terms, factors, strict=True)
        for letter, size in zip(term, x.shape, strict=True)
    }
    return {
        letter: -size % _PADDED
        for letter, size in sizes.items()
        if size >= _SMALLEST and size % _ALIGNED
    }
