"""Instructions that rearrange or concatenate data, constants, and einsum.

All frameworks share them, and so does numpy, the reference: they contain no arithmetic. Only
`einsum` does, and each machine has its own, with its own accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshdsl.lowering.backends.common.arrange import align, equation
from meshdsl.lowering.backends.common.machine import BaseMachine
from meshdsl.lowering.backends.contract import Emitter
from meshdsl.lowering.parameters import AlongDim, Data, Full, axes_of, parameters_of
from meshdsl.lowering.program import Instruction

Arrays = Sequence[Any]


def _reshape(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    return machine.xp.reshape(inputs[0], machine.sizes(instruction.outputs[0]))


def _rename(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    return inputs[0]


def _transpose(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    (have,), (out,) = instruction.inputs, instruction.outputs
    return align(machine.xp, inputs[0], have.local, out.local)


def _broadcast(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    aligned = _transpose(machine, instruction, inputs)
    return machine.xp.broadcast_to(aligned, machine.sizes(instruction.outputs[0]))


def _concat(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    at = instruction.outputs[0].local.position(parameters_of(instruction, AlongDim)["dim"])
    return machine.xp.concat(list(inputs), at + machine.xp.LEAD)


def _full(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    (out,), value = instruction.outputs, parameters_of(instruction, Full)["value"]
    if sizes := machine.sizes(out):
        return machine.xp.full(sizes, value, out.dtype)
    return machine.xp.asarray(value, out.dtype)


def _literal(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    (out,), data = instruction.outputs, parameters_of(instruction, Data)["data"]
    return _replicated(machine, instruction, machine.xp.asarray(data, out.dtype))


def _iota(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    (out,) = instruction.outputs
    return _replicated(machine, instruction, machine.xp.arange(out.local[0].size))


def _replicated(machine: BaseMachine, instruction: Instruction, constant: Any) -> Any:
    """Returns a constant on every device."""
    if not machine.xp.LEAD:
        return constant
    return machine.xp.broadcast_to(constant, machine.sizes(instruction.outputs[0]))


def _device_index(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    return machine.index(axes_of(instruction))


def _einsum(machine: BaseMachine, instruction: Instruction, inputs: Arrays) -> Any:
    shapes, (out,) = [value.local for value in instruction.inputs], instruction.outputs
    letters = equation(shapes, out.local, machine.xp.LEAD)
    factors = [
        machine.xp.numbers(x, value.dtype)
        for x, value in zip(inputs, instruction.inputs, strict=True)
    ]
    return machine.product(letters, factors, out.dtype)


EMITTERS: Mapping[str, Emitter] = {
    "broadcast": _broadcast,
    "concat": _concat,
    "device_index": _device_index,
    "einsum": _einsum,
    "full": _full,
    "iota": _iota,
    "literal": _literal,
    "rename": _rename,
    "reshape": _reshape,
    "transpose": _transpose,
}
