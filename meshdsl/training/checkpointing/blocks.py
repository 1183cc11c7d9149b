"""The blocks of arrays that the devices of this process hold, out to a file and back.

Blocks of one array do not overlap; an array can be made on any mesh whose blocks they cover.
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
    """Returns the blocks that this process holds, by name, and their regions by path."""
    held: dict[str, dict[Region, Any]] = {}
    for path, array in arrays.items():
        if isinstance(array, jax.Array):
            shards = [(_region(s.index, array.shape), s.data) for s in array.addressable_shards]
            held[path] = dict(shards)
        else:
            held[path] = {tuple((0, size) for size in array.shape): array}
    for data in itertools.chain(*(each.values() for each in held.values())):
        if isinstance(data, jax.Array):
            data.copy_to_host_async()  # all at once
    blocks = {
        _name(path, number): _held(data)
        for path, each in held.items()
        for number, data in enumerate(each.values())
    }
    return blocks, {path: list(each) for path, each in held.items()}


def _held(data: Any) -> np.ndarray:
    """Returns data on the host as it is, whatever comes after.

    Of devices that are the host it is a view, which JAX gives no donated call to write over.
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
    """Whether blocks of an array hold all that this process needs of it."""
    return all(
        sum(_volume(_common(region, block)) for block in blocks) == _volume(region)
        for region in _needed(sizes, place)
    )


def array_of(file: Any, path: str, leaf: Any, place: Any, blocks: Sequence[Region]) -> Any:
    """Returns an array of which a file has the blocks, where it is to be."""
    sizes, dtype = leaf.dims.sizes, np.dtype(leaf.dtype)

    def read(region: Region) -> np.ndarray:
        if region in blocks:
            return file.get_tensor(_name(path, blocks.index(region)))
        found = np.empty([stop - start for start, stop in region], dtype)
        for number, block in enumerate(blocks):
            common = _common(region, block)
            if _volume(common):
                part = file.get_tensor(_name(path, number))
                found[_within(common, region)] = part[_within(common, block)]
        return found

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
