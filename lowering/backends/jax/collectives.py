"""The collectives of a program, between the devices of `jax.shard_map`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.dtypes import is_float
from meshdsl.lowering.backends.arrange import cut, join
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _at(instruction: Instruction, dim: str) -> int:
    return instruction.inputs[0].local.position(instruction.params[dim])


def _cut(machine: Machine, instruction: Instruction, x: Any, dim: str) -> Any:
    """Pads a dim so that its blocks can be sent."""
    counts = machine.counts(instruction.params["axes"])
    return cut(jnp, x, _at(instruction, dim), counts)


def _join(machine: Machine, instruction: Instruction, x: Any, dim: str) -> Any:
    """Drops the pads of a dim whose blocks have been received."""
    at, (out,) = _at(instruction, dim), instruction.outputs
    counts = machine.counts(instruction.params["axes"])
    return join(jnp, x, at, counts, out.local[at].size)


def _all_reduce(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    (x,), axes, kind = inputs, instruction.params["axes"], instruction.params["kind"]
    if kind == "sum":
        return lax.psum(x, axes)
    reduce = {"max": lax.pmax, "min": lax.pmin}[kind]
    if not is_float(instruction.inputs[0].dtype):
        return reduce(x, axes)
    return _from_key(reduce(to_key(x, kind), axes), x.dtype)


def to_key(x: Any, kind: str) -> Any:
    """Returns integers in the order of the numbers, with NaN winning.

    XLA's reductions between devices may drop NaN, its local ones do not.
    """
    limits = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    key = _flip(lax.bitcast_convert_type(x, limits.dtype))
    return jnp.where(jnp.isnan(x), limits.max if kind == "max" else limits.min, key)


def _from_key(key: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(_flip(key), dtype)


def _flip(bits: Any) -> Any:
    """Turns the bits of floats into integers that order like them, and back."""
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & jnp.iinfo(bits.dtype).max)


def _reduce_scatter(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes, at = instruction.params["axes"], _at(instruction, "dim")
    blocks = _cut(machine, instruction, inputs[0], "dim")
    return lax.psum_scatter(blocks, axes, scatter_dimension=at, tiled=True)


def _all_gather(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes, at = instruction.params["axes"], _at(instruction, "dim")
    blocks = lax.all_gather(inputs[0], axes, axis=at, tiled=True)
    return _join(machine, instruction, blocks, "dim")


def _all_to_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes = instruction.params["axes"]
    split, concat = _at(instruction, "split"), _at(instruction, "concat")
    blocks = _cut(machine, instruction, inputs[0], "split")
    if blocks is not inputs[0]:  # XLA:CPU sends blocks one by one, and fails where one is constant
        blocks = lax.optimization_barrier(blocks)
    blocks = lax.all_to_all(blocks, axes, split_axis=split, concat_axis=concat, tiled=True)
    return _join(machine, instruction, blocks, "concat")


def _permute(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return lax.ppermute(inputs[0], instruction.params["mesh_axes"], instruction.params["pairs"])


EMITTERS: Mapping[str, Emitter] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "permute": _permute,
}
