"""Gathers and scatters among many TPUs, in two steps.

XLA:TPU has no all_gather or reduce_scatter among all chips of a three-dimensional torus: it writes
an all_reduce of the whole instead, which sends twice the bytes and takes five seconds to compile
(libtpu 0.0.51, 64 chips of v5p:4x4x4 and 128 of v5p:4x4x8; 32 of 64 stay as they are). In two
steps, within groups of 8 and then across them, it sends what one step would have: 7/64 and 7/8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax import lax

from meshdsl.lowering.backends.jax.machine import Machine

MANY = 64  # devices from which on groups may be a whole torus

Groups = list[list[int]] | None
Step = tuple[Sequence[str], Groups]


def steps(machine: Machine, axes: Sequence[str]) -> list[Step]:
    """Returns the axes, and the groups along them, that are gathered one after the other.

    The first step joins neighbours: the minor axes, or the minor part of a single one.
    """
    axes = [axis for axis in axes if machine.mesh.sizes[axis] > 1] or list(axes)
    size = machine.mesh.extent(axes)
    if not machine.torus or size < MANY:
        return [(axes, None)]
    if len(axes) > 1:
        return [*steps(machine, axes[-1:]), *steps(machine, axes[:-1])]
    inner = max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
    if inner == 1:
        return [(axes, None)]
    near = [list(range(start, start + inner)) for start in range(0, size, inner)]
    far = [list(range(start, size, inner)) for start in range(inner)]
    return [(axes, near), (axes, far)]


def all_gather(machine: Machine, x: Any, axes: Sequence[str], at: int) -> Any:
    """Joins the shards of a dim along some axes: `all_gather(machine, x, ["data"], 0)`."""
    for names, groups in steps(machine, axes):
        x = lax.all_gather(x, tuple(names), axis=at, tiled=True, axis_index_groups=groups)
    return x


def reduce_scatter(machine: Machine, x: Any, axes: Sequence[str], at: int) -> Any:
    """Adds up along some axes and leaves each device its shard of a dim; see `all_gather`."""
    for names, groups in reversed(steps(machine, axes)):
        x = lax.psum_scatter(
            x, tuple(names), scatter_dimension=at, tiled=True, axis_index_groups=groups
        )
    return x
