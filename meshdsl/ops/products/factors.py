"""Factors: what einsums and grouped products ask of their operands and of the listed dims.

Every mistake in `out` and `over` is reported, not the first one alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from meshdsl.tensors.dims import (
    Dimension,
    DimsLike,
    Shape,
    as_list,
    did_you_mean,
    misspelt,
    name_of,
)
from meshdsl.tensors.dtypes import is_float8, short
from meshdsl.tensors.tensor import Tensor


def check_factors(x: Tensor, y: Tensor) -> None:
    """Raises ValueError unless the dtypes of two tensors can be multiplied."""
    if x.dtype != y.dtype and not (is_float8(x.dtype) and is_float8(y.dtype)):
        raise ValueError(f"dtypes differ: {short(x.dtype)} and {short(y.dtype)}; cast one of them")
    if x.dtype == np.bool_:
        raise ValueError("needs numbers, got bool; cast first, as in md.cast(x, 'float32')")


def kept_dims(
    tensors: Sequence[Tensor], together: Shape, out: DimsLike | None, over: DimsLike | None
) -> Shape:
    """Returns the dims of a product that are not summed over, in order.

    Args:
        together: the dims that may be kept or summed over.

    Raises:
        ValueError: none or both of `out` and `over`; a dim that no operand has (nearest names
            shown), or another size of one; or dims of one size whose names differ by a slip, unless
            `out` or `over` has both.
    """
    if (out is None) == (over is None):
        raise ValueError("give either out=..., the dims to keep, or over=..., the dims to sum over")
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
    return chosen if out is not None else together.without(chosen.names)


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
