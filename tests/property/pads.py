"""Poison: NaN in every pad, so that a pad that is read shows.

On the numpy backend every instruction leaves some, and so does what brings the program's inputs. On
the other backends the inputs alone have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from meshdsl.lowering.backends.jax import arguments
from meshdsl.lowering.backends.numpy.machine import Arrays, Machine
from meshdsl.lowering.backends.tf import arguments as tf_arguments
from meshdsl.lowering.communication.exchange import bounds
from meshdsl.lowering.program import Block, Value
from meshdsl.tensors.cuts import Cuts, pad
from meshdsl.tensors.dtypes import is_differentiable

# What these put into pads counts: it is how pads are masked and windows filled, and what has been
# masked is moved within a rule. Pads that they only pass on are poisoned already.
_MASKS = frozenset(
    "select assemble full literal permute all_gather local_slice concat rename transpose broadcast "
    "reshape".split()
)
# Integers are indices within a shard too, which no one masks; these only move data.
_MOVES = frozenset(["slice", "all_to_all", "take", "argmax", "argmin", "sort"])


@contextmanager
def poisoned() -> Iterator[None]:
    """Makes pads NaN, or 1 in integers: of inputs, and of results that mask no pads."""

    def run(self: Machine, block: Block, inputs: Arrays) -> list[np.ndarray]:
        held: dict[Value, np.ndarray] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            given = [held[v] for v in instruction.inputs]
            results = self.emitters[instruction.op](self, instruction, given)
            if isinstance(results, np.ndarray):
                results = (results,)
            for value, array in zip(instruction.outputs, results, strict=True):
                kept = instruction.op in _MASKS or (
                    not is_differentiable(array.dtype) and instruction.op not in _MOVES
                )
                held[value] = array if kept else _poison(self, value, array)
        return [held[v] for v in block.outputs]

    shard = Machine.shard

    def poisoned_shard(self: Machine, data: np.ndarray, value: Value) -> np.ndarray:
        return _poison(self, value, shard(self, data, value))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "run", run)
        patch.setattr(Machine, "shard", poisoned_shard)
        patch.setattr(arguments, "pad", pad_with_poison)
        patch.setattr(tf_arguments, "pad", pad_with_poison)
        yield


def pad_with_poison(xp: Any, array: Any, cuts: Cuts) -> Any:
    """Cuts every dim of an array, as `meshdsl.tensors.cuts.pad` does, with poison for pads."""
    real = pad(xp, xp.ones(array.shape, bool), cuts)
    return xp.where(real, pad(xp, array, cuts), xp.asarray(_poison_of(array.dtype), array.dtype))


def _poison_of(dtype: Any) -> float:
    return np.nan if is_differentiable(np.dtype(dtype)) else 1


def _poison(machine: Machine, value: Value, array: np.ndarray) -> np.ndarray:
    for at, dim in enumerate(value.shape):
        axes = value.layout.axes(dim.name)
        if dim.size % machine.mesh.extent(axes) == 0:
            continue
        array, real = np.array(array), bounds(dim.size, axes, machine.mesh)
        for device, place in enumerate(machine.index(axes)):
            pads = np.moveaxis(array[device], at, 0)[real[place].size :]
            pads[...] = _poison_of(array.dtype)
    return array
