"""Instructions with bodies, and barriers between what is computed twice."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Block, Instruction


def _scan(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    params = instruction.params
    body: Block = params["body"]
    consts, carries, dim = params["consts"], params["carries"], params["dim"]
    fixed, carry = list(inputs[:consts]), list(inputs[consts : consts + carries])
    stacked = [
        np.moveaxis(a, v.local.position(dim) + 1, 0)
        for a, v in zip(
            inputs[consts + carries :], instruction.inputs[consts + carries :], strict=True
        )
    ]
    steps = range(params["length"])
    rows: list[list[np.ndarray]] = []
    for step in reversed(steps) if params["reverse"] else steps:
        results = machine.run(body, [*fixed, *carry, *(a[step] for a in stacked)])
        carry = results[:carries]
        rows.append(results[carries:])
    if params["reverse"]:
        rows.reverse()
    return [*carry, *(np.stack(column, axis=1) for column in zip(*rows, strict=True))]


EMITTERS: Mapping[str, Emitter] = {
    "barrier": lambda machine, instruction, inputs: tuple(inputs),
    "scan": _scan,
}
