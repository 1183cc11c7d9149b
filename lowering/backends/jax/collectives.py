"""The collectives of a program, between the devices of `jax.shard_map`.

XLA joins collectives itself on TPU and GPU, so a joined one is written there tensor by tensor. On
CPU, where each costs some 25 µs, small tensors travel in one buffer: 12 of 1 KiB on four devices
take 60 % of the time, of 64 KiB 65 to 95 %; from 256 KiB on the copies cost more than they save.
XLA:CPU also copies along the first dim in half the time, where along another it copies runs of a
few KiB (256 by 1,024 numbers in 4 blocks: 0.6 of it gathered, 0.4 scattered; runs of 32 KiB: 0.9 to
1.0), so what is cut into such runs is turned around.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.packing import (
    Packing,
    flatten,
    merge_blocks,
    pack_blocks,
    position_of,
    send_packed,
    unflatten,
)
from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.torus_moves import all_gather, reduce_scatter
from meshdsl.lowering.parameters import AllReduce, Permute, axes_of, parameters_of
from meshdsl.lowering.program import Instruction, payload_bytes
from meshdsl.tensors.cuts import cut, join
from meshdsl.tensors.dtypes import is_float

_SMALL = 64 * 1024  # bytes of payload up to which a tensor travels with others in one buffer
_RUN = 8 * 1024  # bytes in a row up to which they are copied faster along the first dim


def _cut(machine: Machine, instruction: Instruction, x: Any, dim: str) -> Any:
    """Pads a dim so that its blocks can be sent."""
    counts = machine.counts(axes_of(instruction))
    return cut(jnp, x, position_of(instruction, dim), counts)


def _join(machine: Machine, instruction: Instruction, x: Any, dim: str) -> Any:
    """Drops the pads of a dim whose blocks have been received."""
    place, (out,) = position_of(instruction, dim), instruction.outputs
    counts = machine.counts(axes_of(instruction))
    return join(jnp, x, place, counts, out.local[place].size)


def _all_reduce(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return _reduced(instruction, inputs[0])


def _reduced(instruction: Instruction, x: Any) -> Any:
    params = parameters_of(instruction, AllReduce)
    axes, kind = params["axes"], params["kind"]
    if kind == "sum":
        return _added(lambda x: lax.psum(x, axes), x)
    reduce = {"max": lax.pmax, "min": lax.pmin}[kind]
    if not is_float(instruction.inputs[0].dtype):
        return reduce(x, axes)
    return _from_key(reduce(to_key(x, kind), axes), x.dtype)


def _added(add: Callable[[Any], Any], x: Any) -> Any:
    """Adds up; bools as bytes. One at most is true: what picks elements adds False to them."""
    return add(x.astype(jnp.uint8)) != 0 if x.dtype == bool else add(x)


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
    axes, place = axes_of(instruction), position_of(instruction, "dim")
    padded = _cut(machine, instruction, inputs[0], "dim")
    return _added(lambda x: reduce_scatter(machine, x, axes, place), padded)


def _all_gather(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes, place = axes_of(instruction), position_of(instruction, "dim")
    joined = all_gather(machine, inputs[0], axes, place)
    return _join(machine, instruction, joined, "dim")


def _all_to_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes = axes_of(instruction)
    split, concat = position_of(instruction, "split"), position_of(instruction, "concat")
    x = _cut(machine, instruction, inputs[0], "split")
    if x is not inputs[0]:  # XLA:CPU sends blocks one by one, and fails where one is constant
        x = lax.optimization_barrier(x)
    x = lax.all_to_all(x, axes, split_axis=split, concat_axis=concat, tiled=True)
    return _join(machine, instruction, x, "concat")


def _permute(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return _sent(instruction, inputs[0])


def _sent(instruction: Instruction, x: Any) -> Any:
    params = parameters_of(instruction, Permute)
    return lax.ppermute(x, params["mesh_axes"], params["pairs"])


_PACKINGS = {
    "all_reduce": Packing(flatten, lambda machine, one, x: _reduced(one, x), unflatten),
    "reduce_scatter": Packing(
        pack_blocks("dim"),
        lambda machine, one, x: _added(lambda x: lax.psum_scatter(x, axes_of(one)), x),
        unflatten,
    ),
    "all_gather": Packing(
        flatten, lambda machine, one, x: lax.all_gather(x, axes_of(one)), merge_blocks("dim")
    ),
    "all_to_all": Packing(
        pack_blocks("split"),
        lambda machine, one, x: lax.all_to_all(x, axes_of(one), 0, 0, tiled=True),
        merge_blocks("concat"),
    ),
    "permute": Packing(
        flatten,
        lambda machine, one, x: _sent(one, x),
        unflatten,
    ),
}


def _each(emit: Emitter) -> Emitter:
    """Returns what moves several tensors as it moves one, small ones together."""

    def emit_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        parts = instruction.parts
        if len(parts) == 1:
            return alone(machine, parts[0], inputs)
        on_cpu = machine.platform == "cpu"
        small = [
            n
            for n, part in enumerate(parts)
            if on_cpu and payload_bytes(part, machine.mesh) <= _SMALL
        ]
        packed = small if len(small) > 1 else []
        results = dict(zip(packed, _together(machine, parts, inputs, packed), strict=True))
        return [
            results[n] if n in results else alone(machine, part, [array])
            for n, (part, array) in enumerate(zip(parts, inputs, strict=True))
        ]

    def alone(machine: Machine, part: Instruction, inputs: Arrays) -> Any:
        if machine.platform == "cpu" and not machine.torus and _turns(part):
            return _together(machine, [part], inputs, [0])[0]
        return emit(machine, part, inputs)

    return emit_all


def _turns(part: Instruction) -> bool:
    """Whether a tensor is gathered or scattered in short runs, along another dim than its first."""
    if part.op not in ("all_gather", "reduce_scatter"):
        return False
    shard = (part.inputs if part.op == "all_gather" else part.outputs)[0]
    place = position_of(part, "dim")
    run = math.prod(shard.local.sizes[place:]) * shard.dtype.itemsize
    return math.prod(shard.local.sizes[:place]) > 1 and run <= _RUN


def _together(
    machine: Machine, parts: Sequence[Instruction], inputs: Arrays, chosen: Sequence[int]
) -> list[Any]:
    """Moves some tensors in one buffer."""
    if not chosen:
        return []
    if parts[0].op not in _PACKINGS:
        raise ValueError(
            f"`{parts[0].op}` is not joined with others of its kind: say how tensors of it travel "
            "in one buffer in _PACKINGS of lowering/backends/jax/collectives.py"
        )
    own, arrays = [parts[n] for n in chosen], [inputs[n] for n in chosen]
    return send_packed(machine, _PACKINGS[parts[0].op], own, arrays)


EMITTERS: Mapping[str, Emitter] = {
    "all_reduce": _each(_all_reduce),
    "reduce_scatter": _each(_reduce_scatter),
    "all_gather": _each(_all_gather),
    "all_to_all": _each(_all_to_all),
    "permute": _each(_permute),
}
