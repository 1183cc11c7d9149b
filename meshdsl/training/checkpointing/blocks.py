"""Writes the blocks of arrays on the devices of this process to a file, and reads them back.

Blocks of one array do not overlap. They make the array on any mesh whose blocks they cover.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Region = tuple[tuple[int, int], ...]  # from where to where, in each dim
# Returns a block of an array, given its path and the block's number, or a part of the block.
Part = Callable[[str, int, tuple[slice, ...] | None], np.ndarray]


def blocks_of(
    arrays: Mapping[str, Any],
) -> tuple[dict[str, np.ndarray], dict[str, list[Region]]]:
    """Returns this process's blocks, by name, and their regions by path."""
    shards_of: dict[str, dict[Region, Any]] = {}
    for path, array in arrays.items():
        if isinstance(array, jax.Array):
            shards = [(_region(s.index, array.shape), s.data) for s in array.addressable_shards]
            shards_of[path] = dict(shards)
        else:
            shards_of[path] = {tuple((0, size) for size in array.shape): array}
    for data in itertools.chain(*(each.values() for each in shards_of.values())):
        if isinstance(data, jax.Array):
            data.copy_to_host_async()  # all at once
    blocks = {
        name_of(path, number): _on_host(data)
        for path, each in shards_of.items()
        for number, data in enumerate(each.values())
    }
    return blocks, {path: list(each) for path, each in shards_of.items()}


def holders_of(arrays: Mapping[str, Any]) -> list[list[int]]:
    """Returns sets of processes: those of each set have the same block of an array."""
    found: set[tuple[int, ...]] = set()
    for array in arrays.values():
        if not isinstance(array, jax.Array):  # each process has all of it
            found.add(tuple(range(jax.process_count())))
            continue
        holders: dict[Region, set[int]] = {}
        places: Mapping[Any, Any] = array.sharding.devices_indices_map(array.shape)
        for device, index in places.items():
            region = _region(index or (), array.shape)
            holders.setdefault(region, set()).add(device.process_index)
        found |= {tuple(sorted(each)) for each in holders.values()}
    return [[*each] for each in sorted(found)]


def _on_host(data: Any) -> np.ndarray:
    """Returns data on the host, which later steps do not change.

    On CPU devices it is a view: JAX lets no donated call write over it.
    """
    return np.asarray(data, order="C") if isinstance(data, jax.Array) else np.array(data, order="C")


def name_of(path: str, number: int) -> str:
    """Returns what a file calls a block of the array at a path."""
    return f"{path}#{number}"


def parts_of(file: Any) -> Part:
    """Returns what reads the blocks in a file of safetensors."""

    def part(path: str, number: int, within: tuple[slice, ...] | None) -> np.ndarray:
        block: np.ndarray = file.get_tensor(name_of(path, number))
        return block if within is None else block[within]

    return part


def _region(index: Sequence[slice], sizes: Sequence[int]) -> Region:
    return tuple(each.indices(size)[:2] for each, size in zip(index, sizes, strict=True))


def _needed(sizes: tuple[int, ...], place: Any) -> set[Region]:
    """Returns the regions of an array that this process needs."""
    if place is None:
        return {tuple((0, size) for size in sizes)}
    indices = place.addressable_devices_indices_map(sizes).values()
    return {_region(index, sizes) for index in indices}


def _common(one: Region, other: Region) -> Region:
    return tuple(
        (max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True)
    )


def _volume(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def complete(sizes: Sequence[int], blocks: Sequence[Region]) -> bool:
    """Whether blocks of an array, no two of them equal, are all of it."""
    return sum(map(_volume, blocks)) == math.prod(sizes)


def covered(sizes: tuple[int, ...], place: Any, blocks: Sequence[Region]) -> bool:
    """Whether blocks of an array cover the regions that this process needs."""
    return all(
        sum(_volume(_common(region, block)) for block in blocks) == _volume(region)
        for region in _needed(sizes, place)
    )


def array_of(part: Part, path: str, leaf: Any, place: Any, blocks: Sequence[Region]) -> Any:
    """Returns an array, with its wanted sharding, from its blocks."""
    sizes, dtype = leaf.dims.sizes, np.dtype(leaf.dtype)

    def read(region: Region) -> np.ndarray:
        if region in blocks:
            return part(path, blocks.index(region), None)
        data = np.empty([stop - start for start, stop in region], dtype)
        for number, block in enumerate(blocks):
            common = _common(region, block)
            if _volume(common):
                data[_within(common, region)] = part(path, number, _within(common, block))
        return data

    if place is None:
        return read(tuple((0, size) for size in sizes))
    pieces = {region: read(region) for region in _needed(sizes, place)}
    return jax.make_array_from_callback(
        sizes, place, lambda index: pieces[_region(index or (), sizes)]
    )


def _within(region: Region, outer: Region) -> tuple[slice, ...]:
    """Returns where a region is in another one that it is a part of."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(region, outer, strict=True)
    )
