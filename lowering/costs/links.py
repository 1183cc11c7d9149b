"""Links: which links of the mesh axes a collective uses, in which direction.

A link is an axis and a direction: +1 towards larger positions, -1 towards smaller ones. A permute
along one axis uses the directions in which its pairs go; every other collective uses both
directions of all its axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from meshdsl.layouts.mesh import Mesh

AxisLink: TypeAlias = tuple[str, int]


def links_of(
    kind: str, axes: Sequence[str], mesh: Mesh, pairs: Iterable[Sequence[int]] = ()
) -> tuple[AxisLink, ...]:
    """Returns the links that a collective uses.

    >>> links_of("permute", ["m"], Mesh.parse("m:4"), [(0, 1), (1, 2), (2, 3), (3, 0)])
    (('m', 1),)

    Args:
        kind: the kind of the collective.
        axes: the mesh axes of the collective.
        pairs: of a permute, the numbers of the devices that send and receive.
    """
    directions: Iterable[int] = (1, -1)
    if kind == "permute" and len(axes) == 1:
        moving = [(source, target) for source, target in pairs if source != target]
        signs = {_direction(source, target, axes[0], mesh) for source, target in moving}
        directions = sorted(signs, reverse=True)
    return tuple((axis, direction) for axis in axes for direction in directions)


def _direction(source: int, target: int, axis: str, mesh: Mesh) -> int:
    """Returns the direction of the shortest way around an axis."""
    stride = mesh.extent(mesh.names[mesh.names.index(axis) + 1 :])
    size = mesh.sizes[axis]
    start, end = source // stride % size, target // stride % size
    ahead = (end - start) % size
    if 2 * ahead == size:  # both ways are as long: no way across the end of the axis
        return 1 if end > start else -1
    return 1 if 2 * ahead < size else -1
