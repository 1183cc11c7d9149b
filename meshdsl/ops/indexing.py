"""Look-up by index: take, one_hot, and take's gradient, scatter_add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.dims import Dimension, DimLike, Shape
from meshdsl.dtypes import is_integer, short
from meshdsl.graph import Aval, Operation, Primitive, Tensor
from meshdsl.ops.creation import arange
from meshdsl.ops.elementwise import cast
from meshdsl.ops.operation import operation
from meshdsl.trace import bind_one


def _take_rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    table, indices = inputs
    if not is_integer(indices.dtype):
        raise ValueError(f"the indices must be integers, got {short(indices.dtype)}")
    shared = set(indices.shape.names) & set(table.shape.names)
    if shared:
        raise ValueError(
            f"table and indices share the dim `{', '.join(sorted(shared))}`; rename it in one"
        )
    return [(Shape([*indices.shape, *table.shape.without([params["dim"]])]), table.dtype)]


def _take_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    table, indices = op.inputs
    params = {"dim": op.params["dim"], "shape": table.shape}
    return [bind_one(SCATTER_ADD, (cotangents[0], indices), params), None]


def _scatter_gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list:
    return [bind_one(TAKE, (cotangents[0], op.inputs[1]), {"dim": op.params["dim"]}), None]


TAKE = Primitive("take", _take_rule, _take_gradient)
SCATTER_ADD = Primitive(
    "scatter_add",
    lambda inputs, params: [(params["shape"], inputs[0].dtype)],
    _scatter_gradient,
)


@operation
def take(table: Tensor, indices: Tensor, dim: DimLike) -> Tensor:
    """Looks indices up along a dim of a table: `md.take(embedding, tokens, "vocab")`.

    Returns:
        [*indices, *the table's other dims]. An index outside of [0, size) gives zeros, on every
        layout, and its gradient is dropped.
    """
    if table.dtype == np.bool_:  # looked up as numbers, of which sums can be made
        return take(cast(table, "int32"), indices, dim) != 0
    return bind_one(TAKE, (table, indices), {"dim": table.shape.get(dim).name})


@operation
def one_hot(indices: Tensor, dim: Dimension, dtype: Any = "float32") -> Tensor:
    """Returns 1 where `dim`'s index equals the value of `indices`, else 0: [*indices, dim]."""
    if not is_integer(indices.dtype):
        raise ValueError(f"the indices must be integers, got {short(indices.dtype)}")
    if indices.dtype.itemsize < 4:  # too narrow to count along a long dim
        indices = cast(indices, "int32")
    return cast(indices == arange(dim, indices.dtype), dtype)
