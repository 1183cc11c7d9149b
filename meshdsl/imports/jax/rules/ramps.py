"""Ramps: indices that count 0, 1, ... along a position, so that two positions pair up.

`x[jnp.arange(batch), labels]` looks up one element of each row. Read off the jaxpr, the look-up
keeps `batch` a dim, and a layout may split it.
"""

from __future__ import annotations

from typing import Any

import jax.extend.core as jex


def ramp(jaxpr: Any, atom: Any, component: int = -1) -> int | None:
    """Returns the position along which a variable of a jaxpr is a ramp, or None.

    Args:
        component: which part of a concatenation along the last position is meant.
    """
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    return _ramp(makers, atom, component)


def _ramp(makers: Any, atom: Any, component: int = -1) -> int | None:
    if isinstance(atom, jex.Literal) or atom not in makers:
        return None
    equation = makers[atom]
    name, params, operands = equation.primitive.name, equation.params, equation.invars
    if name == "iota":
        return int(params["dimension"])
    if name == "concatenate" and component >= 0:
        last = len(atom.aval.shape) - 1
        alone = all(v.aval.shape[last] == 1 for v in operands)
        if params["dimension"] == last and alone:
            return _ramp(makers, operands[component])
        return None
    if name == "broadcast_in_dim":
        place = _ramp(makers, operands[0])
        where = params["broadcast_dimensions"]
        if place is None or operands[0].aval.shape[place] != atom.aval.shape[where[place]]:
            return None
        return int(where[place])
    if name == "convert_element_type" or (name == "copy" and operands):
        return _ramp(makers, operands[0])
    if name == "select_n":  # x where it is not negative: all of a ramp
        test = makers.get(operands[0]) if not isinstance(operands[0], jex.Literal) else None
        if test is not None and test.primitive.name == "lt" and test.invars[0] is operands[1]:
            bound = test.invars[1]
            if isinstance(bound, jex.Literal) and bound.val == 0:
                return _ramp(makers, operands[1])
    return None
