"""What every backend needs of names: how arrays with named dims are laid side by side."""

from __future__ import annotations

import string
from collections.abc import Sequence

from meshdsl.tensors.dims import Shape

# Elementwise instructions that numpy, and what follows its interface, have by the same names.
NUMPY_NAMES = (
    "negative exp exp2 expm1 log log2 log10 log1p sqrt cbrt square sin cos tan asin acos atan sinh "
    "cosh tanh asinh acosh atanh abs sign floor ceil trunc isfinite isinf isnan logical_not add "
    "subtract multiply divide maximum minimum atan2 hypot logaddexp equal not_equal less "
    "less_equal greater greater_equal logical_and logical_or logical_xor"
).split()


def alignment(have: Shape, want: Shape) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the permutation and sizes (1 where a dim is missing) that align dims to `want`."""
    order = tuple(have.position(name) for name in want.names if have.find(name) is not None)
    sizes = tuple(found.size if (found := have.find(name)) else 1 for name in want.names)
    return order, sizes


def reorder(have: Sequence[str], want: Sequence[str]) -> tuple[int, ...]:
    """Returns the permutation that lays dims, given by name, in another order."""
    return tuple(list(have).index(name) for name in want)


def equation(inputs: Sequence[Shape], out: Shape, batch: str = "") -> str:
    """Returns the letters of an einsum; `batch` is put before every operand."""
    letters: dict[str, str] = {}
    pool = (c for c in string.ascii_letters if c != batch)
    for shape in inputs:
        for name in shape.names:
            if name not in letters:
                letters[name] = next(pool)
    words = [batch + "".join(letters[n] for n in shape.names) for shape in [*inputs, out]]
    return ",".join(words[:-1]) + "->" + words[-1]
