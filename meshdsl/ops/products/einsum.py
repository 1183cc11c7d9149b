"""Einsum over named dims: the one contraction of the language.

Several operands are contracted pairwise, cheapest pair first, so that every product has its own
plan and its own line in reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.elementwise.broadcasting import broadcast_shape
from meshdsl.ops.indexing import TAKE
from meshdsl.ops.operation import operation
from meshdsl.ops.products.factors import check_factors, kept_dims
from meshdsl.ops.products.grouped import GROUPED_EINSUM
from meshdsl.ops.reductions.reduction import sum
from meshdsl.ops.shapes.shape import broadcast, transpose
from meshdsl.tensors.dims import (
    DimsLike,
    Shape,
    did_you_mean,
)
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive, TracedTensor
from meshdsl.tracing.trace import bind_one, is_derived


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    x, y = inputs
    check_factors(x, y)
    broadcast_shape(inputs)
    return [(params["out"], params.get("dtype", x.dtype))]


def _gradient(op: Operation, cotangents: Sequence, wanted: Sequence[bool]) -> list[Tensor | None]:
    x, y = op.inputs
    (cotangent,) = cotangents
    gradients: list[Tensor | None] = []
    for mine, other, want in ((x, y, wanted[0]), (y, x, wanted[1])):
        if not want:
            gradients.append(None)
            continue
        known = {*cotangent.shape.names, *other.shape.names}
        out = Shape(dim for dim in mine.shape if dim.name in known)
        pair = (cotangent, other) if mine is x else (other, cotangent)
        gradients.append(broadcast(bind_one(EINSUM, pair, {"out": out}), mine.shape))
    return gradients


EINSUM = Primitive("einsum", _rule, _gradient, positionwise=True, combines="sum", linear=(0, 1))


@operation
def einsum(*tensors: Tensor, out: DimsLike | None = None, over: DimsLike | None = None) -> Tensor:
    """Multiplies tensors by name and sums over some dims.

    `md.einsum(x, w, over="embed")` or `md.einsum(x, w, out=[batch, d_ff])`.

    Each dim that is summed over must be in at least two of several tensors: otherwise a slip in a
    name would sum two dims, each alone. Sum a dim of a single tensor first:
    `md.einsum(md.sum(x, "length"), w, over="embed")`.

    A product of vectors with matrices that `md.take` looks up, one for each vector, makes no copies
    of the matrices: it is `md.grouped_einsum`.

    Args:
        out: the dims to keep, in order; the others are summed over.
        over: or: the dims to sum over; the others are kept, in order of appearance.

    Raises:
        ValueError: none or both of `out` and `over`; a dim that no operand has (nearest names
            shown); one name with two sizes; dtypes that differ; dims of one size whose names
            differ by a slip, such as `embed` and `emebd`, unless `out` or `over` has both; a dim
            to sum over that one of several operands has alone.

    Examples:
        >>> x = md.named([[1.0, 2.0], [3.0, 4.0]], ["batch", "embed"])
        >>> w = md.named([1.0, 10.0], ["embed"])
        >>> print(md.einsum(x, w, over="embed"))
        f32[batch=2] [21. 43.]
        >>> print(md.einsum(x, x.rename(batch="other"), out=["other", "batch"]))
        f32[other=2, batch=2] [[ 5. 11.]
         [11. 25.]]
    """
    if not tensors:
        raise ValueError("needs at least one tensor")
    for text in tensors:
        if isinstance(text, str):
            raise ValueError(
                f"dims have names, so {text!r} is not needed: write md.einsum(x, y, over='dim'), "
                "or out= with the dims to keep"
            )
    together = _in_order(tensors)
    keep = kept_dims(tensors, together, out, over)
    alone = [] if is_derived() else _alone(tensors, together.without(keep.names))
    if alone:
        raise ValueError("; ".join(alone))
    return _contract(list(tensors), keep)


def _alone(tensors: Sequence[Tensor], summed: Shape) -> list[str]:
    """Returns the problems with dims to sum over that only one of several operands has."""
    problems = []
    for dim in summed:
        having = [k for k, tensor in enumerate(tensors) if dim in tensor.shape]
        if len(tensors) == 1 or len(having) > 1:
            continue
        (k,) = having
        rest = [tensor.shape for n, tensor in enumerate(tensors) if n != k]
        unpaired = {
            other.name: None for shape in rest for other in shape.without(tensors[k].shape.names)
        }
        hint = did_you_mean(dim.name, unpaired) or "."
        problems.append(
            f"dim `{dim.name}` is summed over, but of the operands only {tensors[k]} has it, so it "
            f"pairs up with nothing{hint} Rename it as the dim that it should meet, or, to sum it "
            f"alone, do that first: md.sum(x, '{dim.name}')"
        )
    return problems


def _in_order(tensors: Sequence[Tensor]) -> Shape:
    broadcast_shape(tensors)
    return Shape({dim.name: dim for tensor in tensors for dim in tensor.shape}.values())


def _contract(tensors: list[Tensor], keep: Shape) -> Tensor:
    if len(tensors) == 1:
        (x,) = tensors
        gone = [name for name in x.shape.names if name not in keep.names]
        return transpose(sum(x, gone) if gone else x, keep)
    while len(tensors) > 1:
        i, j = _cheapest_pair(tensors)
        rest = [t for k, t in enumerate(tensors) if k not in (i, j)]
        needed = {*keep.names, *(name for t in rest for name in t.shape.names)}
        product = _in_order((tensors[i], tensors[j]))
        result = keep if not rest else Shape(dim for dim in product if dim.name in needed)
        tensors = [_product(tensors[i], tensors[j], result), *rest]
    return tensors[0]


def _product(x: Tensor, y: Tensor, out: Shape) -> Tensor:
    """Returns the product of two tensors; one with looked-up matrices is a grouped product."""
    for vectors, matrices in ((x, y), (y, x)):
        look_up = _look_up_of_matrices(vectors, matrices, out)
        if look_up is not None:
            w, group = look_up.inputs
            params = {"dim": look_up.params["dim"], "out": out}
            return bind_one(GROUPED_EINSUM, (vectors, w, group), params)
    return bind_one(EINSUM, (x, y), {"out": out})


def _look_up_of_matrices(x: Tensor, y: Tensor, out: Shape) -> Operation | None:
    """Returns the look-up that makes y, if each of its matrices meets a single vector of x.

    Then the copies of the matrices would take longer than the products.
    """
    op = y.trace.makers.get(y) if isinstance(y, TracedTensor) and y.trace is not None else None
    if op is None or op.primitive is not TAKE:
        return None
    w, group = op.inputs
    dim, rows = op.params["dim"], group.shape
    matrix = w.shape.without([dim, *rows.names])
    of_matrix, of_x, kept = ({*shape.names} for shape in (matrix, x.shape.without(rows.names), out))
    meet = {*rows.names} & {*x.shape.names} and dim not in {*rows.names, *x.shape.names}
    inner = of_matrix - kept
    return op if meet and inner and of_x == inner and of_matrix & kept else None


def _cheapest_pair(tensors: Sequence[Tensor]) -> tuple[int, int]:
    if len(tensors) == 2:
        return 0, 1
    pairs = itertools.combinations(range(len(tensors)), 2)
    return min(pairs, key=lambda p: _in_order((tensors[p[0]], tensors[p[1]])).volume)
