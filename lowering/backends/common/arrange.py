"""The order of dims in arrays: alignment, permutations and einsum equations.

`xp` is the namespace of the arrays' backend (see `namespace`).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from meshdsl.lowering.backends.common.namespace import Namespace
from meshdsl.tensors.dims import Shape


def align(xp: Namespace, array: Any, have: Shape, want: Shape) -> Any:
    """Returns an array with the dims of `want`, in that order; a dim that it lacks has size 1."""
    order = tuple(have.position(name) for name in want.names if have.find(name) is not None)
    sizes = tuple(dim.size if (dim := have.find(name)) else 1 for name in want.names)
    array, sizes = permuted(xp, array, order), (*array.shape[: xp.LEAD], *sizes)
    return array if array.shape == sizes else xp.reshape(array, sizes)


def permuted(xp: Namespace, array: Any, order: Sequence[int]) -> Any:
    """Returns an array with its dims in another order; itself if the order is the same."""
    if list(order) == list(range(len(order))):
        return array
    return xp.permute_dims(array, (*range(xp.LEAD), *(xp.LEAD + at for at in order)))


def permutation(have: Sequence[str], want: Sequence[str]) -> tuple[int, ...]:
    """Returns the permutation from one order of dims, given by name, to another."""
    return tuple(list(have).index(name) for name in want)


def equation(inputs: Sequence[Shape], out: Shape, lead: int = 0) -> str:
    """Returns the equation of an einsum; operands have `lead` axes in front of their dims."""
    pool = iter(string.ascii_letters)
    front = "".join(next(pool) for _ in range(lead))
    letters: dict[str, str] = {}
    for shape in inputs:
        for name in shape.names:
            if name not in letters:
                letters[name] = next(pool)
    words = [front + "".join(letters[n] for n in shape.names) for shape in [*inputs, out]]
    return ",".join(words[:-1]) + "->" + words[-1]
