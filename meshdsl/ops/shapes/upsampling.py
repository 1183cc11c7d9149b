"""Upsampling by whole factors: each element repeated, or interpolated between."""

from __future__ import annotations

from typing import Literal

import numpy as np

from meshdsl.ops.literal import literal
from meshdsl.ops.operation import operation
from meshdsl.ops.products.convolution import CONVOLVE
from meshdsl.ops.products.pooling import window_sum
from meshdsl.ops.reductions.reduction import need_float
from meshdsl.ops.shapes.windows import ByDim, by_name, resized
from meshdsl.tensors.dims import Dimension, unused
from meshdsl.tensors.named_array import named
from meshdsl.tensors.slide import Slide
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import bind_one


@operation
def upsample(
    x: Tensor, factors: ByDim[int], method: Literal["nearest", "linear"] = "nearest"
) -> Tensor:
    """Makes some dims longer by whole factors: `md.upsample(x, {"height": 2, "width": 2})`.

    Args:
        factors: for each of these dims, which keep their names, by how much.
        method: "nearest" repeats each element; "linear" interpolates between the elements, which
            lie in the middle of their `factor` positions, and repeats the outermost ones beyond
            them: `jax.image.resize` does the same.

    Raises:
        ValueError: a dim that x lacks, a factor that is not positive, or an unknown method.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["height", "width"])
        >>> print(md.upsample(x, {"width": 2}))
        f32[height=2, width=4] [[1. 1. 2. 2.]
         [3. 3. 4. 4.]]
        >>> print(md.upsample(x, {"width": 2}, method="linear"))
        f32[height=2, width=4] [[1.   1.25 1.75 2.  ]
         [3.   3.25 3.75 4.  ]]
    """
    if method not in ("nearest", "linear"):
        raise ValueError(f'the method is "nearest" or "linear", not {method!r}')
    if method == "linear":
        need_float(x)
    every = by_name(factors, "factors", '{"height": 2, "width": 2}')
    for name, factor in every.items():
        x.shape.get(name)
        if isinstance(factor, bool) or not isinstance(factor, int) or factor < 1:
            raise ValueError(f"the factor for `{name}` must be a positive integer, got {factor!r}")
    for name, factor in every.items():
        if factor > 1:
            x = (_repeated if method == "nearest" else _interpolated)(x, name, factor)
    return x


def _repeated(x: Tensor, name: str, factor: int) -> Tensor:
    """Uses a window as long as the distance of the elements: it sees one of them everywhere."""
    slide = Slide(name, name, name, base=factor, low=factor - 1)
    out = resized(x.shape, {name: x.shape.get(name).size * factor})
    return window_sum(x, (slide,), (factor,), out)


def _interpolated(x: Tensor, name: str, factor: int) -> Tensor:
    """Uses a triangular window, divided by the part of it that lies on x."""
    size = x.shape.get(name).size
    taps = 2 * factor - factor % 2
    triangle = 1 - np.abs(np.arange(taps) - (taps - 1) / 2) / factor
    window = unused("taps", x.shape)
    slide = Slide(name, window, name, base=factor, low=(taps + factor) // 2 - 1)
    at = np.arange(size * factor)[:, None] + np.arange(taps) - slide.low
    on_x = (at % factor == 0) & (at >= 0) & (at < size * factor)
    out = resized(x.shape, {name: size * factor})
    scale = named((1 / (on_x @ triangle)).astype(x.dtype), [out.get(name)])
    filters = literal(named(triangle.astype(x.dtype), [Dimension(window, taps)]))
    return bind_one(CONVOLVE, (x, filters), {"slides": (slide,), "out": out}) * literal(scale)
