"""Elementwise instructions: a function of arrays that broadcast by position, on aligned dims.

An operation needs no line here. It needs none in a backend whose framework has a function with its
name.
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
    modules: Sequence[Any],
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> dict[str, Callable[..., Any]]:
    """Returns the functions of all elementwise instructions except `cast`, by name.

    `cast` is an emitter of its own: it depends on the dtype of its result.

    Args:
        own: the backend's own functions; they come first.
        modules: the framework's modules; the first one with a function of the name is used.
        wrap: is applied to each function of a module.
    """
    table = dict(own)
    for name, kind in KINDS.items():
        if kind.elementwise and name not in (*own, "cast", "stop_gradient"):
            candidates = [getattr(module, name) for module in modules if hasattr(module, name)]
            if candidates:  # else `missing` names the file for it
                table[name] = wrap(candidates[0])
    return table
