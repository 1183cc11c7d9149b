"""Grouped products: every position is multiplied by the matrix of its group.

`group` says which position of the dim `dim` of w each position uses. Its dims are the *rows* of the
product. No operand is sorted, and none is copied for each row: backends sort the numbers of the
groups, and multiply the rows of a group together.

The two primitives are each other's gradients:

- `grouped_einsum` looks w up: out[rows, ...] = sum of x[rows, ...] w[group[rows], ...].
- `grouped_outer` adds up what the rows of a group have: out[group, ...] = sum of x[...] y[...].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.ops.elementwise.broadcasting import broadcast_shape
from meshdsl.ops.indexing import narrow
from meshdsl.ops.operation import operation
from meshdsl.ops.products.factors import check_factors, kept_dims
from meshdsl.ops.shapes.shape import broadcast
from meshdsl.tensors.dims import DimLike, DimsLike, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    x, y, _ = inputs
    check_factors(x, y)
    broadcast_shape(inputs)
    return [(params["out"], params.get("dtype", x.dtype))]


def _known(like: Shape, *operands: Tensor, groups: str = "") -> Shape:
    """Returns the dims of `like` along which it is not constant: `groups`, and the operands'."""
    names = {groups, *(name for operand in operands for name in operand.shape.names)}
    return Shape(dim for dim in like if dim.name in names)


def _looked_up_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    (x, w, group), (cotangent,), dim = op.inputs, cotangents, op.params["dim"]
    of_x = of_w = None
    if wanted[0]:
        params = {"dim": dim, "out": _known(x.shape, cotangent, w, group)}
        of_x = broadcast(bind_one(GROUPED_EINSUM, (cotangent, w, group), params), x.shape)
    if wanted[1]:
        params = {"dim": dim, "out": _known(w.shape, cotangent, x, group, groups=dim)}
        of_w = broadcast(bind_one(GROUPED_OUTER, (x, cotangent, group), params), w.shape)
    return [of_x, of_w, None]


def _outer_gradient(
    op: Operation, cotangents: Sequence, wanted: Sequence[bool]
) -> list[Tensor | None]:
    (x, y, group), (cotangent,) = op.inputs, cotangents
    gradients: list[Tensor | None] = []
    for mine, other, want in ((x, y, wanted[0]), (y, x, wanted[1])):
        params = {"dim": op.params["dim"], "out": _known(mine.shape, cotangent, other, group)}
        gradient = bind_one(GROUPED_EINSUM, (other, cotangent, group), params) if want else None
        gradients.append(None if gradient is None else broadcast(gradient, mine.shape))
    return [*gradients, None]


_SUMS: Any = {"linear": (0, 1), "combines": "sum"}
GROUPED_EINSUM = Primitive("grouped_einsum", _rule, _looked_up_gradient, **_SUMS)
GROUPED_OUTER = Primitive("grouped_outer", _rule, _outer_gradient, **_SUMS)


@operation
def grouped_einsum(
    x: Tensor,
    w: Tensor,
    group: Tensor,
    dim: DimLike,
    out: DimsLike | None = None,
    over: DimsLike | None = None,
) -> Tensor:
    """Multiplies every position of x by the matrix of its group, and sums over some dims.

    `md.grouped_einsum(x, w, expert, "experts", over="embed")`, with [batch, length, embed],
    [experts, embed, d_ff] and [batch, length], gives [batch, length, d_ff]. It is
    `md.einsum(x, md.take(w, expert, "experts"), over="embed")` without a copy of a matrix for each
    position. `md.einsum` of such a look-up is this operation too.

    Args:
        w: has `dim`, which counts the groups. Other dims that it shares with `group` pair up.
        group: the number of each position's group, an integer. A position with another number
            takes part in no product: its result is zero.
        out: the dims to keep, in order; the others are summed over.
        over: or: the dims to sum over; the others are kept, in order of appearance.

    Raises:
        ValueError: w lacks `dim`, or another operand has it; none or both of `out` and `over`; a
            dim that no operand has (nearest names shown); sizes or dtypes that differ; dims of one
            size whose names differ by a slip, unless `out` or `over` has both; `group` has no
            integers.

    Examples:
        >>> x = md.named([[1.0], [2.0], [3.0]], ["token", "embed"])
        >>> w = md.named([[10.0], [100.0]], ["experts", "embed"])
        >>> expert = md.named([0, 1, 1], ["token"])
        >>> print(md.grouped_einsum(x, w, expert, "experts", over="embed"))
        f32[token=3] [ 10. 200. 300.]
    """
    count = w.shape.get(dim)
    problems = [
        f"{which} has the dim `{count.name}`, which counts the groups of w; rename it in one"
        for which, tensor in (("x", x), ("group", group))
        if tensor.shape.find(count.name) is not None
    ]
    if problems:
        raise ValueError("; ".join(problems))
    broadcast_shape((x, w, group))
    every = {each.name: each for tensor in (x, group, w) for each in tensor.shape}
    together = Shape(every.values()).without([count.name])
    keep = kept_dims((x, w, group), together, out, over)
    params = {"dim": count.name, "out": keep}
    return bind_one(GROUPED_EINSUM, (x, w, narrow(group, count.size)), params)
