"""Cuts: how a dim of any size becomes equal blocks, one for each device, and one dim again.

A dim is cut level by level, once for each mesh axis that splits it, major first: each level makes
equal blocks, and pads fill up the last ones. 5 cut by (2, 2) is `01 2- | 34 --`. The contents of
pads (`-`) are undefined inside of a program. `Cuts` are the cuts of every dim of an array, in the
array's order: the counts of each level for a dim with pads, `()` for one without. `()` alone stands
for an array without pads. Functions take as `xp` numpy, or a module that pads and reshapes as numpy
does (JAX's numpy, TensorFlow).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

Cuts: TypeAlias = tuple[tuple[int, ...], ...]


def cut(xp: Any, array: Any, at: int, counts: Sequence[int]) -> Any:
    """Pads position `at` so that it is equal blocks of equal blocks, `counts[0]` of them first.

    These are the blocks of a dim split over axes of such sizes: `cut(np, x, 0, [2, 2])`.
    """
    before, size, after = array.shape[:at], array.shape[at], array.shape[at + 1 :]
    if size % math.prod(counts) == 0:
        return array
    for place, count in enumerate(counts, at):
        block = -(-size // count)
        pads = [(0, 0)] * len(array.shape)
        pads[place] = (0, count * block - size)
        array = xp.pad(array, pads)
        array = xp.reshape(array, (*array.shape[:place], count, block, *after))
        size = block
    return xp.reshape(array, (*before, math.prod(counts) * size, *after))


def join(xp: Any, array: Any, at: int, counts: Sequence[int], size: int) -> Any:
    """Drops the pads of position `at`, which is blocks of blocks, so that `size` are left.

    The inverse of `cut`: `join(np, padded, 0, [2, 2], 5)`.
    """
    before, after = array.shape[:at], array.shape[at + 1 :]
    if size % math.prod(counts) == 0:
        return array
    sizes = [size]
    for count in counts:
        sizes.append(-(-sizes[-1] // count))
    array = xp.reshape(array, (*before, *counts, sizes[-1], *after))
    for level in reversed(range(len(counts))):
        place = at + level
        length = counts[level] * sizes[level + 1]
        array = xp.reshape(array, (*array.shape[:place], length, *after))
        array = array[(slice(None),) * place + (slice(sizes[level]),)]
    return array


def pad(xp: Any, array: Any, cuts: Cuts) -> Any:
    """Cuts every dim of an array: `pad(np, x, ((2, 2), ()))`."""
    for at, counts in enumerate(cuts):
        array = cut(xp, array, at, counts)
    return array


def unpad(xp: Any, array: Any, cuts: Cuts, sizes: Sequence[int]) -> Any:
    """Drops all pads, so that `sizes` are left: `unpad(np, padded, ((2, 2), ()), [5, 3])`."""
    for at, (counts, size) in enumerate(zip(cuts, sizes, strict=bool(cuts))):
        array = join(xp, array, at, counts, size)
    return array


def padded_size(size: int, counts: Sequence[int]) -> int:
    """Returns the size of a dim that has been cut.

    >>> padded_size(5, [2, 2])
    8
    """
    for count in counts:
        size = -(-size // count)
    return size * math.prod(counts)


def part(size: int, counts: Sequence[int], places: Sequence[int]) -> tuple[int, int]:
    """Returns the positions of a dim, first and past the last, that are in one of its blocks.

    For a block that is all pads, both are where its data would start.

    >>> part(5, [2, 2], [1, 0])
    (3, 5)

    Args:
        places: the block's position at each level.
    """
    start, stop, block = 0, size, size
    for count, place in zip(counts, places, strict=True):
        block = -(-block // count)
        start = min(start + place * block, stop)
        stop = min(start + block, stop)
    return start, stop


def places(counts: Sequence[int], block: int) -> list[int]:
    """Returns the position at each level, major first, of the block with a number.

    >>> places([2, 3], 4)
    [1, 1]
    """
    positions = []
    for count in reversed(counts):
        block, place = divmod(block, count)
        positions.append(place)
    return positions[::-1]
