"""What a backend gives of its framework, so that emitters can be written once for several.

A backend's `namespace.py` is a module of functions of its arrays. Where the array API standard
(data-apis.org/array-api) has a function, its name is that one's; the others stand apart below. A
backend takes a function from its framework as it is, or writes it where the framework has none, is
slower by it, or would emit another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np


class Namespace(Protocol):
    """The functions that every backend has.

    Attributes:
        LEAD: axes of an array in front of those of its dims: 1 where one array has the shards of
            all devices, 0 where it has that of one.
    """

    @property
    def LEAD(self) -> int: ...

    def asarray(self, value: Any, dtype: np.dtype, /) -> Any:
        """Returns a constant."""

    def astype(self, x: Any, dtype: np.dtype, /) -> Any:
        """Returns x in another dtype; itself where that is the same."""

    def broadcast_to(self, x: Any, sizes: Sequence[int], /) -> Any: ...

    def concat(self, arrays: Sequence[Any], at: int, /) -> Any: ...

    def full(self, sizes: Sequence[int], value: Any, dtype: np.dtype, /) -> Any: ...

    def arange(self, size: int, /) -> Any:
        """Returns 0 to size - 1 as int32."""

    def permute_dims(self, x: Any, order: Sequence[int], /) -> Any: ...

    def reshape(self, x: Any, sizes: Sequence[int], /) -> Any: ...

    # Not in the standard.

    def einsum(self, equation: str, factors: Sequence[Any], dtype: np.dtype, /) -> Any:
        """Returns a product that is summed in a dtype at least as wide as the factors'."""


class OneDevice(Namespace, Protocol):
    """The functions of a backend whose arrays are shards of one device."""

    def abs(self, x: Any, /) -> Any: ...

    def clip(self, x: Any, least: int, most: int, /) -> Any: ...

    def exp(self, x: Any, /) -> Any: ...

    def log(self, x: Any, /) -> Any: ...

    @property
    def max(self) -> Callable[..., Any]:
        """(x, axis=None, keepdims=False) -> the largest along some axes."""

    def maximum(self, x: Any, y: Any, /) -> Any: ...

    def min(self, x: Any, /) -> Any: ...

    def moveaxis(self, x: Any, source: int, target: int, /) -> Any: ...

    @property
    def sum(self) -> Callable[..., Any]:
        """(x, axis=None, keepdims=False) -> the sum along some axes."""

    def tanh(self, x: Any, /) -> Any: ...

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        """Returns x or y; one of them may be a Python number, which takes the other's dtype."""

    # Not in the standard.

    def as_factor(self, x: Any, like: Any, /) -> Any:
        """Returns x for products with an array: in its dtype, where products may be wider."""

    def difference(self, x: Any, y: Any, /) -> Any:
        """Returns x - y; of integers of two dtypes, in the wider one."""

    def pad(self, x: Any, widths: Sequence[tuple[int, int]], /, fill: float = 0) -> Any:
        """Returns x with fills around it."""

    def pad_axis(self, x: Any, at: int, before: int, after: int, fill: Any, /) -> Any:
        """Returns x with fills around it along an axis; less of it, where they are negative."""

    def slice_axis(self, x: Any, start: Any, size: int, at: int, /) -> Any:
        """Returns `size` positions along an axis, from one on that may be an array."""

    def update_axis(self, x: Any, piece: Any, start: Any, at: int, /) -> Any:
        """Returns x with a piece in it, from a position on that may be an array."""

    def entry(self, table: Sequence[int], index: Any, /) -> Any:
        """Returns one number of a table: an s32 scalar."""

    def split(self, x: Any, sizes: Sequence[int], at: int, /) -> Iterable[Any]:
        """Returns the neighbouring parts of an array, of these sizes."""
