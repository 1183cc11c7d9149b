"""Instructions with bodies, and barriers, which keep recomputed values apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Scan, While, parameters_of
from meshdsl.lowering.program import Instruction


def _scan(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    """Runs a loop over slices, which are moved to the front of their stacks."""
    params = parameters_of(instruction, Scan)
    body = params["body"]
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    fixed, carry = list(inputs[:consts]), list(inputs[consts : consts + carries])
    stacked = [
        np.moveaxis(a, v.local.position(dim) + 1, 0)
        for a, v in zip(
            inputs[consts + carries :], instruction.inputs[consts + carries :], strict=True
        )
    ]
    steps, ahead = range(params["length"]), params.get("ahead", ())
    # Operands that are read ahead give the slice of the next iteration, after the last the first.
    offsets = [(-1 if params["reverse"] else 1) if n in ahead else 0 for n in range(len(stacked))]

    def slices(step: int) -> list[np.ndarray]:
        return [a[(step + by) % len(steps)] for a, by in zip(stacked, offsets, strict=True)]

    rows: list[list[np.ndarray]] = []
    for step in reversed(steps) if params["reverse"] else steps:
        results = machine.run(body, [*fixed, *carry, *slices(step)])
        carry = results[:carries]
        rows.append(results[carries:])
    if params["reverse"]:
        rows.reverse()
    return [*carry, *(np.stack(column, axis=1) for column in zip(*rows, strict=True))]


def _while(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    params = parameters_of(instruction, While)
    consts = params["consts"]
    fixed, carry = list(inputs[:consts]), list(inputs[consts:])
    while _is_true(machine.run(params["condition"], [*fixed, *carry])[0]):
        carry = machine.run(params["body"], [*fixed, *carry])
    return carry


def _cond(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    if_true, if_false = instruction.bodies
    return machine.run(if_true if _is_true(inputs[0]) else if_false, inputs[1:])


def _is_true(predicate: np.ndarray) -> bool:
    """Returns the value of a predicate, which must be the same on all devices."""
    assert (predicate == predicate[0]).all(), "devices take different branches"
    return bool(predicate[0])


EMITTERS: Mapping[str, Emitter] = {
    "barrier": lambda machine, instruction, inputs: tuple(inputs),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
