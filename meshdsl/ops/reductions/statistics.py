"""Statistics over named dims: var, std, norm, median."""

from __future__ import annotations

import math

from meshdsl.ops.creation import full
from meshdsl.ops.elementwise.arithmetic import abs, cast, sqrt, square, where
from meshdsl.ops.indexing import take
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import any, max, mean, need_float, sum
from meshdsl.ops.sorting import sort
from meshdsl.tensors.dims import DimLike, DimsLike
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tensors.tensor import Tensor


@operation
def var(x: Tensor, over: DimsLike | None = None, correction: float = 0) -> Tensor:
    """Returns the variance over some dims, or over all: `md.var(x, "embed")`.

    The mean squared distance from the mean; half precision is computed in float32.

    Args:
        correction: subtracted from the number of elements that the sum is divided by; 1 for the
            unbiased estimate from a sample.

    Raises:
        ValueError: x is not floating-point, or there are no more elements than `correction`.

    Examples:
        >>> x = md.named([[1.0, 3.0], [2.0, 2.0]], ["batch", "embed"])
        >>> print(md.var(x, over="embed"))
        f32[batch=2] [1. 0.]
        >>> print(md.var(x, over="embed", correction=1))
        f32[batch=2] [2. 0.]
    """
    need_float(x)
    count = x.shape.volume if over is None else x.shape.select(over).volume
    if not count > correction:
        raise ValueError(f"{count} elements are too few for a correction of {correction}")
    wide = cast(x, accumulator(x.dtype))
    variance = mean(square(wide - mean(wide, over)), over)
    return cast(variance * (count / (count - correction)) if correction else variance, x.dtype)


@operation
def std(x: Tensor, over: DimsLike | None = None, correction: float = 0) -> Tensor:
    """Returns the standard deviation, the root of `var`; where it is 0, so is its gradient.

    Raises:
        ValueError: as for `var`.

    Examples:
        >>> x = md.named([[1.0, 3.0], [2.0, 2.0]], ["batch", "embed"])
        >>> print(md.std(x, over="embed"))
        f32[batch=2] [1. 0.]
    """
    need_float(x)
    wide = cast(x, accumulator(x.dtype))
    return cast(_root(var(wide, over, correction)), x.dtype)


@operation
def norm(x: Tensor, over: DimsLike | None = None, order: float = 2) -> Tensor:
    """Returns a norm over some dims, or over all: `md.norm(x, "embed")`.

    Args:
        order: 1, the sum of magnitudes; 2, the root of the sum of squares; `math.inf`, the largest
            magnitude. The gradient of each is 0 at 0. Half precision is summed in float32.

    Raises:
        ValueError: x lacks a dim or is not floating-point, or the order is another one.

    Examples:
        >>> x = md.named([[3.0, 4.0], [0.0, -2.0]], ["batch", "embed"])
        >>> print(md.norm(x, over="embed"))
        f32[batch=2] [5. 2.]
        >>> print(md.norm(x, over="embed", order=1))
        f32[batch=2] [7. 2.]
    """
    need_float(x)
    if order not in (1, 2, math.inf):
        raise ValueError(f"order must be 1, 2 or math.inf, not {order}")
    wide = cast(x, accumulator(x.dtype))
    if order == 2:
        return cast(_root(sum(square(wide), over)), x.dtype)
    return cast((sum if order == 1 else max)(abs(wide), over), x.dtype)


@operation
def median(x: Tensor, dim: DimLike) -> Tensor:
    """Returns the median along a dim, the mean of the two middle elements if its size is even.

    NaN if any element is NaN. The dim is gathered to be sorted; see `sort`.

    Raises:
        ValueError: x lacks the dim, or is not floating-point.

    Examples:
        >>> x = md.named([[5.0, 1.0, 2.0, 4.0], [0.0, 0.0, 9.0, 1.0]], ["batch", "length"])
        >>> print(md.median(x, "length"))
        f32[batch=2] [3.  0.5]
    """
    need_float(x)
    along = x.shape.get(dim)
    ordered = sort(x, along)
    low, high = (
        take(ordered, full([], place, "int32"), along)
        for place in ((along.size - 1) // 2, along.size // 2)
    )
    middle = low if along.size % 2 else low * 0.5 + high * 0.5
    return where(any(x != x, along), math.nan, middle)


def _root(x: Tensor) -> Tensor:
    """Returns the square root of numbers that are not negative, with slope 0 at 0."""
    zero = x == 0
    return where(zero, 0, sqrt(where(zero, 1, x)))
