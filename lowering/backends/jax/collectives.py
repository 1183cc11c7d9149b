"""The collectives of a program, between the devices of `jax.shard_map`.

On TPU and GPU, XLA itself joins collectives, so a joined collective is emitted tensor by tensor. On
CPU a collective costs some 25 µs, so small tensors are sent in one buffer. 12 tensors of 1 KiB on
four devices take 60 % of the time, tensors of 64 KiB 65 to 95 %; from 256 KiB on, the copies cost
more than they save.

On TPU the small tensors of a joined gather, scatter or sum are sent in one buffer, too. That of a
gather or scatter fills tiles: shards of less than a tile become synchronous all_reduces there, one
or two for each tensor. A single one stays: as a reduce_scatter beside the work it would take turns
with large ones.

XLA:CPU copies along the first dim in half the time. Along another dim it copies runs of a few KiB
(256 by 1,024 numbers in 4 blocks: 0.6 of the time for a gather, 0.4 for a scatter; runs of 32 KiB:
0.9 to 1.0). So tensors with short runs are transposed: their blocks become rows.
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
from meshdsl.lowering.backends.jax.torus_moves import all_gather, filled, reduce_scatter
from meshdsl.lowering.parameters import AllReduce, Permute, axes_of, parameters_of
from meshdsl.lowering.program import Instruction, payload_bytes
from meshdsl.lowering.transfers import SHARDED, packed
from meshdsl.tensors.cuts import cut, join
from meshdsl.tensors.dtypes import is_float

_SMALL = 64 * 1024  # bytes of payload up to which a tensor is packed with others
_RUN = 8 * 1024  # bytes up to which contiguous runs are copied faster along the first dim


def _pad(machine: Machine, instruction: Instruction, x: Any, dim: str) -> Any:
    """Pads a dim to equal blocks, one for each device."""
    counts = machine.counts(axes_of(instruction))
    return cut(jnp, x, position_of(instruction, dim), counts)


def _unpad(machine: Machine, instruction: Instruction, x: Any, dim: str) -> Any:
    """Removes the pads of a dim whose blocks have been received."""
    at, (out,) = position_of(instruction, dim), instruction.outputs
    counts = machine.counts(axes_of(instruction))
    return join(jnp, x, at, counts, out.local[at].size)


def _all_reduce(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return _reduced(instruction, inputs[0])


def _reduced(instruction: Instruction, x: Any) -> Any:
    """Returns the sum, max or min of x over devices."""
    params = parameters_of(instruction, AllReduce)
    axes, kind = params["axes"], params["kind"]
    if kind == "sum":
        return _sum_of(lambda x: lax.psum(x, axes), x)
    reduce = {"max": lax.pmax, "min": lax.pmin}[kind]
    if not is_float(instruction.inputs[0].dtype):
        return reduce(x, axes)
    return _from_key(reduce(to_key(x, kind), axes), x.dtype)


def _sum_of(sum_over: Callable[[Any], Any], x: Any) -> Any:
    """Returns the sum over devices; of bools, at most one of which is true, as bytes."""
    return sum_over(x.astype(jnp.uint8)) != 0 if x.dtype == bool else sum_over(x)


def to_key(x: Any, kind: str) -> Any:
    """Returns integers that order like the numbers; NaN is the largest, or the least for `min`."""
    # XLA's reductions between devices may drop NaN; its local ones do not.
    limits = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    key = _flip(lax.bitcast_convert_type(x, limits.dtype))
    return jnp.where(jnp.isnan(x), limits.max if kind == "max" else limits.min, key)


def _from_key(key: Any, dtype: Any) -> Any:
    return lax.bitcast_convert_type(_flip(key), dtype)


def _flip(bits: Any) -> Any:
    """Converts the bits of floats to integers that order like them, and back."""
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & jnp.iinfo(bits.dtype).max)


def _reduce_scatter(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes, at = axes_of(instruction), position_of(instruction, "dim")
    padded = _pad(machine, instruction, inputs[0], "dim")
    return _sum_of(lambda x: reduce_scatter(machine, x, axes, at), padded)


def _all_gather(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes, at = axes_of(instruction), position_of(instruction, "dim")
    joined = all_gather(machine, inputs[0], axes, at)
    return _unpad(machine, instruction, joined, "dim")


def _all_to_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    axes = axes_of(instruction)
    split, concat = position_of(instruction, "split"), position_of(instruction, "concat")
    x = _pad(machine, instruction, inputs[0], "split")
    if x is not inputs[0]:  # XLA:CPU sends each block by itself, and fails if one is constant
        x = lax.optimization_barrier(x)
    x = lax.all_to_all(x, axes, split_axis=split, concat_axis=concat, tiled=True)
    return _unpad(machine, instruction, x, "concat")


def _permute(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    return _permuted(instruction, inputs[0])


def _permuted(instruction: Instruction, x: Any) -> Any:
    params = parameters_of(instruction, Permute)
    return lax.ppermute(x, params["mesh_axes"], params["pairs"])


def _gather_rows(machine: Machine, part: Instruction, row: Any) -> Any:
    """Returns the rows of all devices."""
    if not machine.torus:
        return lax.all_gather(row, axes_of(part))
    rows = all_gather(machine, filled(row)[None], axes_of(part), 0)
    return rows[:, : row.size]


def _scatter_rows(machine: Machine, part: Instruction, rows: Any) -> Any:
    """Returns the sum of this device's row."""
    if not machine.torus:
        return lax.psum_scatter(rows, axes_of(part))
    (row,) = reduce_scatter(machine, filled(rows), axes_of(part), 0)
    return row[: rows.shape[1]]


_PACKINGS = {
    "all_reduce": Packing(flatten, lambda machine, part, x: _reduced(part, x), unflatten),
    "reduce_scatter": Packing(
        pack_blocks("dim"),
        lambda machine, part, x: _sum_of(lambda x: _scatter_rows(machine, part, x), x),
        unflatten,
    ),
    "all_gather": Packing(
        flatten, lambda machine, part, x: _gather_rows(machine, part, x), merge_blocks("dim")
    ),
    "all_to_all": Packing(
        pack_blocks("split"),
        lambda machine, part, x: lax.all_to_all(x, axes_of(part), 0, 0, tiled=True),
        merge_blocks("concat"),
    ),
    "permute": Packing(
        flatten,
        lambda machine, part, x: _permuted(part, x),
        unflatten,
    ),
}


def _each(emit: Emitter) -> Emitter:
    """Returns the emitter of a collective of several tensors; small ones are packed: see above."""

    def emit_all(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        parts = instruction.parts
        if len(parts) == 1:
            return alone(machine, parts[0], inputs)
        together = packed(parts) if machine.torus else _small(machine, parts)
        results = dict(zip(together, _sent_packed(machine, parts, inputs, together), strict=True))
        return [
            results[n] if n in results else alone(machine, part, [array])
            for n, (part, array) in enumerate(zip(parts, inputs, strict=True))
        ]

    def alone(machine: Machine, part: Instruction, inputs: Arrays) -> Any:
        if machine.platform == "cpu" and not machine.torus and _has_short_runs(part):
            return _sent_packed(machine, [part], inputs, [0])[0]
        return emit(machine, part, inputs)

    return emit_all


def _small(machine: Machine, parts: Sequence[Instruction]) -> list[int]:
    """Returns the numbers of the tensors that are sent in one buffer on CPUs."""
    if machine.platform != "cpu":
        return []
    small = [n for n, one in enumerate(parts) if payload_bytes(one, machine.mesh) <= _SMALL]
    return small if len(small) > 1 else []


def _has_short_runs(part: Instruction) -> bool:
    """Whether a gather or scatter copies short runs, along a dim that is not the first."""
    if part.op not in SHARDED:
        return False
    shard = (part.inputs if part.op == "all_gather" else part.outputs)[0]
    at = position_of(part, "dim")
    run = math.prod(shard.local.sizes[at:]) * shard.dtype.itemsize
    return math.prod(shard.local.sizes[:at]) > 1 and run <= _RUN


def _sent_packed(
    machine: Machine, parts: Sequence[Instruction], inputs: Arrays, chosen: Sequence[int]
) -> list[Any]:
    """Returns the results of the parts `chosen`, sent in one buffer."""
    if not chosen:
        return []
    if parts[0].op not in _PACKINGS:
        raise ValueError(
            f"`{parts[0].op}` is not joined with others of its kind: say how tensors of it travel "
            "in one buffer in _PACKINGS of lowering/backends/jax/collectives.py"
        )
    chosen_parts, arrays = [parts[n] for n in chosen], [inputs[n] for n in chosen]
    return send_packed(machine, _PACKINGS[parts[0].op], chosen_parts, arrays)


EMITTERS: Mapping[str, Emitter] = {
    "all_reduce": _each(_all_reduce),
    "reduce_scatter": _each(_reduce_scatter),
    "all_gather": _each(_all_gather),
    "all_to_all": _each(_all_to_all),
    "permute": _each(_permute),
}
