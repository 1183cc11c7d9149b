"""What a program of whole arrays does for each instruction: what one device would do with all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.lowering.backends.jax.emitters import EMITTERS as OF_ONE_DEVICE
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax_auto.machine import WholeMachine
from meshdsl.lowering.parameters import Convolve, Window, parameters_of
from meshdsl.lowering.program import Instruction

# What computes every position of its results from many of its operands'.
ASKED = frozenset(
    "attention attention_gradient cummax cummin cumprod cumsum einsum linear_recurrence "
    "local scatter_add scatter_max scatter_min sort take top_k".split()
)


def _asking(emitter: Emitter) -> Emitter:
    """Returns an emitter that asks for the layouts of its results."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        assert isinstance(machine, WholeMachine)
        results = emitter(machine, instruction, inputs)
        if not isinstance(results, list | tuple):
            results = [results]
        pairs = zip(instruction.outputs, results, strict=True)
        return [machine.ask(value, array) for value, array in pairs]

    return emit


def _whole(emitter: Emitter) -> Emitter:
    """Keeps whole the dims along which windows slide.

    XLA's partitioner (jaxlib 0.10.2) aborts where a split dim is padded negatively and dilated, and
    for some convolutions along one it returns wrong numbers.
    """

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        assert isinstance(machine, WholeMachine)
        dims = _slid(instruction)
        rows = zip(instruction.inputs, inputs, strict=True)
        given = [machine.ask(value, array, dims) for value, array in rows]
        results = emitter(machine, instruction, given)
        return machine.ask(instruction.outputs[0], results, dims)

    return emit


def _slid(instruction: Instruction) -> set[str]:
    """Returns the dims along which windows slide; none for a plain slice."""
    if instruction.op == "window":
        params = parameters_of(instruction, Window)
        plain = abs(params["stride"]) == abs(params["dilation"]) == 1
        return set() if plain else {params["dim"]}
    slides = parameters_of(instruction, Convolve)["slides"]  # as pooling has them
    return {name for s in slides for name in (s.x, s.window, s.out)}


SLIDING = frozenset(["convolve", "window", "window_match", "window_max", "window_sum"])
EMITTERS: Mapping[str, Emitter] = {
    op: _whole(emitter) if op in SLIDING else _asking(emitter) if op in ASKED else emitter
    for op, emitter in OF_ONE_DEVICE.items()
}
