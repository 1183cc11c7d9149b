"""Direct calls: a compiled program as JAX calls its own functions.

JAX compares shapes, dtypes and shardings in C++ before it runs a compiled function. A direct call
relies on that check, and costs the host little more than one of `jax.jit`. Arguments may be on the
host or on one device. For other arrays, TypeError or ValueError is raised before anything runs.
64-bit numbers of the host are the exception: see `meshdsl.running.callers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from meshdsl.lowering.backends.jax.arguments import Storage
from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.product_precision import product_precision


class Once:
    """A function of arrays that `jax.jit` traces only once: `Once(run).function`.

    JAX traces a function anew for other shapes and dtypes. It does so too for the same ones in
    another context: another mesh in use, another device by default, weak types.

    Attributes:
        function: raises TypeError if it is traced again.
        outdated: whether it was traced again for the same shapes and dtypes in another context.
    """

    def __init__(self, run: Callable) -> None:
        self.outdated = False
        avals: list[Any] = []

        def function(*arrays: Any) -> Any:
            given = [(array.shape, array.dtype) for array in arrays]
            if avals:
                # Under `jax.disable_jit`, JAX calls this function although it has compiled it.
                self.outdated |= given == avals[0] and not is_jit_disabled()
                raise TypeError("the program was compiled for other arguments")
            avals.append(given)
            return run(*arrays)

        function.__name__ = run.__name__
        self.function = function


def in_precision(run: Callable) -> Callable:
    """Returns a compiled program that refuses calls under another precision of products.

    JAX compares it for its own functions, but not for those compiled ahead.
    """
    compiled_for = product_precision()

    def call(*arrays: Any) -> Any:
        if product_precision() != compiled_for:
            raise TypeError("the program was compiled for another precision of products")
        return run(*arrays)

    return call


def is_jit_disabled() -> bool:
    """Whether the caller is within `jax.disable_jit()`."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def accepts(leaf: Any, stored: Storage) -> bool:
    """Whether a direct call accepts a leaf without conversion or transfer."""
    data, cuts = (leaf.data, leaf.cuts) if isinstance(leaf, NamedArray) else (leaf, ())
    if cuts != stored.cuts or isinstance(data, jax.core.Tracer):
        return False
    if isinstance(data, jax.Array) and data.committed:
        return data.sharding == stored.sharding or stored.is_same_device(data)
    return stored.sharding.is_fully_addressable and isinstance(data, jax.Array | np.ndarray)
