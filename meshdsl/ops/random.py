"""Random numbers of many distributions: `md.random.normal(key, [batch, embed])`.

Every number depends on the key and on its position in the dims as listed, on nothing else: it is
the same on every layout, mesh and backend, up to the rounding of a backend's logarithms and the
like. All numbers are finite: distributions without bounds are cut off where 24 random bits (for
float64, 32) cannot distinguish a rarer value.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from meshdsl.ops.creation import arange, sized
from meshdsl.ops.elementwise.arithmetic import abs, cast, clip, cos, log, log1p, sign, sqrt, where
from meshdsl.ops.elementwise.bits import bit_and, shift_right
from meshdsl.ops.elementwise.special import erf_inv
from meshdsl.ops.indexing import take_along
from meshdsl.ops.operation import operation
from meshdsl.ops.random_keys import KEY, bits, fold_in, key, split, words
from meshdsl.ops.reductions.reduction import argmax
from meshdsl.ops.shapes.slicing import index
from meshdsl.ops.sorting import argsort
from meshdsl.tensors.dims import Dimension, DimLike, DimsLike, as_list
from meshdsl.tensors.dtypes import as_dtype, is_float, is_integer, need_kind, short
from meshdsl.tensors.tensor import Tensor

__all__ = [
    "KEY",
    "bernoulli",
    "bits",
    "categorical",
    "dropout",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "laplace",
    "normal",
    "permutation",
    "randint",
    "shuffle",
    "split",
    "truncated_normal",
    "uniform",
]

# Bits that a float's mantissa holds exactly; float64 numbers are multiples of 2**-32.
_EXACT_BITS = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 32}


@operation
def uniform(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns numbers uniform on [0, 1), all multiples of one power of two.

    `md.random.uniform(key, [embed, d_ff])`.

    Raises:
        ValueError: `dtype` is not floating-point.

    Examples:
        >>> x = md.random.uniform(md.random.key(0), md.dims(embed=30, d_ff=30), "bfloat16")
        >>> print(x.dims, x.dtype, bool(x.min() >= 0.0), bool(x.max() < 1.0))
        [embed=30, d_ff=30] bfloat16 True True
    """
    dtype = _float(dtype)
    return _fraction(source, dims, dtype, _EXACT_BITS[dtype.name], 0)


def _float(dtype: Any) -> np.dtype:
    dtype = as_dtype(dtype)
    if not is_float(dtype):
        raise ValueError(f"needs a floating-point dtype, got {short(dtype)}")
    return dtype


def _fraction(source: Tensor, dims: DimsLike, dtype: np.dtype, exact: int, plus: float) -> Tensor:
    """Returns (n + plus) / 2**exact with n uniform below 2**exact, without rounding."""
    drawn = bits(source, dims)
    work = dtype if exact == 32 else np.dtype("float32")
    if exact < 32:
        drawn = shift_right(drawn, 32 - exact)
    numerator = cast(drawn, work)
    if plus:
        numerator = numerator + plus
    return cast(numerator * 2.0**-exact, dtype)


def _open(source: Tensor, dims: DimsLike, dtype: np.dtype) -> Tensor:
    """Returns numbers uniform on (0, 1), without either end, in float32 or wider."""
    if dtype.name == "float64":
        return _fraction(source, dims, dtype, 32, 0.5)
    return _fraction(source, dims, np.dtype("float32"), 23, 0.5)


@operation
def normal(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns standard normal numbers, by the transform of Box and Muller (1958).

    `md.random.normal(key, [embed, d_ff])`.

    Raises:
        ValueError: `dtype` is not floating-point.

    Examples:
        >>> key, dims = md.random.key(0), md.dims(batch=4, embed=3)
        >>> alone = md.random.normal(key, dims)
        >>> spread = md.jit(lambda key: md.random.normal(key, dims), "data:2", "batch:data")(key)
        >>> print(alone.dims, spread.layout, np.allclose(alone, spread, atol=1e-6))
        [batch=4, embed=3] batch:data True
    """
    dtype = _float(dtype)
    work = dtype if dtype.name == "float64" else np.dtype("float32")
    radius_key, angle_key = split(source, 2)
    radius = sqrt(-2.0 * log(1.0 - uniform(radius_key, dims, work)))
    return cast(radius * cos(2 * math.pi * uniform(angle_key, dims, work)), dtype)


@operation
def truncated_normal(
    source: Tensor,
    dims: DimsLike,
    lower: float = -2.0,
    upper: float = 2.0,
    dtype: Any = "float32",
) -> Tensor:
    """Returns standard normal numbers that lie in [lower, upper].

    `md.random.truncated_normal(key, [embed, d_ff])`, by the inverse of the distribution function.

    Raises:
        ValueError: the bounds are infinite, or not in order.

    Examples:
        >>> x = md.random.truncated_normal(md.random.key(0), md.dims(embed=30, d_ff=30))
        >>> print(x.dims, bool(x.min() >= -2.0), bool(x.max() <= 2.0))
        [embed=30, d_ff=30] True True
    """
    dtype = _float(dtype)
    if not -math.inf < lower < upper < math.inf:
        raise ValueError(f"needs finite bounds, lower < upper; got {lower} and {upper}")
    low, high = (math.erf(bound / math.sqrt(2)) for bound in (lower, upper))
    drawn = erf_inv(low + (high - low) * _open(source, dims, dtype)) * math.sqrt(2)
    return cast(clip(drawn, lower, upper), dtype)


@operation
def exponential(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns positive numbers with density exp(-x): `md.random.exponential(key, [batch])`.

    Raises:
        ValueError: `dtype` is not floating-point.

    Examples:
        >>> x = md.random.exponential(md.random.key(0), md.Dimension("batch", 10000))
        >>> print(x.dims, bool(x.min() > 0.0), round(float(x.mean()), 1))
        [batch=10000] True 1.0
    """
    dtype = _float(dtype)
    return cast(-log(_open(source, dims, dtype)), dtype)


@operation
def gumbel(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns numbers with the distribution function exp(-exp(-x)).

    `md.argmax(logits + md.random.gumbel(key, logits.dims), "vocab")` draws from softmax(logits).

    Raises:
        ValueError: `dtype` is not floating-point.

    Examples:
        >>> key, vocab = md.random.key(0), md.Dimension("vocab", 3)
        >>> logits = md.named([0.0, 50.0, 0.0], ["vocab"])
        >>> print(md.argmax(logits + md.random.gumbel(key, [vocab]), "vocab"))
        s32[] 1
    """
    dtype = _float(dtype)
    return cast(-log(-log(_open(source, dims, dtype))), dtype)


@operation
def laplace(source: Tensor, dims: DimsLike, dtype: Any = "float32") -> Tensor:
    """Returns numbers with density exp(-|x|) / 2: `md.random.laplace(key, [batch])`.

    Raises:
        ValueError: `dtype` is not floating-point.

    Examples:
        >>> x = md.random.laplace(md.random.key(0), md.Dimension("batch", 10000))
        >>> print(x.dims, bool(x.min() < 0.0), round(float(md.abs(x).mean()), 1))
        [batch=10000] True 1.0
    """
    dtype = _float(dtype)
    centred = 2.0 * _open(source, dims, dtype) - 1.0  # never -1 or 1, so that the logarithm exists
    return cast(-sign(centred) * log1p(-abs(centred)), dtype)


@operation
def bernoulli(source: Tensor, probability: float | Tensor, dims: DimsLike) -> Tensor:
    """Returns a bool tensor, true with the given probability: `md.random.bernoulli(key, 0.1, [a])`.

    Raises:
        ValueError: the probability has dims that are not among `dims`.

    Examples:
        >>> batch, embed = md.dims(batch=2, embed=3)
        >>> often = md.named([0.0, 1.0], ["batch"])  # a probability for each row
        >>> print(md.random.bernoulli(md.random.key(0), often, [batch, embed]))
        bool[batch=2, embed=3] [[False False False]
         [ True  True  True]]
    """
    shape = sized(dims)
    extra = probability.shape.without(shape.names) if isinstance(probability, Tensor) else ()
    if extra:
        raise ValueError(f"the probability has dims {extra} that are not among {shape}")
    if isinstance(probability, Tensor):
        probability = cast(probability, "float32")
    return uniform(source, shape) < probability


@operation
def randint(source: Tensor, low: int, high: int, dims: DimsLike, dtype: Any = "int32") -> Tensor:
    """Returns whole numbers uniform on [low, high): `md.random.randint(key, 0, 10, [batch])`.

    Each is made of 64 random bits, so that no number is rarer than another by more than 2**-32.

    Raises:
        ValueError: [low, high) has no number or more than 2**32, or `dtype` does not hold them all.

    Examples:
        >>> x = md.random.randint(md.random.key(0), 1, 7, md.Dimension("throws", 1000))
        >>> print(x.dtype, np.unique(x))
        int32 [1 2 3 4 5 6]
    """
    dtype = as_dtype(dtype)
    if not is_integer(dtype):
        raise ValueError(f"needs a dtype of whole numbers, got {short(dtype)}")
    count, limits = high - low, np.iinfo(dtype)
    if not 1 <= count <= 2**32:
        raise ValueError(f"[{low}, {high}) needs from 1 to 2**32 numbers")
    if low < limits.min or high - 1 > limits.max:
        raise ValueError(f"{dtype.name} does not hold all of [{low}, {high})")
    drawn = words(source, dims)
    high_word, low_word = (index(drawn, KEY, i) for i in (0, 1))
    if count == 2**32:
        return cast(high_word, dtype) + low
    # floor(drawn * count / 2**64), in words of 32 bits
    carried = high_word * count
    total = carried + _high_product(low_word, count)
    offset = _high_product(high_word, count) + cast(total < carried, "uint32")
    return cast(offset, dtype) + low


def _high_product(x: Tensor, factor: int) -> Tensor:
    """Returns the upper 32 of the 64 bits of a product of uint32 numbers."""
    x_high, x_low = shift_right(x, 16), bit_and(x, 0xFFFF)
    f_high, f_low = factor >> 16, factor & 0xFFFF
    cross, other = x_high * f_low, x_low * f_high
    middle = shift_right(x_low * f_low, 16) + bit_and(cross, 0xFFFF) + bit_and(other, 0xFFFF)
    upper = x_high * f_high + shift_right(cross, 16)
    return upper + shift_right(other, 16) + shift_right(middle, 16)


@operation
def categorical(source: Tensor, logits: Tensor, over: DimLike, dims: DimsLike = ()) -> Tensor:
    """Draws positions along a dim, each with its probability in softmax(logits), as s32.

    `md.random.categorical(key, logits, "vocab")`, by adding Gumbel noise and taking the largest.

    Args:
        dims: of several draws from the same logits.

    Returns:
        [*dims, *logits' dims without over]. A logit of -inf is never drawn.

    Raises:
        ValueError: the logits lack `over`, are not floating-point, or have one of `dims`.

    Examples:
        >>> logits = md.named([[0.0, -np.inf], [-np.inf, 0.0]], ["batch", "vocab"])
        >>> draws = md.Dimension("draws", 3)
        >>> print(md.random.categorical(md.random.key(0), logits, "vocab", [draws]))
        s32[draws=3, batch=2] [[0 1]
         [0 1]
         [0 1]]
    """
    need_kind(logits.dtype, "f")
    work = "float64" if logits.dtype.name == "float64" else "float32"
    noise = gumbel(source, [*sized(dims), *logits.shape], work)
    return argmax(noise + cast(logits, work), logits.shape.get(over))


@operation
def permutation(source: Tensor, dim: Dimension) -> Tensor:
    """Returns the numbers 0 to dim.size - 1 in random order along `dim`, as s32.

    `md.random.permutation(key, md.Dimension("examples", 1000))`.

    Raises:
        ValueError: `dim` has a name only.

    Examples:
        >>> order = md.random.permutation(md.random.key(0), md.Dimension("examples", 5))
        >>> order.dims, np.sort(order).tolist()
        ([examples=5], [0, 1, 2, 3, 4])
    """
    (dim,) = sized(dim)
    order = arange(dim)
    # Enough rounds to make equal random bits in all of them unlikely.
    for round_key in split(source, math.ceil(3 * math.log(dim.size + 1) / math.log(2**32))):
        order = take_along(order, argsort(bits(round_key, [dim]), dim), dim)
    return order


@operation
def shuffle(source: Tensor, x: Tensor, dim: DimLike) -> Tensor:
    """Returns x in random order along one dim: `md.random.shuffle(key, examples, "batch")`.

    All elements at one position of the dim move together.

    Raises:
        ValueError: x lacks `dim`.

    Examples:
        >>> x = md.named([[1, 2, 3], [10, 20, 30]], ["row", "column"])
        >>> y = md.random.shuffle(md.random.key(0), x, "column")
        >>> print(y.dims, np.sort(y.data[0]), y.data[1] == 10 * y.data[0])
        [row=2, column=3] [1 2 3] [ True  True  True]
    """
    along = x.shape.get(dim)
    return take_along(x, permutation(source, along), along)


@operation
def dropout(source: Tensor, x: Tensor, rate: float, shared: DimsLike = ()) -> Tensor:
    """Sets elements to 0 with probability `rate`, and divides the others by 1 - rate.

    `md.random.dropout(key, x, 0.1)` (Srivastava et al. 2014).

    Args:
        shared: dims along which all elements are kept or dropped together.

    Raises:
        ValueError: the rate is not in [0, 1), or x lacks a dim of `shared`.

    Examples:
        >>> x = md.ones(md.dims(batch=100, embed=100))
        >>> y = md.random.dropout(md.random.key(0), x, 0.5, shared="embed")
        >>> np.unique(y), np.unique(y.mean("embed"))
        (array([0., 2.], dtype=float32), array([0., 2.], dtype=float32))
    """
    if not 0 <= rate < 1:
        raise ValueError(f"a rate is at least 0 and below 1, got {rate}")
    need_kind(x.dtype, "f")
    names = [x.shape.get(dim).name for dim in as_list(shared)]
    if rate == 0:
        return x
    mask = bernoulli(source, 1 - rate, x.shape.without(names))
    return where(mask, x / (1 - rate), 0)
