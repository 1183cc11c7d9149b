"""Tensor: what users annotate, `def loss(x: md.Tensor) -> md.Tensor`.

It has two kinds: a `TracedTensor` of a program that is being written, without data, and a
`NamedArray`, which has data. Operations take both and return the kind that they run on.

Python's operators and the common methods stand here: `x + y`, `x.rename(...)`, `x.sum(...)`. Each
is a spelling of a function in `meshdsl.ops`; broadcasting is by dim name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.tensors.idioms import Idioms, need_names, ops, refuse
from meshdsl.tracing.source import UNKNOWN, Source

if TYPE_CHECKING:
    from meshdsl.tensors.dims import DimLike, DimsLike, Shape

Operand = Any  # a Tensor or a Python number


class Tensor(Idioms):
    """A tensor whose dims have names, traced or with data: `x: md.Tensor`.

    Attributes:
        dims: its dims, in order.
        shape: the same.
        dtype: the dtype of its elements.
        source: the user's line that made it; `UNKNOWN` for arrays.

    Examples:
        >>> @md.jit
        ... def scaled(x: md.Tensor, by: md.Tensor) -> md.Tensor:
        ...     print(isinstance(x, md.Tensor), x.dims)
        ...     return x * by
        >>> x = md.ones(md.dims(batch=2, embed=3))
        >>> print(isinstance(x, md.Tensor), scaled(x, md.named([1.0, 2.0], ["batch"])))
        True [batch=2, embed=3]
        True f32[batch=2, embed=3] [[1. 1. 1.]
         [2. 2. 2.]]
    """

    __slots__ = ()
    __array_priority__ = 1000  # numpy leaves `array * tensor` to us

    source: Source = UNKNOWN

    if TYPE_CHECKING:  # each kind stores them in its own way

        @property
        def dims(self) -> Shape: ...

        @property
        def shape(self) -> Shape: ...

        @property
        def dtype(self) -> np.dtype: ...

    @property
    def bytes(self) -> int:
        """The bytes of all elements, pads left out."""
        return self.shape.volume * self.dtype.itemsize

    def __add__(self, other: Operand) -> Tensor:
        return ops().add(self, other)

    def __radd__(self, other: Operand) -> Tensor:
        return ops().add(other, self)

    def __sub__(self, other: Operand) -> Tensor:
        return ops().subtract(self, other)

    def __rsub__(self, other: Operand) -> Tensor:
        return ops().subtract(other, self)

    def __mul__(self, other: Operand) -> Tensor:
        return ops().multiply(self, other)

    def __rmul__(self, other: Operand) -> Tensor:
        return ops().multiply(other, self)

    def __truediv__(self, other: Operand) -> Tensor:
        return ops().divide(self, other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return ops().divide(other, self)

    def __mod__(self, other: Operand) -> Tensor:
        return ops().remainder(self, other)

    def __floordiv__(self, other: Operand) -> Tensor:
        return ops().floor_divide(self, other)

    def __rfloordiv__(self, other: Operand) -> Tensor:
        return ops().floor_divide(other, self)

    def __divmod__(self, other: Operand) -> tuple[Tensor, Tensor]:
        return ops().divmod(self, other)

    def __rdivmod__(self, other: Operand) -> tuple[Tensor, Tensor]:
        return ops().divmod(other, self)

    def __pow__(self, other: Operand) -> Tensor:
        return ops().power(self, other)

    def __rpow__(self, other: Operand) -> Tensor:
        return ops().power(other, self)

    def __rmod__(self, other: Operand) -> Tensor:
        return ops().remainder(other, self)

    def __neg__(self) -> Tensor:
        return ops().negative(self)

    def __abs__(self) -> Tensor:
        return ops().abs(self)

    def __lt__(self, other: Operand) -> Tensor:
        return ops().less(self, other)

    def __le__(self, other: Operand) -> Tensor:
        return ops().less_equal(self, other)

    def __gt__(self, other: Operand) -> Tensor:
        return ops().greater(self, other)

    def __ge__(self, other: Operand) -> Tensor:
        return ops().greater_equal(self, other)

    def __eq__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return ops().equal(self, other)

    def __ne__(self, other: Operand) -> Tensor:  # type: ignore[override]
        return ops().not_equal(self, other)

    def __and__(self, other: Operand) -> Tensor:
        return ops().bit_and(self, other)

    def __or__(self, other: Operand) -> Tensor:
        return ops().bit_or(self, other)

    def __rand__(self, other: Operand) -> Tensor:
        return ops().bit_and(other, self)

    def __ror__(self, other: Operand) -> Tensor:
        return ops().bit_or(other, self)

    def __xor__(self, other: Operand) -> Tensor:
        return ops().bit_xor(self, other)

    def __rxor__(self, other: Operand) -> Tensor:
        return ops().bit_xor(other, self)

    def __lshift__(self, other: Operand) -> Tensor:
        return ops().shift_left(self, other)

    def __rlshift__(self, other: Operand) -> Tensor:
        return ops().shift_left(other, self)

    def __rshift__(self, other: Operand) -> Tensor:
        return ops().shift_right(self, other)

    def __rrshift__(self, other: Operand) -> Tensor:
        return ops().shift_right(other, self)

    def __invert__(self) -> Tensor:
        return ops().bit_not(self)

    def __iter__(self) -> Iterator:
        raise TypeError(
            f"{self!r} has no first dim to go through; name one, as in md.unstack(x, 'batch')"
        )

    def __getitem__(self, key: Any) -> Tensor:
        """Returns a part of one dim: `x["length", 1:5]`, `x["length", 0]`."""
        return ops().shapes.slicing.pick(self, key)

    def rename(self, mapping: dict[str, DimLike] | None = None, /, **names: DimLike) -> Tensor:
        return ops().rename(self, mapping, **names)

    def split(self, dim: DimLike, into: DimsLike) -> Tensor:
        return ops().split(self, dim, into)

    def merge(self, dims: DimsLike, into: DimLike) -> Tensor:
        return ops().merge(self, dims, into)

    def broadcast(self, dims: DimsLike) -> Tensor:
        return ops().broadcast(self, dims)

    def transpose(self, *dims: DimsLike) -> Tensor:
        return ops().transpose(self, *dims)

    def cast(self, dtype: Any) -> Tensor:
        return ops().cast(self, dtype)

    def sum(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "sum")
        return ops().sum(self, over, *more)

    def mean(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "mean")
        return ops().mean(self, over, *more)

    def max(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "max")
        return ops().max(self, over, *more)

    def min(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "min")
        return ops().min(self, over, *more)

    def prod(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "prod")
        return ops().prod(self, over, *more)

    def any(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "any")
        return ops().any(self, over, *more)

    def all(self, over: DimsLike | None = None, *more: DimLike, **axis: Any) -> Tensor:
        need_names(axis, "all")
        return ops().all(self, over, *more)

    def argmax(self, dim: DimLike = "", **axis: Any) -> Tensor:
        need_names(axis, "argmax")
        if not dim:
            refuse("say along which dim: write md.argmax(x, 'dim')")
        return ops().argmax(self, dim)

    def argmin(self, dim: DimLike = "", **axis: Any) -> Tensor:
        need_names(axis, "argmin")
        if not dim:
            refuse("say along which dim: write md.argmin(x, 'dim')")
        return ops().argmin(self, dim)
