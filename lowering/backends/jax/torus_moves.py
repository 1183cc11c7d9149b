"""All_gather and reduce_scatter on TPUs, written so that XLA sends no more than they need.

On all chips of a three-dimensional torus, XLA:TPU has neither. It writes an all_reduce of the full
tensor instead, which sends twice the bytes and takes five seconds to compile (libtpu 0.0.51, 64
chips of v5p:4x4x4 and 128 of v5p:4x4x8; 32 of 64 chips are not affected). In two steps, within
groups of 8 and then across them, it sends as much as one step would: 7/64 and 7/8.

It also has no reduce_scatter along the dim that is innermost in memory, or of blocks that do not
fill its tiles of 128 numbers. XLA chooses the innermost dim: 4,096 by 1,376 numbers, along the
first, are an all_reduce again (libtpu 0.0.52, 32 of v5e:16x16). So there each device's block
becomes a row of its own, in rows of 128 if they divide. Blocks of less than a tile would be
all_reduces: small tensors are sent together, and `filled` up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.transfers import LANES, MANY, TILE, TILE_COLUMN, steps_of

Groups = list[list[int]] | None
Step = tuple[Sequence[str], Groups]


def steps(machine: Machine, axes: Sequence[str]) -> list[Step]:
    """Returns the steps of a gather: the axes of each, and the groups of devices along them.

    See `transfers.steps_of`; a step along entire axes has no groups.
    """
    axes = [axis for axis in axes if machine.mesh.sizes[axis] > 1] or list(axes)
    if not machine.torus:
        return [(axes, None)]
    found: list[Step] = []
    for step in steps_of(machine.mesh, axes, MANY):
        size, stride = machine.mesh.extent(step.axes), step.stride
        groups = [
            list(range(first, first + step.devices * stride, stride))
            for first in range(size)
            if first // stride % step.devices == 0
        ]
        found.append((list(step.axes), groups if len(groups) > 1 else None))
    return found


def all_gather(machine: Machine, x: Any, axes: Sequence[str], at: int) -> Any:
    """Gathers a dim along some axes: `all_gather(machine, x, ["data"], 0)`."""
    for names, groups in steps(machine, axes):
        x = lax.all_gather(x, tuple(names), axis=at, tiled=True, axis_index_groups=groups)
    return x


def reduce_scatter(machine: Machine, x: Any, axes: Sequence[str], at: int) -> Any:
    """Sums along some axes, and returns each device's shard of a dim; see `all_gather`."""
    for names, groups in reversed(steps(machine, axes)):
        devices = len(groups[0]) if groups else machine.mesh.extent(names)
        if machine.torus and not _fills_tiles(x, at, devices):
            x = _by_rows(x, tuple(names), at, devices, groups)
        else:
            x = lax.psum_scatter(
                x, tuple(names), scatter_dimension=at, tiled=True, axis_index_groups=groups
            )
    return x


def filled(rows: Any) -> Any:
    """Returns rows whose last dim has pads at its end, so that each row fills entire tiles."""
    pads = [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % (TILE // rows.dtype.itemsize))]
    return jnp.pad(rows, pads)


def _fills_tiles(x: Any, at: int, devices: int) -> bool:
    """Whether blocks along a dim fill tiles, so that XLA keeps the innermost dim."""
    if at == x.ndim - 1 or x.shape[-1] % LANES:
        return False
    return at < x.ndim - 2 or x.shape[at] // devices % (TILE_COLUMN // x.dtype.itemsize) == 0


def _by_rows(x: Any, names: tuple[str, ...], at: int, devices: int, groups: Groups) -> Any:
    """Returns a reduce_scatter of rows, each the block of one device."""
    x = jnp.moveaxis(x, at, 0)
    block = (x.shape[0] // devices, *x.shape[1:])
    aligned = x.ndim > 1 and x.shape[-1] % LANES == 0
    rows = x.reshape(devices, *((-1, LANES) if aligned else block))
    row = lax.psum_scatter(rows, names, scatter_dimension=0, axis_index_groups=groups)
    return jnp.moveaxis(row.reshape(block), 0, at)
