"""How arrays with named dims are laid side by side.

Where a function takes `xp`, that is the namespace of the arrays' backend (see `namespace`).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from meshdsl.lowering.backends.common.namespace import Namespace
from meshdsl.tensors.dims import Shape


def align(xp: Namespace, array: Any, have: Shape, want: Shape) -> Any:
    """Lays the dims of an array as `want` orders them, with size 1 for those that it lacks."""
    order = tuple(have.position(name) for name in want.names if have.find(name) is not None)
    sizes = tuple(found.size if (found := have.find(name)) else 1 for name in want.names)
    array, sizes = lay(xp, array, order), (*array.shape[: xp.LEAD], *sizes)
    return array if array.shape == sizes else xp.reshape(array, sizes)


def lay(xp: Namespace, array: Any, order: Sequence[int]) -> Any:
    """Returns an array with its dims in another order; itself where it is the same."""
    if list(order) == list(range(len(order))):
        return array
    return xp.permute_dims(array, (*range(xp.LEAD), *(xp.LEAD + at for at in order)))


def reorder(have: Sequence[str], want: Sequence[str]) -> tuple[int, ...]:
    """Returns the permutation that lays dims, given by name, in another order."""
    return tuple(list(have).index(name) for name in want)


def equation(inputs: Sequence[Shape], out: Shape, lead: int = 0) -> str:
    """Returns the letters of an einsum; every operand has `lead` axes in front of its dims."""
    pool = iter(string.ascii_letters)
    front = "".join(next(pool) for _ in range(lead))
    letters: dict[str, str] = {}
    for shape in inputs:
        for name in shape.names:
            if name not in letters:
                letters[name] = next(pool)
    words = [front + "".join(letters[n] for n in shape.names) for shape in [*inputs, out]]
    return ",".join(words[:-1]) + "->" + words[-1]
