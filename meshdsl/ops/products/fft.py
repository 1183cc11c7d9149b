"""Discrete Fourier transforms along named dims.

The transform of x is the sum of x[n] exp(-2 pi i k n / size) over n; its inverse has the other sign
and is divided by the size. A transformed dim is gathered on every device, one dim after another.
The others stay split and are split over its axes too where they can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.creation import arange
from meshdsl.ops.elementwise.arithmetic import cast, where
from meshdsl.ops.elementwise.complex_numbers import conj
from meshdsl.ops.operation import operation
from meshdsl.ops.products.matrices import named_like
from meshdsl.tensors.dims import Dimension, DimLike, DimsLike, Shape
from meshdsl.tensors.dtypes import complex_dtype, is_complex, need_kind, real_dtype
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one

__all__ = ["fft", "ifft", "irfft", "rfft"]


def _replaced(x: Tensor, params: Mapping[str, Any]) -> Shape:
    return Shape(params["into"] if dim.name == params["dim"] else dim for dim in x.shape)


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(inputs[0].shape, inputs[0].dtype)]


def _rfft_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(_replaced(inputs[0], params), complex_dtype(inputs[0].dtype))]


def _irfft_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    return [(_replaced(inputs[0], params), real_dtype(inputs[0].dtype))]


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    """The matrix of a transform is symmetric."""
    return [bind_one(op.primitive, (cotangents[0],), op.params)]


def _twice(waves: Dimension, size: int) -> Tensor:
    """Returns which waves also stand for their negatives: all but 0 and half the size."""
    index = arange(waves)
    return (index > 0) & (2 * index < size)


def _rfft_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    (x,), (g,), waves = op.inputs, cotangents, op.params["into"]
    dim = x.shape.get(op.params["dim"])
    g = conj(where(_twice(waves, dim.size), 0.5 * g, g)) * dim.size
    return [bind_one(IRFFT, (g,), {"dim": waves.name, "into": dim})]


def _irfft_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor]:
    (x,), (g,), dim = op.inputs, cotangents, op.params["into"]
    waves = x.shape.get(op.params["dim"])
    gradient = conj(bind_one(RFFT, (g,), {"dim": dim.name, "into": waves})) * (1 / dim.size)
    return [where(_twice(waves, dim.size), 2 * gradient, gradient)]


FFT = Primitive("fft", _rule, _gradient, positionwise=True, linear=(0,))
IFFT = Primitive("ifft", _rule, _gradient, positionwise=True, linear=(0,))
RFFT = Primitive("rfft", _rfft_rule, _rfft_gradient, positionwise=True, linear=(0,))
IRFFT = Primitive("irfft", _irfft_rule, _irfft_gradient, positionwise=True, linear=(0,))


def _some(x: Tensor, over: DimsLike) -> Shape:
    dims = x.shape.select(over)
    if not dims:
        raise ValueError("needs at least one dim to transform along")
    return dims


def _transform(primitive: Primitive, x: Tensor, over: DimsLike) -> Tensor:
    need_kind(x.dtype, "fc")
    if not is_complex(x.dtype):
        x = cast(x, complex_dtype(x.dtype))
    for dim in _some(x, over):
        x = bind_one(primitive, (x,), {"dim": dim.name})
    return x


@operation
def fft(x: Tensor, over: DimsLike) -> Tensor:
    """Returns the discrete Fourier transform along one dim or several; their names are kept.

    `md.fft.fft(x, "length")`; real numbers become complex ones first.

    Raises:
        ValueError: x lacks a dim, has integers or bools, or `over` has no dim.

    Examples:
        >>> x = md.named([1.0, 0.0, -1.0, 0.0], ["length"])
        >>> print(md.fft.fft(x, "length"))
        c64[length=4] [0.+0.j 2.+0.j 0.+0.j 2.+0.j]
    """
    return _transform(FFT, x, over)


@operation
def ifft(x: Tensor, over: DimsLike) -> Tensor:
    """Returns the inverse of `fft`: `md.fft.ifft(x, ["height", "width"])`.

    Raises:
        ValueError: x lacks a dim, has integers or bools, or `over` has no dim.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["height", "width"])
        >>> y = md.fft.fft(x, ["height", "width"])
        >>> np.allclose(md.fft.ifft(y, ["height", "width"]), x)
        True
    """
    return _transform(IFFT, x, over)


@operation
def rfft(x: Tensor, over: DimsLike, into: DimLike | None = None) -> Tensor:
    """Returns the transform of real numbers, without the waves that mirror others.

    `md.fft.rfft(x, "length", "wave")`: length=8 becomes wave=5. With several dims, only the last is
    shortened. Without `into` it keeps its name.

    Raises:
        ValueError: x is not real, or `into` has another size than size // 2 + 1.

    Examples:
        >>> x = md.named([1.0, 0.0, -1.0, 0.0], ["length"])
        >>> print(md.fft.rfft(x, "length", "wave"))
        c64[wave=3] [0.+0.j 2.+0.j 0.+0.j]
    """
    need_kind(x.dtype, "f")
    *others, last = _some(x, over)
    waves = named_like(into or last.name, last.size // 2 + 1, "the last transformed dim")
    x = bind_one(RFFT, (x,), {"dim": last.name, "into": waves})
    return fft(x, [dim.name for dim in others]) if others else x


@operation
def irfft(x: Tensor, over: DimsLike, into: DimLike | None = None) -> Tensor:
    """Returns real numbers, the inverse of `rfft`.

    `md.fft.irfft(x, "wave", length)`: a Dimension gives the size; with a name, or without `into`,
    it is the even one, 2 * (waves - 1). What would make the result complex is ignored.

    Raises:
        ValueError: x is not complex, or `into` cannot come from as many waves.

    Examples:
        >>> x = md.named([1.0, 2.0, 4.0], ["length"])
        >>> waves = md.fft.rfft(x, "length", "wave")
        >>> print(md.fft.irfft(waves, "wave", md.Dimension("length", 3)))
        f32[length=3] [1. 2. 4.]
        >>> md.fft.irfft(waves, "wave", "length").dims
        [length=2]
    """
    need_kind(x.dtype, "c")
    *others, last = _some(x, over)
    if not isinstance(into, Dimension):
        into = Dimension(into or last.name, max(1, 2 * (last.size - 1)))
    if into.size // 2 + 1 != last.size:
        raise ValueError(f"{into} has {into.size // 2 + 1} waves, but there are {last}")
    x = ifft(x, [dim.name for dim in others]) if others else x
    return bind_one(IRFFT, (x,), {"dim": last.name, "into": into})
