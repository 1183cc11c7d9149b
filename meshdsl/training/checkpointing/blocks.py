"""Writes the blocks of arrays on the devices of this process to a file, and reads them back.

Blocks of one array do not overlap. They make the array on any mesh whose blocks they cover.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

Region = tuple[tuple[int, int], ...]  # from where to where, in each dim


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
        _name(path, number): _on_host(data)
        for path, each in shards_of.items()
        for number, data in enumerate(each.values())
    }
    return blocks, {path: list(each) for path, each in shards_of.items()}


def _on_host(data: Any) -> np.ndarray:
    """Returns data on the host, which later steps do not change.

    On CPU devices it is a view: JAX lets no donated call write over it.
    """
    return np.asarray(data, order="C") if isinstance(data, jax.Array) else np.array(data, order="C")


def _name(path: str, number: int) -> str:
    return f"{path}#{number}"


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


def covered(sizes: tuple[int, ...], place: Any, blocks: Sequence[Region]) -> bool:
    """Whether blocks of an array cover the regions that this process needs."""
    return all(
        sum(_volume(_common(region, block)) for block in blocks) == _volume(region)
        for region in _needed(sizes, place)
    )


def array_of(file: Any, path: str, leaf: Any, place: Any, blocks: Sequence[Region]) -> Any:
    """Returns an array, with its wanted sharding, from its blocks in a file."""
    sizes, dtype = leaf.dims.sizes, np.dtype(leaf.dtype)

    def read(region: Region) -> np.ndarray:
        if region in blocks:
            return file.get_tensor(_name(path, blocks.index(region)))
        data = np.empty([stop - start for start, stop in region], dtype)
        for number, block in enumerate(blocks):
            common = _common(region, block)
            if _volume(common):
                part = file.get_tensor(_name(path, number))
                data[_within(common, region)] = part[_within(common, block)]
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
