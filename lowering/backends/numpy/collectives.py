"""The collectives of a program, computed by their definitions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import (
    AllReduce,
    AllToAll,
    Permute,
    SplitDim,
    axes_of,
    parameters_of,
)
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.cuts import cut, join


def _at(instruction: Instruction, dim: str) -> int:
    """Returns the position of a dim in the array of one device."""
    return instruction.inputs[0].local.position(dim)


_COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def _all_reduce(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    result = np.empty_like(inputs[0])
    for group in machine.groups(axes_of(instruction)):
        combine = _COMBINE[parameters_of(instruction, AllReduce)["kind"]]
        result[group] = functools.reduce(combine, inputs[0][group])
    return result


def _reduce_scatter(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    at = _at(instruction, parameters_of(instruction, SplitDim)["dim"])
    (out,), axes = instruction.outputs, axes_of(instruction)
    result = np.empty((machine.mesh.size, *out.local.sizes), out.dtype)
    blocks = cut(np, inputs[0], at + 1, machine.counts(axes))
    for group in machine.groups(axes):
        total = functools.reduce(np.add, blocks[group])
        result[group] = np.stack(np.split(total, len(group), axis=at))
    return result


def _all_gather(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    at = _at(instruction, parameters_of(instruction, SplitDim)["dim"])
    (out,), axes = instruction.outputs, axes_of(instruction)
    result = np.empty((machine.mesh.size, *out.local.sizes), out.dtype)
    for group in machine.groups(axes):
        blocks = np.concatenate(list(inputs[0][group]), axis=at)
        result[group] = join(np, blocks, at, machine.counts(axes), out.local[at].size)
    return result


def _all_to_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    (out,), params = instruction.outputs, parameters_of(instruction, AllToAll)
    split, concat = _at(instruction, params["split"]), _at(instruction, params["concat"])
    axes = params["axes"]
    counts = machine.counts(axes)
    result = np.empty((machine.mesh.size, *out.local.sizes), out.dtype)
    blocks = cut(np, inputs[0], split + 1, counts)
    for group in machine.groups(axes):
        sent = [np.split(row, len(group), axis=split) for row in blocks[group]]
        for index, device in enumerate(group):
            received = np.concatenate([parts[index] for parts in sent], axis=concat)
            result[device] = join(np, received, concat, counts, out.local[concat].size)
    return result


def _permute(machine: Machine, instruction: Instruction, inputs: Arrays) -> np.ndarray:
    result = np.zeros_like(inputs[0])
    for source, target in parameters_of(instruction, Permute)["pairs"]:
        result[target] = inputs[0][source]
    return result


def _each(emit: Callable[[Machine, Instruction, Arrays], np.ndarray]) -> Emitter:
    """Returns the emitter of a collective of several tensors, from that of one."""

    def emit_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
        pairs = zip(instruction.parts, inputs, strict=True)
        return [emit(machine, part, [array]) for part, array in pairs]

    return emit_all


EMITTERS: Mapping[str, Emitter] = {
    "all_reduce": _each(_all_reduce),
    "reduce_scatter": _each(_reduce_scatter),
    "all_gather": _each(_all_gather),
    "all_to_all": _each(_all_to_all),
    "permute": _each(_permute),
}
