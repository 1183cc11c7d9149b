"""Direct calls: a program compiled as a function of its callers' own trees.

JAX compares trees, dtypes and shardings in C++ before it runs a compiled function. A program whose
arguments and results are trees of NamedArrays relies on that check, and a call costs little more
than one of `jax.jit`. Arguments may be on the host or on one device. Arrays committed to other
devices raise ValueError; other trees, dims or dtypes raise TypeError. 64-bit numbers are the
exception: see `meshdsl.tensors.named_array.flattening`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.lowering.backends.jax.arguments import Storage
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.signature import Trees


def named_arrays(data: Sequence[Any], stored: Sequence[Storage]) -> list[NamedArray]:
    """Returns stored arrays as NamedArrays."""
    return [NamedArray(d, s.dims, s.cuts) for d, s in zip(data, stored, strict=True)]


def as_tree_function(
    run: Callable, trees: Trees, inputs: Sequence[Storage], outputs: Sequence[Storage]
) -> Callable:
    """Returns a function of trees, from one of stored arrays."""

    def program(*arguments: Any) -> Any:
        return trees.results(named_arrays(run(*jax.tree.leaves(arguments)), outputs))

    program.__name__ = run.__name__
    return program


def arguments_of(trees: Trees, count: int, leaves: Collection[int]) -> list[int] | None:
    """Returns the arguments whose leaves are all in `leaves`; None if one has only some there.

    Args:
        count: the number of leaves of all arguments.
    """
    numbers = []
    for number, argument in enumerate(trees.arguments(range(count))):
        argument_leaves = jax.tree.leaves(argument)
        chosen = sum(leaf in leaves for leaf in argument_leaves)
        if chosen not in (0, len(argument_leaves)):
            return None
        numbers += [number] if chosen else []
    return numbers


def accepts(leaf: Any, stored: Storage) -> bool:
    """Whether a direct call accepts a leaf without conversion or transfer."""
    data, cuts = (leaf.data, leaf.cuts) if isinstance(leaf, NamedArray) else (leaf, ())
    if cuts != stored.cuts or isinstance(data, jax.core.Tracer):
        return False
    if isinstance(data, jax.Array) and data.committed:
        return data.sharding == stored.sharding or stored.is_same_device(data)
    return stored.sharding.is_fully_addressable and isinstance(data, jax.Array | np.ndarray)
