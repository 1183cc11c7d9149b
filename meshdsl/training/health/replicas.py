"""Replicas of a state are compared, which finds a device that computes or stores wrongly.

Each device adds up a hash of every element of its shards. Devices that hold the same shard must
have the same sum. A few small collectives say whether all of them do.

Guarantees:
    A change of one element is always found. Other changes are missed once in 2^32 times.
    The sums are of bits, so -0.0 differs from 0.0, and equal NaNs are equal.
    Pads, which may hold anything, are not compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.tensors.cuts import cut
from meshdsl.tensors.named_array import NamedArray
from meshdsl.training.state import by_path

WITHOUT_REPLICAS = (
    "replica_check_every: no two devices hold the same part of the state, so nothing is compared; "
    "`explain --failures` shows what layouts hold"
)
_MOST = 4  # the most tensors in a message
_WORDS = {4: jnp.uint4, 8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}
# Odd numbers, so that products with them are one to one (of the golden ratio, and MurmurHash3's).
_ODD = tuple(map(np.uint32, (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)))


class ReplicasDiffer(Exception):
    """Devices that must hold the same part of a state hold different bits."""


@dataclass
class ReplicaCheck:
    """Compares the replicas of a run's state: `ReplicaCheck(100).check(step, state)`.

    Attributes:
        every: steps between two comparisons; None: nothing is compared.
        passed: the last step after which replicas were equal.
    """

    every: int | None
    passed: int | None = None
    _sums: dict[Any, Callable] = field(default_factory=dict)

    def due(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0

    def check(self, step: int, state: Any) -> None:
        """Compares the replicas of a tree of NamedArrays; all processes must call this.

        Raises:
            ReplicasDiffer: in every process, with the devices and the tensors.
        """
        if self.every is None or self.passed == step:
            return
        arrays = _replicas(state)
        if arrays:
            leaves = [array.data for array in arrays.values()]
            sums, differ = self._program(arrays)(*leaves)
            if bool(differ):
                mesh = leaves[0].sharding.mesh
                where = NamedSharding(mesh, PartitionSpec())
                everyones = np.asarray(jax.jit(lambda x: x, out_shardings=where)(sums))
                raise ReplicasDiffer(_report(step, self.passed, arrays, everyones))
        self.passed = step

    def _program(self, arrays: Mapping[str, NamedArray]) -> Callable:
        """Returns the compiled function of the leaves; see `_compared`."""
        key = tuple((a.data.shape, a.data.dtype, a.data.sharding, a.cuts) for a in arrays.values())
        if key not in self._sums:
            self._sums[key] = _compared(list(arrays.values()))
        return self._sums[key]


def replicated(state: Any) -> bool:
    """Whether several devices hold the same part of any array of a state."""
    return bool(_replicas(state))


def _replicas(state: Any) -> dict[str, NamedArray]:
    """Returns the arrays of which several devices of a mesh hold the same part."""
    return {
        path: array
        for path, array in by_path(state).items()
        if isinstance(sharding := getattr(array.data, "sharding", None), NamedSharding)
        and sharding.mesh.size > 1
        and _replica_axes(array)
    }


def _replica_axes(array: NamedArray) -> tuple[str, ...]:
    """Returns the axes of the mesh along which devices hold the same."""
    sharding = array.data.sharding
    used = {axis for axes in sharding.spec for axis in _axes(axes)}
    return tuple(axis for axis in sharding.mesh.axis_names if axis not in used)


def _axes(part: Any) -> tuple[str, ...]:
    return () if part is None else part if isinstance(part, tuple) else (part,)


def _compared(arrays: Sequence[NamedArray]) -> Callable:
    """Returns a function of the arrays' data: every device's sums, and whether any differ.

    The sums are [the mesh's axes..., arrays].
    """
    mesh = arrays[0].data.sharding.mesh
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, array in enumerate(arrays):
        groups[_replica_axes(array)].append(number)
    masks, specs = _masks(arrays)

    def local(leaves: Sequence[Any], masks: Mapping[tuple[int, int], Any]) -> tuple[Any, Any]:
        own = [
            _sum_of_bits(leaf, {at: mask for (n, at), mask in masks.items() if n == number})
            for number, leaf in enumerate(leaves)
        ]
        sums, differ = jnp.stack(own), jnp.zeros((), jnp.bool_)
        for axes, numbers in groups.items():
            some = sums[np.array(numbers)]
            differ |= jnp.any(jax.lax.pmin(some, axes) != jax.lax.pmax(some, axes))
        differ = jax.lax.pmax(differ.astype(jnp.int32), mesh.axis_names)
        return sums.reshape((1,) * len(mesh.axis_names) + sums.shape), differ

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=([array.data.sharding.spec for array in arrays], specs),
        out_specs=(PartitionSpec(*mesh.axis_names), PartitionSpec()),
        check_vma=False,  # what should be replicated may differ
    )
    return jax.jit(lambda *leaves: mapped(list(leaves), masks))


def _masks(arrays: Sequence[NamedArray]) -> tuple[dict, dict]:
    """Returns, by array and place of a dim with pads, which positions are none, and the specs."""
    masks, specs = {}, {}
    for number, array in enumerate(arrays):
        parts = (*array.data.sharding.spec, *[None] * len(array.dims))
        for at, counts in enumerate(array.cuts):
            if counts:
                masks[number, at] = cut(np, np.ones(array.dims[at].size, bool), 0, counts)
                specs[number, at] = PartitionSpec(parts[at])
    return masks, specs


def _sum_of_bits(x: Any, masks: Mapping[int, Any]) -> Any:
    """Returns the sum, modulo 2^32, of a hash of each element and its position: uint32, no dims.

    Args:
        x: a shard.
        masks: of dims with pads, by place: which positions are none.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return _sum_of_bits(x.real, masks) * _ODD[0] + _sum_of_bits(x.imag, masks)
    bits = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    words = jax.lax.bitcast_convert_type(bits, _WORDS[_width(bits.dtype)]).astype(jnp.uint32)
    for at, mask in masks.items():
        shape = [1] * words.ndim
        shape[at] = mask.size
        words = jnp.where(mask.reshape(shape), words, 0)
    position = jnp.zeros(words.shape, jnp.uint32)
    for at, size in enumerate(words.shape):
        position = position * size + jax.lax.broadcasted_iota(jnp.uint32, words.shape, at)
    # Each step is one to one in the word, so another word at a position gives another sum.
    mixed = (words ^ (position * _ODD[0])) * _ODD[1]
    mixed = (mixed ^ (mixed >> 15)) * _ODD[2]
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def _width(dtype: Any) -> int:
    """Returns the number of bits of a number."""
    about = jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo
    return int(about(dtype).bits)


def _report(
    step: int, passed: int | None, arrays: Mapping[str, NamedArray], sums: np.ndarray
) -> str:
    """Returns what to report of sums that differ: [the mesh's axes..., arrays]."""
    majorities: dict[Any, list[str]] = defaultdict(list)
    undecided: dict[tuple, list[str]] = defaultdict(list)
    for number, (path, array) in enumerate(arrays.items()):
        sharding, own = array.data.sharding, sums[..., number]
        blocks = sharding.devices_indices_map(array.data.shape)
        holders = defaultdict(list)
        for device, found in zip(sharding.mesh.devices.flat, own.flat, strict=True):
            holders[str(blocks[device])].append((device, int(found)))
        for same in holders.values():
            (likely, votes), *_ = Counter(found for _, found in same).most_common()
            if 2 * votes > len(same):
                for device, found in same:
                    if found != likely:
                        majorities[device].append(path)
            else:
                undecided[tuple(device for device, _ in same)].append(path)
    lines = [
        f"{_name(device)} differs from most others that hold the same: {_listed(paths)}"
        for device, paths in majorities.items()
    ]
    lines += [
        f"{', '.join(map(_name, devices))} hold the same and differ, which of them is wrong is not "
        f"known: {_listed(paths)}"
        for devices, paths in undecided.items()
    ]
    before = "" if passed is None else f"; they were equal after step {passed:,}"
    first = (
        f"replicas of the state differ after step {step:,}{before}. A device computes or stores "
        "wrongly, or replicas were computed in different orders. Nothing is saved; take the device "
        "out, and start again to go on from the last checkpoint"
    )
    return "\n  ".join([first, *lines])


def _name(device: Any) -> str:
    return f"device {device.id} of process {device.process_index}"


def _listed(paths: Sequence[str]) -> str:
    unique = list(dict.fromkeys(paths))
    rest = f" and {len(unique) - _MOST:,} more" if len(unique) > _MOST else ""
    return ", ".join(unique[:_MOST]) + rest
