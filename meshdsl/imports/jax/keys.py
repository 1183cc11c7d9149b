"""Keys of random numbers: one value for JAX, two words for the language.

JAX's typed keys of shape [batch] are u32[batch, random_key=2] here. A function sees them as JAX has
them, so that what it does with positions is done with keys and not with their words. A raw key of
JAX, u32[2], stays an array of numbers; where the function draws with it, it is u32[raw_key=2].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.tensors.dims import RANDOM_KEY, Dimension, Shape
from meshdsl.tensors.named_array import NamedArray, Spec, named


@functools.cache
def key_dtype() -> Any:
    """Returns the dtype of JAX's keys that the language has: those of Threefry-2x32."""
    return jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32")).dtype


def is_typed(leaf: Any) -> bool:
    """Whether an array of JAX, or a shape of one, has typed keys."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def named_keys(leaf: Any, names: Sequence[str]) -> NamedArray | Spec:
    """Returns typed keys, or the shape of some, with a name for each position."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        dims = [Dimension(n, s) for n, s in zip(names, leaf.shape, strict=True)]
        return Spec(Shape([*dims, RANDOM_KEY]), np.dtype("uint32"))
    return named(np.asarray(jax.random.key_data(leaf)), [*names, RANDOM_KEY])
