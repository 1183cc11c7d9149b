"""The functions of a framework that shared emitters use, as protocols.

A backend's `namespace.py` is a module of functions of its arrays. They have the names of the array
API standard (data-apis.org/array-api); functions that it lacks stand apart below. A backend imports
a function from its framework. It writes its own if the framework has none, or one that is slower or
emits another program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import numpy as np


class Namespace(Protocol):
    """The functions that every backend has.

    Attributes:
        LEAD: the number of axes in front of an array's dims: 1 if an array has the shards of all
            devices, 0 if it is the shard of one.
    """

    @property
    def LEAD(self) -> int: ...

    def asarray(self, value: Any, dtype: np.dtype, /) -> Any:
        """Returns a constant."""

    def astype(self, x: Any, dtype: np.dtype, /) -> Any:
        """Returns x in another dtype; itself if the dtype is the same."""

    def broadcast_to(self, x: Any, sizes: Sequence[int], /) -> Any: ...

    def concat(self, arrays: Sequence[Any], at: int, /) -> Any: ...

    def full(self, sizes: Sequence[int], value: Any, dtype: np.dtype, /) -> Any: ...

    def arange(self, size: int, /) -> Any:
        """Returns 0 to size - 1 as int32."""

    def permute_dims(self, x: Any, order: Sequence[int], /) -> Any: ...

    def reshape(self, x: Any, sizes: Sequence[int], /) -> Any: ...

    # Not in the standard.

    def einsum(self, equation: str, factors: Sequence[Any], dtype: np.dtype, /) -> Any:
        """Returns a product of factors in `dtype`, summed in a dtype at least as wide as theirs."""

    def numbers(self, x: Any, dtype: np.dtype, /) -> Any:
        """Returns x, whose numbers a framework may keep as their bits."""


class OneDevice(Namespace, Protocol):
    """The functions of a backend whose arrays are the shards of one device."""

    def abs(self, x: Any, /) -> Any: ...

    def clip(self, x: Any, least: int, most: int, /) -> Any: ...

    def exp(self, x: Any, /) -> Any: ...

    def log(self, x: Any, /) -> Any: ...

    @property
    def max(self) -> Callable[..., Any]:
        """(x, axis=None, keepdims=False) -> the maximum along some axes."""

    def maximum(self, x: Any, y: Any, /) -> Any: ...

    def min(self, x: Any, /) -> Any: ...

    def moveaxis(self, x: Any, source: int, target: int, /) -> Any: ...

    @property
    def sum(self) -> Callable[..., Any]:
        """(x, axis=None, keepdims=False) -> the sum along some axes."""

    def tanh(self, x: Any, /) -> Any: ...

    def where(self, condition: Any, x: Any, y: Any, /) -> Any:
        """Returns x or y. One of them may be a Python number: it has the other's dtype."""

    # Not in the standard.

    def as_factor(self, x: Any, like: Any, /) -> Any:
        """Returns x as a factor of products with `like`; rounded to its dtype if that is faster."""

    def difference(self, x: Any, y: Any, /) -> Any:
        """Returns x - y; for integers of two dtypes, in the wider one."""

    def pad(self, x: Any, widths: Sequence[tuple[int, int]], /, fill: float = 0) -> Any:
        """Returns x padded with `fill`: `widths` are (before, after) of each axis."""

    def pad_axis(self, x: Any, at: int, before: int, after: int, fill: Any, /) -> Any:
        """Returns x padded with `fill` along axis `at`; a negative width crops it."""

    def slice_axis(self, x: Any, start: Any, size: int, at: int, /) -> Any:
        """Returns `size` positions along axis `at`, from `start` on, which may be an array."""

    def update_axis(self, x: Any, piece: Any, start: Any, at: int, /) -> Any:
        """Returns x with `piece` from position `start` on, which may be an array."""

    def put_axis(self, x: Any, piece: Any, places: Any, at: int, /) -> Any:
        """Returns x with each position of `piece` along axis `at` at its place, if it is inside.

        No two places inside of x are alike.
        """

    def entry(self, table: Sequence[int], index: Any, /) -> Any:
        """Returns the number of a table at an index: an s32 scalar."""

    def split(self, x: Any, sizes: Sequence[int], at: int, /) -> Iterable[Any]:
        """Returns the consecutive parts of an array, of these sizes along axis `at`."""
