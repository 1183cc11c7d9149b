"""What keeps the layers of a jaxpr from being equal, for the warning that they stay apart.

Layers that are nearly equal show as a distance in the jaxpr at which most equations are alike. The
first equation that is not alike, between two that are, is where two layers differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.imports.jax.rolling import (
    Alike,
    Loop,
    has_product,
    read_elsewhere,
    signs_of,
    stacks_of_inputs,
    without_calls,
)
from meshdsl.imports.jax.sources import source_of
from meshdsl.tensors.dtypes import short


def difference(closed: Any, alike: Alike, paths: Sequence[str]) -> str | None:
    """Returns where two layers of a closed jaxpr differ first; None: it has nothing like layers.

    Args:
        alike: whether inputs, by their numbers, may be one stack.
        paths: of the inputs.
    """
    jaxpr = without_calls(closed).jaxpr
    signs = signs_of(jaxpr)
    period = _period(jaxpr, signs)
    if period is None:
        return _of_sizes(jaxpr, signs)
    same = signs[:-period] == signs[period:]
    start, end = _longest(jaxpr, same)
    if end - start >= period:
        return _of_operands(jaxpr, start, end, period, alike, paths)
    around = [at for at in (end, start - 1) if 0 <= at < len(same)]
    # Between equations that are alike, or else where both stand in the same line.
    inner = [at for at in around if same[:at].any() and same[at:].any()]
    kin = [at for at in around if _place(jaxpr, at) == _place(jaxpr, at + period)]
    chosen = [*inner, *kin, *around]
    return _unlike(jaxpr, chosen[0], period) if chosen else None


def _of_sizes(jaxpr: Any, signs: np.ndarray) -> str | None:
    """Returns where layers differ that have the same operations, of other sizes."""
    numbers: dict[str, int] = {}
    names = [e.primitive.name for e in jaxpr.eqns]
    alone = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
    period = _period(jaxpr, alone)
    if period is None:
        return None
    start, end = _longest(jaxpr, alone[:-period] == alone[period:])
    if end - start < period:
        return None
    unlike = np.flatnonzero(signs[start:end] != signs[start + period : end + period])
    return _unlike(jaxpr, start + int(unlike[0]), period)


def _period(jaxpr: Any, signs: np.ndarray) -> int | None:
    """Returns the distance at which most equations are alike, a product among them."""
    products = np.array([has_product(equation) for equation in jaxpr.eqns], bool)
    best, most = None, 0
    for period in range(1, len(signs)):
        same = signs[:-period] == signs[period:]
        count = int(np.count_nonzero(same))
        if count > most and products[:-period][same].any():
            best, most = period, count
    # A product that is there twice makes no layers: a third of a layer has to be alike.
    return best if best is not None and 3 * most >= best else None


def _longest(jaxpr: Any, same: np.ndarray) -> tuple[int, int]:
    """Returns the longest run of equations that are alike, with a product in it."""
    edges = np.flatnonzero(np.diff(same, prepend=False, append=False))
    runs = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    able = [(a, b) for a, b in runs if any(map(has_product, jaxpr.eqns[a:b]))]
    return max(able, key=lambda run: run[1] - run[0])


def _place(jaxpr: Any, at: int) -> str:
    return str(source_of(jaxpr.eqns[at]))


def _unlike(jaxpr: Any, at: int, period: int) -> str:
    before, here = jaxpr.eqns[at], jaxpr.eqns[at + period]
    if _shown(here) != _shown(before):
        return f"{_shown(here)}, where the layer before has {_shown(before)}"
    other = [k for k, v in sorted(here.params.items()) if repr(v) != repr(before.params.get(k))]
    if not other or any(name.endswith("jaxpr") for name in other):
        return f"{_shown(here)}, whose function or constants differ from those of the layer before"
    differ = "differs from that" if len(other) == 1 else "differ from those"
    return f"{_shown(here)}, whose {' and '.join(other)} {differ} of the layer before"


def _type_of(dtype: Any) -> str:
    """Returns a short name, or JAX's own where numpy has no such type: `key<fry>`."""
    return str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else short(dtype)


def _shown(equation: Any) -> str:
    """Returns what an equation computes of what, and its line."""
    avals = [atom.aval for atom in equation.invars]
    types = ", ".join(f"{_type_of(a.dtype)}{list(a.shape)}" for a in avals)
    return f"`{equation.primitive.name}` of {types}{source_of(equation).at}"


def _of_operands(
    jaxpr: Any, start: int, end: int, period: int, alike: Alike, paths: Sequence[str]
) -> str | None:
    """Returns what differs in copies of a block whose equations are alike, if it is found."""
    count = (end - start) // period + 1
    loops = [Loop(at, period, count) for at in range(start, end + 1 - (count - 1) * period)]
    stops = [read_elsewhere(jaxpr, loop) for loop in loops]
    for loop in (loop for loop, stop in zip(loops, stops, strict=True) if stop is None):
        for stack in stacks_of_inputs(jaxpr, loop):
            if not alike(stack):
                listed = ", ".join(paths[number] for number in stack)
                return f"{listed} cannot be one stack: their names or places differ"
    if None in stops:
        return None
    furthest = max(range(len(loops)), key=lambda n: stops[n] or 0)
    equation = jaxpr.eqns[loops[furthest].start + (stops[furthest] or 0) + period]
    return f"{_shown(equation)}, which reads from elsewhere than that of the layer before"
