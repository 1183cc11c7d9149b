"""What every backend needs of names: how arrays with named dims are laid side by side."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

from meshdsl.dims import Shape

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


def cut(xp: Any, array: Any, at: int, counts: Sequence[int]) -> Any:
    """Pads position `at` so that it is equal blocks of equal blocks, `counts[0]` of them first.

    These are the blocks of a dim split over axes of such sizes; see `TensorLayout`. `xp` is numpy
    or what follows its interface.
    """
    before, size, after = array.shape[:at], array.shape[at], array.shape[at + 1 :]
    if size % math.prod(counts) == 0:
        return array
    for place, count in enumerate(counts, at):
        block = -(-size // count)
        pads = [(0, 0)] * array.ndim
        pads[place] = (0, count * block - size)
        array = xp.pad(array, pads)
        array = array.reshape(*array.shape[:place], count, block, *after)
        size = block
    return array.reshape(*before, math.prod(counts) * size, *after)


def join(xp: Any, array: Any, at: int, counts: Sequence[int], size: int) -> Any:
    """Drops the pads of position `at`, which is blocks of blocks, so that `size` are left."""
    before, after = array.shape[:at], array.shape[at + 1 :]
    if size % math.prod(counts) == 0:
        return array
    sizes = [size]
    for count in counts:
        sizes.append(-(-sizes[-1] // count))
    array = array.reshape(*before, *counts, sizes[-1], *after)
    for level in reversed(range(len(counts))):
        place = at + level
        whole = counts[level] * sizes[level + 1]
        array = array.reshape(*array.shape[:place], whole, *after)
        array = array[(slice(None),) * place + (slice(sizes[level]),)]
    return array
