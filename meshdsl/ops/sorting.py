"""Order along one dim: sort, argsort, top_k, nth_largest.

The order is that of numpy, on every layout: NaN is larger than everything, -0.0 equals 0.0, and
equal elements keep their order (descending as well).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.creation import full
from meshdsl.ops.elementwise.arithmetic import cast
from meshdsl.ops.indexing import SCATTER_ADD, take
from meshdsl.ops.operation import operation
from meshdsl.tensors.dims import Dimension, DimLike, Shape
from meshdsl.tensors.dtypes import need_kind
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind, bind_one

INT32 = np.dtype("int32")


def _sort_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    need_kind(x.dtype, "fi")
    return [(x.shape, x.dtype), (x.shape, INT32)]


def _top_k_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    (x,) = inputs
    need_kind(x.dtype, "fi")
    shape = Shape(params["into"] if d.name == params["dim"] else d for d in x.shape)
    return [(shape, x.dtype), (shape, INT32)]


def _back_in_place(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Scatters the cotangents of the values to where the values came from."""
    (x,), (_, indices) = op.inputs, op.outputs
    if cotangents[0] is None:
        return [None]
    params = {"dim": op.params["dim"], "shape": x.shape}
    return [bind_one(SCATTER_ADD, (cotangents[0], indices), params)]


SORT = Primitive("sort", _sort_rule, _back_in_place, chooses=True)
TOP_K = Primitive("top_k", _top_k_rule, _back_in_place, chooses=True)


def _sorted(x: Tensor, dim: DimLike, descending: bool) -> tuple[Tensor, Tensor]:
    numbers = cast(x, "uint8") if x.dtype == np.bool_ else x
    params = {"dim": x.shape.get(dim).name, "descending": bool(descending)}
    values, indices = bind(SORT, (numbers,), params).outputs
    return (values != 0 if x.dtype == np.bool_ else values), indices


@operation
def sort(x: Tensor, dim: DimLike, descending: bool = False) -> Tensor:
    """Returns x sorted along a dim: `md.sort(x, "length")`.

    NaN comes last, descending first. A split dim is gathered, or moved by an all_to_all where
    another dim can be split instead.

    Raises:
        ValueError: x lacks the dim, or is complex.

    Examples:
        >>> scores = md.named([[3.0, 1.0, 2.0], [4.0, 6.0, 5.0]], ["batch", "length"])
        >>> print(md.sort(scores, "length", descending=True))
        f32[batch=2, length=3] [[3. 2. 1.]
         [6. 5. 4.]]
    """
    return _sorted(x, dim, descending)[0]


@operation
def argsort(x: Tensor, dim: DimLike, descending: bool = False) -> Tensor:
    """Returns the s32 indices that sort x along a dim, by `md.take_along(x, indices, dim)`.

    Equal elements keep their order, descending as well.

    Raises:
        ValueError: x lacks the dim, or is complex.

    Examples:
        >>> scores = md.named([3.0, 1.0, 2.0], ["length"])
        >>> print(md.argsort(scores, "length"))
        s32[length=3] [1 2 0]
        >>> print(md.take_along(scores, md.argsort(scores, "length"), "length"))
        f32[length=3] [1. 2. 3.]
    """
    return _sorted(x, dim, descending)[1]


@operation
def top_k(x: Tensor, k: int, dim: DimLike, into: DimLike) -> tuple[Tensor, Tensor]:
    """Returns the k largest elements along a dim, largest first, and their s32 indices.

    `values, indices = md.top_k(scores, 2, "experts", into="choice")`. NaN is the largest; of equal
    elements the first comes first. From a split dim, each device sends its own k largest only.

    Args:
        into: the name of the dim of size k that takes the place of `dim`.

    Raises:
        ValueError: k is not from 1 to the size of the dim, or x has another dim called `into`.

    Examples:
        >>> scores = md.named([[1.0, 3.0, 2.0], [6.0, 4.0, 5.0]], ["token", "experts"])
        >>> values, indices = md.top_k(scores, 2, "experts", into="choice")
        >>> print(values)
        f32[token=2, choice=2] [[3. 2.]
         [6. 5.]]
        >>> print(indices)
        s32[token=2, choice=2] [[1 2]
         [0 2]]
    """
    dim = x.shape.get(dim)
    if not 1 <= k <= dim.size:
        raise ValueError(f"k must be from 1 to {dim.size}, the size of dim `{dim.name}`, not {k}")
    chosen = Dimension(into if isinstance(into, str) else into.name, k)
    if isinstance(into, Dimension) and into != chosen:
        raise ValueError(f"{into} cannot name the {k} largest; give its name or {chosen}")
    numbers = cast(x, "uint8") if x.dtype == np.bool_ else x
    values, indices = bind(TOP_K, (numbers,), {"dim": dim.name, "into": chosen}).outputs
    return (values != 0 if x.dtype == np.bool_ else values), indices


@operation
def nth_largest(x: Tensor, n: int, dim: DimLike) -> Tensor:
    """Returns the n-th largest element along a dim, counting from 0: the maximum is number 0.

    NaN is the largest. Equal elements count one by one.

    Raises:
        ValueError: n is not below the size of the dim.

    Examples:
        >>> x = md.named([[4.0, 1.0, 3.0], [2.0, 2.0, 5.0]], ["batch", "length"])
        >>> print(md.nth_largest(x, 1, "length"))
        f32[batch=2] [3. 2.]
    """
    along = x.shape.get(dim)
    if not 0 <= n < along.size:
        raise ValueError(f"n must be from 0 to {along.size - 1} along {along}, not {n}")
    values, _ = top_k(x, n + 1, along, along.name)
    return take(values, full([], n, "int32"), along.name)
