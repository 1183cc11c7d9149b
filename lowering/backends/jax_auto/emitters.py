"""The emitters of programs of global arrays: those of one device, with constraints on layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.lowering.backends.jax.emitters import EMITTERS as OF_ONE_DEVICE
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax_auto.machine import GlobalMachine
from meshdsl.lowering.parameters import Convolve, Window, parameters_of
from meshdsl.lowering.program import Instruction

# Instructions that compute each position of their results from many positions of their operands.
CONSTRAINED = frozenset(
    "attention attention_gradient cummax cummin cumprod cumsum einsum linear_recurrence "
    "local scatter_add scatter_max scatter_min sort take top_k".split()
)


def _constraining(emitter: Emitter) -> Emitter:
    """Returns an emitter that constrains its results to their layouts."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        assert isinstance(machine, GlobalMachine)
        results = emitter(machine, instruction, inputs)
        if not isinstance(results, list | tuple):
            results = [results]
        pairs = zip(instruction.outputs, results, strict=True)
        return [machine.constrain(value, array) for value, array in pairs]

    return emit


def _unsplit(emitter: Emitter) -> Emitter:
    """Returns an emitter that does not split the dims along which windows slide."""
    # XLA's partitioner (jaxlib 0.10.2) aborts if a split dim has negative padding and dilation. For
    # some convolutions along a split dim it returns wrong numbers.

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        assert isinstance(machine, GlobalMachine)
        dims = _slid_dims(instruction)
        rows = zip(instruction.inputs, inputs, strict=True)
        constrained = [machine.constrain(value, array, dims) for value, array in rows]
        results = emitter(machine, instruction, constrained)
        return machine.constrain(instruction.outputs[0], results, dims)

    return emit


def _slid_dims(instruction: Instruction) -> set[str]:
    """Returns the dims along which windows slide; none for a plain slice."""
    if instruction.op == "window":
        params = parameters_of(instruction, Window)
        plain = abs(params["stride"]) == abs(params["dilation"]) == 1
        return set() if plain else {params["dim"]}
    slides = parameters_of(instruction, Convolve)["slides"]  # pooling has the same parameter
    return {name for s in slides for name in (s.x, s.window, s.out)}


SLIDING = frozenset(["convolve", "window", "window_match", "window_max", "window_sum"])
EMITTERS: Mapping[str, Emitter] = {
    op: _unsplit(emitter)
    if op in SLIDING
    else _constraining(emitter)
    if op in CONSTRAINED
    else emitter
    for op, emitter in OF_ONE_DEVICE.items()
}
