"""Convolution in any number of dims: a product with windows, and its transpose.

The one primitive, `convolve`, is an einsum in which windows slide along some dims of the operand
(see `tensors.slide`). All other dims follow einsum's rules: dims of both operands and the result
group, dims of both operands only are contracted, dims of one operand stay. Both gradients are
convolutions. The one by the operand swaps strides with zeros between the elements and reverses the
window. The one by the window uses the result's dim as the window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.operation import operation
from meshdsl.ops.shapes.shape import merge, rename, split
from meshdsl.ops.shapes.windows import ByDim, Padding, PerDim, by_name, slides
from meshdsl.tensors.dims import Dimension, DimLike, Shape, unused
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.slide import Slide
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    x, filters = inputs
    if x.dtype != filters.dtype:
        raise ValueError(
            f"dtypes differ: {short(x.dtype)} and {short(filters.dtype)}; cast one of them"
        )
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")
    return [(params["out"], x.dtype)]


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor | None]:
    (x, filters), (cotangent,), slides = op.inputs, cotangents, op.params["slides"]
    gradients: list[Tensor | None] = [None, None]
    if wanted[0]:
        back = tuple(slide.to_operand() for slide in slides)
        params = {"slides": back, "out": x.shape}
        gradients[0] = bind_one(CONVOLVE, (cotangent, filters), params)
    if wanted[1] and _slides_back(slides, wanted[0]):
        back = tuple(slide.to_operand().to_window() for slide in slides)
        params = {"slides": back, "out": filters.shape}
        gradients[1] = bind_one(CONVOLVE, (cotangent, x), params)
    elif wanted[1]:
        back = tuple(slide.to_window() for slide in slides)
        params = {"slides": back, "out": filters.shape}
        gradients[1] = bind_one(CONVOLVE, (x, cotangent), params)
    return gradients


def _slides_back(slides: Sequence[Slide], to_operand: bool) -> bool:
    """Whether the gradient by the window slides x over the cotangent, not the cotangent over x.

    Both give the same. The first reads the same parts of the cotangent as the gradient by the
    operand, so that halos are sent once and those of x need not be kept from the forward pass.
    With strides, however, it would put zeros between the elements of the cotangent.
    """
    spread = any(slide.base > 1 for slide in slides)
    return all(abs(slide.stride) == 1 for slide in slides) and (to_operand or spread)


CONVOLVE = Primitive("convolve", _rule, _gradient, combines="sum", linear=(0, 1))


@operation
def conv(
    x: Tensor,
    filters: Tensor,
    spatial: ByDim[DimLike],
    in_dim: DimLike | ByDim[DimLike] | None = None,
    out_dim: DimLike | None = None,
    strides: PerDim[int] = 1,
    padding: PerDim[Padding] = "same",
    dilation: PerDim[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Convolves x with filters along some dims, by name.

    `md.conv(x, filters, {"height": "filter_height", "width": "filter_width"}, in_dim="rgb",
    out_dim="features")` makes [batch, height, width, features] of x: [batch, height, width, rgb]
    and filters: [filter_height, filter_width, rgb, features].

    As usual in machine learning, the filters are not reversed: out[o] is the sum over w of
    x[o * stride + w * dilation - low] * filters[w], with zeros outside of x.

    Args:
        spatial: for each dim of x that the filters slide along, the filters' dim. The dim keeps its
            name; its size becomes the number of windows.
        in_dim: the dim that both have and that is summed over; `{"channels": "channels_in"}` where
            the filters call it by another name. A dim that both have and that is not named here
            stays, each of its positions with filters of its own: a depthwise convolution is one
            without `in_dim`, with filters: [filter_height, filter_width, channels].
        out_dim: the filters' dim that takes the place of `in_dim`. It may be left out: all dims
            that only the filters have stay.
        strides, dilation: one number, or one for each dim of x: `{"height": 2, "width": 1}`.
        padding: "same" (ceil(size / stride) positions, the odd zero at the end), "valid" (no
            zeros), or zeros before and after: 1, (0, 1); negative ones cut. One for all dims or,
            again, a mapping.
        groups: into how many runs `in_dim` and `out_dim` are cut; each run of results sees one run
            of inputs. The filters' `in_dim` then has the size of one run.

    Raises:
        ValueError: a dim that is missing, sizes that do not match, groups that do not divide, or
            filters that reach further than x, so that nothing is left.

    Examples:
        >>> x = md.named([1.0, 2.0, 4.0, 8.0], ["width"])
        >>> difference = md.named([-1.0, 1.0], ["filter_width"])
        >>> print(md.conv(x, difference, {"width": "filter_width"}, padding="valid"))
        f32[width=3] [1. 2. 4.]
    """
    x, channels = _called_as_in(x, in_dim)
    pairs = by_name(spatial, "spatial", '{"height": "filter_height"}')
    windows = {x.shape.get(name).name: filters.shape.get(w) for name, w in pairs.items()}
    sliding, shape = slides(x.shape, windows, strides, padding, dilation)
    return _convolve(x, filters, sliding, shape, channels, out_dim, groups)


@operation
def conv_transpose(
    x: Tensor,
    filters: Tensor,
    spatial: ByDim[DimLike],
    in_dim: DimLike | ByDim[DimLike] | None = None,
    out_dim: DimLike | None = None,
    strides: PerDim[int] = 1,
    padding: PerDim[Padding] = "same",
    dilation: PerDim[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Transposed convolution: element i of x adds x[i] * filters[w] to i * stride + w * dilation.

    `md.conv_transpose(x, filters, {"height": "filter_height"}, "features", "rgb", strides=2)`
    doubles the height. It is the gradient, by its operand, of the `md.conv` with the same strides
    and padding; dims and arguments are those of `md.conv`, with x: [..., in_dim].

    Args:
        padding: "same" (size * stride positions), "valid" (all positions that an element of x
            reaches), or how many of these to cut before and after, as explicit zeros of the
            convolution that this transposes; negative ones add zeros.

    Raises:
        ValueError: as for `md.conv`.

    Examples:
        >>> x = md.named([1.0, 10.0], ["width"])
        >>> filters = md.named([1.0, 2.0], ["filter_width"])
        >>> print(md.conv_transpose(x, filters, {"width": "filter_width"}, strides=2))
        f32[width=4] [ 1.  2. 10. 20.]
    """
    x, channels = _called_as_in(x, in_dim)
    pairs = by_name(spatial, "spatial", '{"height": "filter_height"}')
    windows = {x.shape.get(name).name: filters.shape.get(w) for name, w in pairs.items()}
    sliding, shape = slides(x.shape, windows, strides, padding, dilation, transposed=True)
    return _convolve(x, filters, sliding, shape, channels, out_dim, groups)


def _called_as_in(x: Tensor, in_dim: DimLike | ByDim[DimLike] | None) -> tuple[Tensor, str]:
    """Returns x with its contracted dim renamed as in the filters, and that name, or ""."""
    if isinstance(in_dim, Mapping):
        if len(in_dim) != 1:
            raise ValueError(f"in_dim names one dim, got {len(in_dim)}")
        ((mine, theirs),) = in_dim.items()
        theirs = theirs if isinstance(theirs, str) else theirs.name
        return rename(x, {x.shape.get(mine).name: theirs}), theirs
    return x, "" if in_dim is None else x.shape.get(in_dim).name


def _convolve(
    x: Tensor,
    filters: Tensor,
    sliding: tuple[Slide, ...],
    shape: Shape,
    in_dim: str,
    out_dim: DimLike | None,
    groups: int,
) -> Tensor:
    """Checks the dims and binds the primitive; `shape` is that of x with its new sizes."""
    if not sliding:
        raise ValueError("`spatial` names no dim for the filters to slide along")
    windows = [slide.window for slide in sliding]
    if len(set(windows)) < len(windows):
        raise ValueError(f"each dim needs a window of its own, got {', '.join(windows)}")
    own = filters.shape.without([*windows, *x.shape.names])
    out = filters.shape.get(out_dim) if out_dim is not None else own[0] if len(own) == 1 else None
    _check_names(x, filters, sliding, in_dim, out)
    if groups != 1:
        return _grouped(x, filters, sliding, shape, in_dim, out, groups)
    _check_sizes(x, filters)
    dims = [part for d in shape for part in (own if d.name == in_dim else [d])]
    if not in_dim:
        dims += own
    return bind_one(CONVOLVE, (x, filters), {"slides": sliding, "out": Shape(dims)})


def _check_names(
    x: Tensor, filters: Tensor, sliding: Sequence[Slide], in_dim: str, out: Dimension | None
) -> None:
    for slide in sliding:
        if x.shape.find(slide.window) is not None:
            raise ValueError(f"x has a dim `{slide.window}` as well, the window along `{slide.x}`")
        if filters.shape.find(slide.x) is not None:
            raise ValueError(f"the filters have a dim `{slide.x}` as well, which they slide along")
        if in_dim in (slide.x, slide.window):
            raise ValueError(f"in_dim `{in_dim}` is a dim that the filters slide along")
    if in_dim:
        filters.shape.get(in_dim)
    if out is not None and x.shape.find(out.name) is not None:
        raise ValueError(
            f"out_dim `{out.name}` is a dim of x as well. If that is to be summed over, let the "
            f"filters call it otherwise: in_dim={{'{out.name}': '{out.name}_in'}}"
        )


def _check_sizes(x: Tensor, filters: Tensor) -> None:
    problems = []
    for dim in filters.shape:
        mine = x.shape.find(dim.name)
        if mine is not None and mine != dim:
            problems.append(f"x has {mine}, but the filters have {dim}")
    if problems:
        raise ValueError("; ".join(problems))


def _grouped(
    x: Tensor,
    filters: Tensor,
    sliding: tuple[Slide, ...],
    shape: Shape,
    in_dim: str,
    out: Dimension | None,
    groups: int,
) -> Tensor:
    """Makes the groups a dim of both operands, called `out_dim`, and convolves each group."""
    if not in_dim or out is None:
        raise ValueError("groups cut in_dim and out_dim: name both")
    mine, theirs = x.shape.get(in_dim), filters.shape.get(in_dim)
    if groups < 1:
        raise ValueError(f"groups must be 1 or more, got {groups}")
    uneven = [dim for dim in (mine, out) if dim.size % groups]
    if uneven:
        raise ValueError("; ".join(f"groups={groups} does not divide {dim}" for dim in uneven))
    if theirs.size != mine.size // groups:
        raise ValueError(
            f"with groups={groups} and {mine} in x the filters need "
            f"{in_dim}={mine.size // groups}, but have {theirs}"
        )
    each = Dimension(out.name, groups)
    inner = Dimension(unused(f"{in_dim}_of_group", x.shape, filters.shape), theirs.size)
    outer = Dimension(unused(f"{out.name}_of_group", x.shape, filters.shape), out.size // groups)
    x = split(x, in_dim, [each, inner])
    filters = split(rename(filters, {in_dim: inner.name}), out, [each, outer])
    _check_sizes(x, filters)
    rest = filters.shape.without([s.window for s in sliding] + [*x.shape.names, outer.name])
    dims = [part for d in shape for part in ([each, outer, *rest] if d.name == in_dim else [d])]
    result = bind_one(CONVOLVE, (x, filters), {"slides": sliding, "out": Shape(dims)})
    return merge(result, [each, outer], out)
