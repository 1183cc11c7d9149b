"""Hosts and slices: devices that are lost together, and who holds what of a tensor then.

A shard of a tensor is on all devices that differ only along axes that do not split the tensor. It
is lost if all its holders are lost. A shard counts even if it has nothing but pads.

Hosts have consecutive devices of one slice, in the order of the mesh. Clusters of GPUs are numbered
so. On the torus of a TPU slice JAX places axes by the links, and other devices may share a host.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from meshdsl.layouts.mesh import Mesh

Holders = frozenset[tuple[int, ...]]  # sets of domains, each of which has all copies of a shard


@dataclass(frozen=True, eq=False)
class Domains:
    """Groups of devices that are lost together: `Domains.hosts(Mesh.parse("data:16"), 8)`.

    Attributes:
        word: what a group is: a host or a slice.
        grid: what a group is a position of, by axis, in the order of the groups. Hosts that end
            within an axis are no positions of a grid: it is empty then.
        of: the group of each device, in the order of the mesh.
    """

    word: Literal["host", "slice"]
    mesh: Mesh
    grid: tuple[tuple[str, int], ...]
    of: np.ndarray

    @staticmethod
    def hosts(mesh: Mesh, devices_per_host: int) -> Domains:
        """Returns the hosts of a mesh; a slice with fewer devices than that is one host."""
        fast = [(name, size) for name, size in mesh.axes if name not in mesh.slow]
        slow = [(name, size) for name, size in mesh.axes if name in mesh.slow]
        in_slice = math.prod(size for _, size in fast)
        each = -(-in_slice // devices_per_host)
        devices = np.arange(mesh.size)
        order = [mesh.names.index(name) for name, _ in (*slow, *fast)]
        number = np.empty(mesh.size, np.int64)  # of a device, where slices come one by one
        number[devices.reshape([size for _, size in mesh.axes]).transpose(order).ravel()] = devices
        host = number // in_slice * each + number % in_slice // devices_per_host
        positions = _positions(fast, devices_per_host)
        grid = () if positions is None else (*slow, *positions)
        return Domains("host", mesh, grid, host)

    @staticmethod
    def slices(mesh: Mesh) -> Domains:
        """Returns the slices of a mesh: the positions along its slow axes."""
        slow = tuple((name, size) for name, size in mesh.axes if name in mesh.slow)
        hosts = Domains.hosts(mesh, mesh.size)
        grid = (*slow, *((name, 1) for name in mesh.names if name not in mesh.slow))
        return Domains("slice", mesh, grid, hosts.of)

    @cached_property
    def count(self) -> int:
        """How many groups there are."""
        return int(self.of.max()) + 1

    def holders(self, axes: Iterable[str]) -> Holders:
        """Returns the sets of groups that have all copies of a shard; they are sorted.

        To lose one of these sets is to lose a shard.

        Args:
            axes: those that split the tensor.
        """
        grid, groups = self.grid or self.mesh.axes, np.arange(self.count) if self.grid else self.of
        splitting = set(axes)
        order = sorted(range(len(grid)), key=lambda i: grid[i][0] not in splitting)
        shards = math.prod(size for name, size in grid if name in splitting)
        table = groups.reshape([size for _, size in grid]).transpose(order).reshape(shards, -1)
        return frozenset(tuple(sorted(set(row))) for row in table.tolist())

    def shards_of_one(self, axes: Iterable[str]) -> int:
        """Returns the most shards that a group has of a tensor, copies not counted."""
        splitting = set(axes)
        if self.grid:
            positions = dict(self.grid)
            return math.prod(self.mesh.sizes[name] // positions[name] for name in splitting)
        index = np.arange(self.mesh.size).reshape([size for _, size in self.mesh.axes])
        shard = np.zeros_like(index)
        for i, (name, size) in enumerate(self.mesh.axes):
            if name in splitting:
                along = [size if j == i else 1 for j in range(index.ndim)]
                shard = shard * size + np.arange(size).reshape(along)
        pairs = np.unique(np.stack([self.of, shard.ravel()]), axis=1)
        return int(np.bincount(pairs[0]).max())


@dataclass(frozen=True)
class Survival:
    """Which losses leave every shard of some tensors with a holder.

    Attributes:
        count: how many groups of devices there are.
        fatal: the groups whose loss alone loses a shard.
        fatal_pairs: how many pairs of groups lose a shard, those with a fatal group included.
        least: the fewest groups whose loss loses a shard.
    """

    count: int
    fatal: frozenset[int]
    fatal_pairs: int
    least: int

    @property
    def pairs(self) -> int:
        """How many pairs of groups there are."""
        return math.comb(self.count, 2)

    @property
    def single_share(self) -> float:
        """The share of the groups that can be lost."""
        return 1 - len(self.fatal) / self.count

    @property
    def pair_share(self) -> float:
        """The share of the pairs that can be lost; 1 if there are none."""
        return 1 - self.fatal_pairs / self.pairs if self.pairs else 1.0


def survival(domains: Domains, splits: Iterable[frozenset[str]]) -> Survival:
    """Returns what tensors survive together.

    Args:
        splits: the axes that split each of them.
    """
    sets = frozenset[tuple[int, ...]]().union(*map(domains.holders, set(splits)))
    assert sets, "nothing is held"
    fatal = frozenset(one[0] for one in sets if len(one) == 1)
    left = domains.count - len(fatal)
    pairs = sum(len(one) == 2 and fatal.isdisjoint(one) for one in sets)
    pairs += math.comb(domains.count, 2) - math.comb(left, 2)
    return Survival(domains.count, fatal, pairs, min(map(len, sets)))


def _positions(
    axes: list[tuple[str, int]], devices_per_host: int
) -> tuple[tuple[str, int], ...] | None:
    """Returns the positions of hosts along axes; None if a host ends within a position."""
    left, positions = devices_per_host, []
    for name, size in reversed(axes):
        if left % size and size % left:
            return None
        positions.append((name, max(1, size // left)))
        left = max(1, left // size)
    return tuple(reversed(positions))
