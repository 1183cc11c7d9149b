"""Pooling: the sum or maximum over a window at each of its positions.

There are three primitives. The gradient of `window_sum` is a `window_sum`, with strides swapped for
zeros between the elements. The gradient of `window_max` is divided among the elements that equal
the maximum, as for `md.max`: `window_match` counts them, and then gives every element its shares.
Windows slide as in `meshdsl.tensors.slide`; `sizes` are those of the windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.creation import as_tensor
from meshdsl.ops.elementwise.arithmetic import cast
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import need_float, need_order
from meshdsl.ops.shapes.windows import ByDim, Padding, PerDim, by_name, per_dim, slides
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import accumulator, rounding
from meshdsl.tensors.named_array import named
from meshdsl.tensors.slide import Slide
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    if inputs[0].dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")
    return [(params["out"], inputs[0].dtype)]


def _sum_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    back = tuple(slide.to_operand() for slide in op.params["slides"])
    return [window_sum(cotangents[0], back, op.params["sizes"], op.inputs[0].shape)]


def _max_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    (x,), (y,), slides, sizes = op.inputs, op.outputs, op.params["slides"], op.params["sizes"]
    slack = rounding(x.dtype)
    there = {"slides": slides, "sizes": sizes, "out": y.shape, "slack": slack, "extreme": 0}
    equals = bind_one(WINDOW_MATCH, (y, x), there)
    back = tuple(slide.to_operand() for slide in slides)
    here = {"slides": back, "sizes": sizes, "out": x.shape, "slack": slack, "extreme": 1}
    return [bind_one(WINDOW_MATCH, (x, y, cotangents[0] / equals), here)]


def _match_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """It is linear in `amount`. The compared operands have no gradient."""
    if not any(wanted[2:]):
        return [None] * len(wanted)
    here, there, amount = op.inputs
    params = {
        **op.params,
        "slides": tuple(slide.to_operand() for slide in op.params["slides"]),
        "out": amount.shape,
        "extreme": 1 - op.params["extreme"],
    }
    return [None, None, bind_one(WINDOW_MATCH, (there, here, cotangents[0]), params)]


WINDOW_SUM = Primitive("window_sum", _rule, _sum_gradient, combines="sum", linear=(0,))
WINDOW_MAX = Primitive("window_max", _rule, _max_gradient, combines="max")
# (here, there, amount): out[o] is the sum of amount over the positions at which `there` nearly
# equals here[o]; without `amount` their number. One of the two, `extreme`, holds the maximum.
WINDOW_MATCH = Primitive(
    "window_match", _rule, _match_gradient, linear=lambda op: (2,)[: len(op.inputs) - 2]
)


def window_sum(x: Tensor, slides: Sequence[Slide], sizes: Sequence[int], out: Shape) -> Tensor:
    """Returns the sum over windows of some sizes, with zeros outside of x."""
    ahead = tuple(slide.ahead(size) for slide, size in zip(slides, sizes, strict=True))
    return bind_one(WINDOW_SUM, (x,), {"slides": ahead, "sizes": tuple(sizes), "out": out})


@operation
def max_pool(
    x: Tensor,
    window: ByDim[int],
    strides: PerDim[int] | None = None,
    padding: PerDim[Padding] = "valid",
    dilation: PerDim[int] = 1,
) -> Tensor:
    """Returns the maximum of each window: `md.max_pool(x, {"height": 2, "width": 2})`.

    The gradient is divided among the elements of a window that equal its maximum, up to rounding.
    NaN wins.

    Args:
        window: the size of the window along each dim that it slides along. These dims keep their
            names and get the number of windows as size.
        strides: by default those of windows side by side, the size of the window.
        padding, dilation: as for `md.conv`; padding is never the maximum.

    Raises:
        ValueError: a dim that x lacks, a window larger than x, or one that sees nothing of x; or x
            is bool or complex.

    Examples:
        >>> image = md.named([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], ["height", "width"])
        >>> print(md.max_pool(image, {"width": 2}))
        f32[height=2, width=2] [[2. 4.]
         [6. 8.]]
        >>> print(md.max_pool(image, {"height": 2, "width": 2}))
        f32[height=1, width=2] [[6. 8.]]
    """
    need_order(x)
    sliding, sizes, out = _windows(x, window, strides, padding, dilation)
    return bind_one(WINDOW_MAX, (x,), {"slides": sliding, "sizes": sizes, "out": out})


@operation
def avg_pool(
    x: Tensor,
    window: ByDim[int],
    strides: PerDim[int] | None = None,
    padding: PerDim[Padding] = "valid",
    dilation: PerDim[int] = 1,
    count_pads: bool = False,
) -> Tensor:
    """Returns the mean of each window: `md.avg_pool(x, {"height": 3}, strides=1, padding="same")`.

    Half precision is summed in float32.

    Args:
        window, strides, padding, dilation: as for `md.max_pool`.
        count_pads: whether padding counts as elements that are zero; by default the mean is that
            of the elements of x that the window sees.

    Raises:
        ValueError: as for `md.max_pool`; or x is not floating-point.

    Examples:
        >>> x = md.named([2.0, 4.0, 9.0], ["width"])
        >>> print(md.avg_pool(x, {"width": 3}, strides=1, padding="same"))
        f32[width=3] [3.  5.  6.5]
        >>> print(md.avg_pool(x, {"width": 3}, strides=1, padding="same", count_pads=True))
        f32[width=3] [2.     5.     4.3333]
    """
    need_float(x)
    sliding, sizes, out = _windows(x, window, strides, padding, dilation)
    wide = cast(x, accumulator(x.dtype))
    total = window_sum(wide, sliding, sizes, out)
    if count_pads:
        return cast(total * (1.0 / int(np.prod(sizes))), x.dtype)
    for slide, size in zip(sliding, sizes, strict=True):
        dim = out.get(slide.out)
        seen = _seen(slide, x.shape.get(slide.x), dim, size)
        if len(set(seen)) == 1:
            total = total * (1.0 / int(seen[0]))
        else:
            total = total * as_tensor(named((1 / seen).astype(total.dtype), [dim]))
    return cast(total, x.dtype)


def _windows(
    x: Tensor,
    window: ByDim[int],
    strides: PerDim[int] | None,
    padding: PerDim[Padding],
    dilation: PerDim[int],
) -> tuple[tuple[Slide, ...], tuple[int, ...], Shape]:
    """Returns how the windows slide, their sizes, and the shape of the result."""
    sizes = by_name(window, "window", '{"height": 2, "width": 2}')
    if not sizes:
        raise ValueError("`window` names no dim to slide along")
    dims = {name: Dimension(name, size) for name, size in sizes.items()}
    steps: PerDim[int] = strides or sizes
    if isinstance(strides, Mapping):
        steps = {**sizes, **by_name(strides, "strides", "{}")}
    around = per_dim(padding, dims, "padding", "valid")
    sliding, out = slides(x.shape, dims, steps, around, dilation)
    for slide, dim in zip(sliding, dims.values(), strict=True):
        seen = _seen(slide, x.shape.get(slide.x), out.get(slide.out), dim.size)
        if not seen.all():
            raise ValueError(
                f"the window at position {int(seen.argmin())} of `{slide.x}` sees padding only"
            )
    return sliding, tuple(dim.size for dim in dims.values()), out


def _seen(slide: Slide, x: Dimension, out: Dimension, size: int) -> np.ndarray:
    """Returns how many elements of x the window sees from each position."""
    steps = np.arange(size) * slide.dilation
    at = np.arange(out.size)[:, None] * slide.stride + steps - slide.low
    return ((at >= 0) & (at < x.size)).sum(1)
