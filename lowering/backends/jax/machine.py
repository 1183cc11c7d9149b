"""Machine: emits blocks of a program as JAX operations on one device's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.dims import Shape
from meshdsl.lowering.backends.arrange import alignment
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.mesh import Mesh

Arrays = Sequence[jax.Array]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


@dataclass(frozen=True)
class Machine:
    """One device of a mesh, inside `jax.shard_map`."""

    mesh: Mesh
    emitters: Mapping[str, Emitter]

    def counts(self, axes: Sequence[str]) -> list[int]:
        """Returns the sizes of some axes."""
        return [self.mesh.sizes[axis] for axis in axes]

    def run(self, block: Block, inputs: Arrays) -> list[jax.Array]:
        """Emits a block on one device's arrays."""
        held: dict[Value, Any] = dict(zip(block.inputs, inputs, strict=True))
        for instruction in block.instructions:
            arguments = [held[v] for v in instruction.inputs]
            results = self.emitters[instruction.op](self, instruction, arguments)
            if len(instruction.outputs) == 1 and not isinstance(results, list | tuple):
                results = (results,)
            held.update(zip(instruction.outputs, results, strict=True))
        return [held[v] for v in block.outputs]


def align(array: Any, have: Shape, want: Shape) -> Any:
    """Lays the dims of an array as `want` orders them, with size 1 for those that it lacks."""
    order, sizes = alignment(have, want)
    if order != tuple(range(len(order))):
        array = array.transpose(order)
    return array if array.shape == sizes else array.reshape(sizes)


def device_index(axes: Sequence[str]) -> Any:
    """Returns this device's index along some axes, major first: an s32 scalar."""
    found = jnp.int32(0)
    for axis in axes:
        found = found * lax.axis_size(axis) + lax.axis_index(axis)
    return found.astype(jnp.int32)
