"""Direct calls: a program compiled as a function of its callers' own trees.

JAX compares trees, dtypes and places in C++ before it runs what it compiled. A program that takes
and returns trees of NamedArrays leaves that to it, and costs little more than `jax.jit` itself.
What such a function is called with may be on the host or on one device; arrays committed to other
places are refused, with a ValueError, and other trees, dims and dtypes with a TypeError. Numbers of
64 bits are the exception: see `meshdsl.tensors.named_array.flattening`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.lowering.backends.jax.placing import Storage
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.signature import Trees


def named(data: Sequence[Any], stored: Sequence[Storage]) -> list[NamedArray]:
    """Returns what is stored as arrays with names."""
    return [NamedArray(d, at.dims, at.cuts) for d, at in zip(data, stored, strict=True)]


def of_trees(
    run: Callable, trees: Trees, inputs: Sequence[Storage], outputs: Sequence[Storage]
) -> Callable:
    """Returns a function of stored arrays as one of trees: `of_trees(run, trees, ins, outs)`."""

    def program(*arguments: Any) -> Any:
        return trees.results(named(run(*jax.tree.leaves(arguments)), outputs))

    program.__name__ = run.__name__
    return program


def owners(trees: Trees, count: int, leaves: Collection[int]) -> list[int] | None:
    """Returns the arguments that are made of certain leaves; None where one is in part.

    Args:
        count: how many leaves all arguments have together.
    """
    found = []
    for number, argument in enumerate(trees.arguments(range(count))):
        own = jax.tree.leaves(argument)
        given = sum(leaf in leaves for leaf in own)
        if given not in (0, len(own)):
            return None
        found += [number] if given else []
    return found


def takes(leaf: Any, at: Storage) -> bool:
    """Whether a leaf, as executables take it, may be given as it is to a direct call."""
    data, cuts = (leaf.data, leaf.cuts) if isinstance(leaf, NamedArray) else (leaf, ())
    if cuts != at.cuts or isinstance(data, jax.core.Tracer):
        return False
    if isinstance(data, jax.Array) and data.committed:
        return data.sharding == at.sharding or at.holds(data)
    return at.sharding.is_fully_addressable and isinstance(data, jax.Array | np.ndarray)
