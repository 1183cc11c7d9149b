"""Elementwise instructions: a function of arrays that broadcast by position, on aligned dims.

An operation needs no line here, and none in a backend whose framework has a function of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshdsl.lowering.backends.common.arrange import align
from meshdsl.lowering.backends.common.machine import BaseMachine
from meshdsl.lowering.backends.contract import Emitter
from meshdsl.lowering.instructions import KINDS
from meshdsl.lowering.program import Instruction


def elementwise(function: Callable[..., Any]) -> Emitter:
    """Returns the emitter of a function of arrays that broadcast by position."""

    def emit(machine: BaseMachine, instruction: Instruction, inputs: Sequence[Any]) -> Any:
        xp, (out,) = machine.xp, instruction.outputs
        sizes = machine.sizes(out)
        aligned = [
            align(xp, array, value.local, out.local) if machine.sizes(value) else array
            for array, value in zip(inputs, instruction.inputs, strict=True)
        ]
        result = function(*aligned)
        if result.shape != sizes:
            result = xp.broadcast_to(result, sizes)
        return xp.astype(result, out.dtype)

    return emit


def functions(
    own: Mapping[str, Callable[..., Any]],
    rooms: Sequence[Any],
    made: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> dict[str, Callable[..., Any]]:
    """Returns the functions of all elementwise instructions but for `cast`, which has a dtype.

    Args:
        own: those that a backend writes itself, or takes from elsewhere.
        rooms: modules of which the first that has a function of an instruction's name gives it.
        made: what is made of a function of a room.
    """
    found = dict(own)
    for name, kind in KINDS.items():
        if kind.elementwise and name not in (*own, "cast", "stop_gradient"):
            named = [getattr(room, name) for room in rooms if hasattr(room, name)]
            if named:  # else `missing` says where a line for it goes
                found[name] = made(named[0])
    return found
