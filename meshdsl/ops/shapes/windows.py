"""The arguments of operations with sliding windows: strides, padding and dilation, by dim name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, TypeVar, Union

from meshdsl.tensors.dims import Dimension, Shape, did_you_mean, name_of
from meshdsl.tensors.slide import Slide

T = TypeVar("T")
ByDim: TypeAlias = Mapping[str, T] | Mapping[Dimension, T]
PerDim: TypeAlias = Union[T, ByDim[T]]  # noqa: UP007 - `T | ...` is no alias to mypy
Padding: TypeAlias = str | int | tuple[int, int]  # a string: "same" or "valid"


def by_name(asked: ByDim[T], what: str, example: str) -> dict[str, T]:
    """Returns a mapping from dims, or their names, as one from names.

    Raises:
        ValueError: it is no mapping; the error has `what` it is and an `example`.
    """
    if not isinstance(asked, Mapping):
        raise ValueError(f"{what} is a mapping by dim, as in {example}; got {asked!r}")
    return {name_of(dim): value for dim, value in asked.items()}


def per_dim(asked: PerDim[Any], names: Iterable[str], what: str, default: Any) -> dict[str, Any]:
    """Returns an argument that is one value for all dims, or a mapping, as one value for each.

    Raises:
        ValueError: the mapping names another dim.
    """
    names = list(names)
    if not isinstance(asked, Mapping):
        return dict.fromkeys(names, asked)
    asked = by_name(asked, what, f"{what}={{...}}")
    for name in asked:
        if name not in names:
            raise ValueError(
                f"{what} is given for `{name}`, but the window slides along "
                f"{', '.join(f'`{n}`' for n in names)}{did_you_mean(name, names)}"
            )
    return {name: asked.get(name, default) for name in names}


def slides(
    shape: Shape,
    windows: Mapping[str, Dimension],
    strides: PerDim[int],
    padding: PerDim[Padding],
    dilation: PerDim[int],
    transposed: bool = False,
) -> tuple[tuple[Slide, ...], Shape]:
    """Returns how windows slide along dims of a shape, and the shape with its new sizes.

    Args:
        windows: the window's dim for each of the shape's dims that one slides along.
        transposed: the slides of the transposed convolution.

    Raises:
        ValueError: a stride or dilation that is not positive, malformed padding, or nothing left.
    """
    every_stride = per_dim(strides, windows, "strides", 1)
    every_dilation = per_dim(dilation, windows, "dilation", 1)
    every_padding = per_dim(padding, windows, "padding", "same")
    sliding, sizes = [], {}
    for name, window in windows.items():
        stride = _positive(every_stride[name], name, "stride")
        step = _positive(every_dilation[name], name, "dilation")
        dim, span = shape.get(name), (window.size - 1) * step + 1
        size = dim.size * stride if transposed else dim.size
        low, high = _zeros(every_padding[name], name, size, span, stride)
        if transposed:
            if every_padding[name] != "same":
                size = (dim.size - 1) * stride + span - low - high
            if size < 1:
                raise ValueError(
                    f"cutting {low} and {high} of the {size + low + high} positions that {window} "
                    f"reaches from {dim} leaves nothing"
                )
            sliding.append(Slide(name, window.name, name, 1, -step, stride, -low))
        else:
            if size + low + high < span:
                apart = f" in steps of {step}" if step > 1 else ""
                zeros = f" with {low} and {high} zeros around it" if low or high else ""
                raise ValueError(
                    f"{window}{apart} spans {span} positions, more than {dim}{zeros} has"
                )
            size = (size + low + high - span) // stride + 1
            sliding.append(Slide(name, window.name, name, stride, step, 1, low))
        sizes[name] = size
    return tuple(sliding), resized(shape, sizes)


def resized(shape: Shape, sizes: Mapping[str, int]) -> Shape:
    """Returns a shape with some dims' sizes replaced."""
    return Shape(Dimension(d.name, sizes.get(d.name, d.size)) for d in shape)


def _positive(number: Any, name: str, what: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ValueError(f"the {what} along `{name}` must be a positive integer, got {number!r}")
    return number


def _zeros(padding: Any, name: str, size: int, span: int, stride: int) -> tuple[int, int]:
    """Returns how many zeros lie before and after a dim."""
    if padding == "valid":
        return 0, 0
    if padding == "same":
        total = max(0, (-(-size // stride) - 1) * stride + span - size)
        return total // 2, total - total // 2
    pair = (padding, padding) if isinstance(padding, int) else padding
    if isinstance(pair, list | tuple) and len(pair) == 2:
        low, high = pair
        if isinstance(low, int) and isinstance(high, int):
            return low, high
    raise ValueError(
        f'the padding along `{name}` must be "same", "valid", a number or a pair of them, '
        f"got {padding!r}"
    )
