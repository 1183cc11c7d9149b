"""Sorting along one dim of a shard."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshdsl.lowering.backends.numpy.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.numpy.namespace import wide
from meshdsl.lowering.parameters import Sort, TopK, parameters_of
from meshdsl.lowering.program import Instruction


def _order(x: np.ndarray, at: int, descending: bool) -> np.ndarray:
    """Returns the indices that sort x; equal elements keep their order."""
    if not descending:
        return np.argsort(x, at, kind="stable")
    backwards = np.flip(np.argsort(np.flip(x, at), at, kind="stable"), at)
    return x.shape[at] - 1 - backwards


def _sort(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    (x,), params = inputs, parameters_of(instruction, Sort)
    at = instruction.inputs[0].local.position(params["dim"]) + 1
    order = _order(wide(x), at, params["descending"])
    return [np.take_along_axis(x, order, at), order.astype(np.int32)]


def _top_k(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[np.ndarray]:
    """Returns the largest numbers, in descending order, and their indices."""
    (x,), params = inputs, parameters_of(instruction, TopK)
    at = instruction.inputs[0].local.position(params["dim"]) + 1
    count = instruction.outputs[0].local.get(params["into"]).size
    order = np.take(_order(wide(x), at, True), range(count), at)
    return [np.take_along_axis(x, order, at), order.astype(np.int32)]


EMITTERS: Mapping[str, Emitter] = {
    "sort": _sort,
    "top_k": _top_k,
}
