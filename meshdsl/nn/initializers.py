"""Initial values of parameters.

An initializer is a function `(key, dims, dtype) -> tensor`. A traced `init` calls it, so that every
device makes its own shard. A value depends only on the key and its position.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import meshdsl as md
from meshdsl.ops.creation import sized
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import DimsLike, Shape, as_list


class Initializer(Protocol):
    """Makes a parameter of the given dims from a random key.

    Examples:
        >>> def halves(key, dims, dtype="float32"):
        ...     return md.full(dims, 0.5, dtype)
        >>> make: md.nn.initializers.Initializer = halves
        >>> print(make(md.random.key(0), md.dims(embed=3)))
        f32[embed=3] [0.5 0.5 0.5]
    """

    def __call__(self, key: md.Tensor, dims: DimsLike, dtype: Any = "float32") -> md.Tensor: ...


@operation
def zeros(key: md.Tensor, dims: DimsLike, dtype: Any = "float32") -> md.Tensor:
    """Returns zeros; the key is not used.

    Examples:
        >>> print(md.nn.initializers.zeros(md.random.key(0), md.dims(embed=3)))
        f32[embed=3] [0. 0. 0.]
    """
    return md.zeros(dims, dtype)


@operation
def ones(key: md.Tensor, dims: DimsLike, dtype: Any = "float32") -> md.Tensor:
    """Returns ones; the key is not used.

    Examples:
        >>> print(md.nn.initializers.ones(md.random.key(0), md.dims(embed=3)))
        f32[embed=3] [1. 1. 1.]
    """
    return md.ones(dims, dtype)


def normal(std: float) -> Initializer:
    """Returns an initializer that draws from a normal distribution around 0.

    Examples:
        >>> make = md.nn.initializers.normal(0.02)
        >>> w = make(md.random.key(0), md.dims(embed=100, d_ff=100))
        >>> print(w.dims, round(float(np.std(w)), 3))
        [embed=100, d_ff=100] 0.02
    """

    def draw(key: md.Tensor, dims: DimsLike, dtype: Any = "float32") -> md.Tensor:
        return md.random.normal(key, dims, dtype) * std

    return draw


def fan_in(over: DimsLike, gain: float = 1.0) -> Initializer:
    """Returns an initializer with which products have the variance of the parameter's other
    operand.

    Normal with standard deviation gain / sqrt(size of `over`) (LeCun et al. 1998, "Efficient
    BackProp", section 4.6).

    Args:
        over: the dims of the parameter that will be summed over.
        gain: a factor on the standard deviation.

    Examples:
        >>> make = md.nn.initializers.fan_in(over="embed")  # 1 / sqrt(100)
        >>> w = make(md.random.key(0), md.dims(embed=100, d_ff=100))
        >>> print(w.dims, round(float(np.std(w)), 2))
        [embed=100, d_ff=100] 0.1
    """

    @operation
    def fan_in_normal(key: md.Tensor, dims: DimsLike, dtype: Any = "float32") -> md.Tensor:
        shape = Shape(sized(dims))
        return normal(gain / math.sqrt(shape.select(as_list(over)).volume))(key, dims, dtype)

    return fan_in_normal
