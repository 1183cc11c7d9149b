"""Einsum over named dims: the one contraction of the language.

Several operands are contracted pairwise, cheapest pair first, so that every product has its own
plan and its own line in reports.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.ops.elementwise.broadcasting import broadcast_shape
from meshdsl.ops.operation import operation
from meshdsl.ops.reductions.reduction import sum
from meshdsl.ops.shapes.shape import broadcast, transpose
from meshdsl.tensors.dims import (
    Dimension,
    DimsLike,
    Shape,
    as_list,
    did_you_mean,
    misspelt,
    name_of,
)
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Aval, Operation, Primitive
from meshdsl.tracing.trace import bind_one, is_derived


def _rule(inputs: Sequence[Tensor], params: Mapping[str, Any]) -> list[Aval]:
    x, y = inputs
    if x.dtype != y.dtype:
        raise ValueError(f"dtypes differ: {short(x.dtype)} and {short(y.dtype)}; cast one of them")
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")
    broadcast_shape(inputs)
    return [(params["out"], x.dtype)]


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

    Args:
        out: the dims to keep, in order; the others are summed over.
        over: or: the dims to sum over; the others are kept, in order of appearance.

    Raises:
        ValueError: none or both of `out` and `over`; a dim that no operand has (nearest names
            shown); one name with two sizes; dtypes that differ; dims of one size whose names
            differ by a slip, such as `embed` and `emebd`, unless `out` or `over` has both; a dim
            to sum over that one of several operands has alone.
    """
    if not tensors:
        raise ValueError("needs at least one tensor")
    if (out is None) == (over is None):
        raise ValueError("give either out=..., the dims to keep, or over=..., the dims to sum over")
    together = _in_order(tensors)
    listed = as_list(over if out is None else out)  # type: ignore[arg-type]
    which = "over" if out is None else "out"
    problems = []
    for dim in listed:
        name = name_of(dim)
        known = together.find(name)
        if known is None:
            hint = did_you_mean(name, together.names)
            problems.append(f"{which} dim `{name}` is in no operand{hint}")
        elif isinstance(dim, Dimension) and dim.size != known.size:
            problems.append(
                f"{which} dim `{name}` has size {dim.size} but the operands have {known.size}"
            )
    problems += _slips(tensors, {name_of(dim) for dim in listed})
    if problems:
        raise ValueError("; ".join(problems))
    chosen = together.select(listed)
    keep = chosen if out is not None else together.without(chosen.names)
    alone = [] if is_derived() else _alone(tensors, together.without(keep.names))
    if alone:
        raise ValueError("; ".join(alone))
    return _contract(list(tensors), keep)


def _slips(tensors: Sequence[Tensor], listed: Collection[str]) -> list[str]:
    """Returns the problems with dims whose names differ by a slip."""
    owners: dict[Dimension, list[Tensor]] = {}
    for tensor in tensors:
        for dim in tensor.shape:
            owners.setdefault(dim, []).append(tensor)
    single = [(dim, own[0]) for dim, own in owners.items() if len(own) == 1]
    return [
        f"dim `{one.name}` of {x} and dim `{other.name}` of {y} have one size, and names that "
        f"differ by a slip, so they do not pair up; rename one, as in x.rename({one.name}="
        f"'{other.name}'), or, where both are meant, list both in `out`"
        for (one, x), (other, y) in itertools.combinations(single, 2)
        if x is not y
        and one.size == other.size
        and not (one.name in listed and other.name in listed)
        and misspelt(one.name, other.name)
    ]


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
        tensors = [bind_one(EINSUM, (tensors[i], tensors[j]), {"out": result}), *rest]
    return tensors[0]


def _cheapest_pair(tensors: Sequence[Tensor]) -> tuple[int, int]:
    if len(tensors) == 2:
        return 0, 1
    pairs = itertools.combinations(range(len(tensors)), 2)
    return min(pairs, key=lambda p: _in_order((tensors[p[0]], tensors[p[1]])).volume)
