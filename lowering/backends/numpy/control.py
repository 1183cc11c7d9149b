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
    while (goes_on := machine.run(params["condition"], [*fixed, *carry])[0]).any():
        after = machine.run(params["body"], [*fixed, *carry])
        carry = _chosen(machine, goes_on, after, carry)
    return carry


def _cond(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    if_true, if_false = instruction.bodies
    predicate, rest = inputs[0], inputs[1:]
    if predicate.all() or not predicate.any():
        return machine.run(if_true if predicate.all() else if_false, rest)
    return _chosen(machine, predicate, machine.run(if_true, rest), machine.run(if_false, rest))


def _chosen(
    machine: Machine, predicate: np.ndarray, if_true: Arrays, if_false: Arrays
) -> list[np.ndarray]:
    """Returns the rows of the branch that each device takes.

    Only stages of a pipeline may take different ones: collectives are among devices of one stage.
    """
    stages = machine.index(machine.stage_axes)
    for stage in np.unique(stages):
        alike = predicate[stages == stage]
        assert alike.all() or not alike.any(), "devices take different branches"
    return [
        np.where(predicate.reshape([-1] + [1] * (a.ndim - 1)), a, b)
        for a, b in zip(if_true, if_false, strict=True)
    ]


EMITTERS: Mapping[str, Emitter] = {
    "barrier": lambda machine, instruction, inputs: tuple(inputs),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
