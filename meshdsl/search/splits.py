"""Splits: the share of tensors and of work that one device has, of many points at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from meshdsl.search.facts import Facts, Work
from meshdsl.search.space import Structure

_MOST_WAYS = 16


class Split:
    """Divides the tensors and the work of one device as points of one structure do.

    Attributes:
        sizes: [points, axes].
        microbatches: [points].
        known: the shares that were computed, by the dims of tensors.
    """

    def __init__(
        self, facts: Facts, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> None:
        self.facts, self.structure = facts, structure
        self.sizes, self.microbatches = sizes, microbatches
        self.shapes = facts.shapes
        self.known: dict[tuple, np.ndarray] = {}

    def divides(self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray) -> bool:
        """Whether it divides work as these points do; they may store the state otherwise."""
        same = self.sizes is sizes and self.microbatches is microbatches
        return same and self.structure.roles == structure.roles

    @cached_property
    def _batch(self) -> Mapping[str, int]:
        """The dims of the batch, and their sizes in all microbatches together."""
        rows = [row.dims for row in self.facts.inputs]
        return {
            dim: max(dims[dim] for dims in rows if dim in dims)
            for dim in self.facts.parted
            if any(dim in dims for dims in rows)
        }

    @cached_property
    def _smaller(self) -> np.ndarray:
        """The size of a microbatch, against one of the facts' program."""
        return self.facts.microbatches / self.microbatches

    def is_part(self, dim: str, size: int) -> bool:
        """Whether a dim of some size is that of a microbatch."""
        parts = self.facts.microbatches
        return parts > 1 and size > 0 and self._batch.get(dim) == parts * size

    def local_size(self, dim: str, size: int, row: Work) -> np.ndarray:
        """Returns the most positions of a dim that a device has, [points]: that axes surely split.

        Args:
            row: work beside it; it says whether it is of a microbatch.
        """
        sizes = np.full(len(self.sizes), float(size))
        if row.repeated and self.is_part(dim, size):
            sizes = np.maximum(1.0, np.round(size * self._smaller))
        for number, role in enumerate(self.structure.roles):
            if role.kind in ("data", "context") and dim in role.splits:
                sizes = sizes / self.sizes[:, number]
        return np.ceil(sizes)

    def extents(self, dims: Mapping[str, int]) -> dict[str, np.ndarray]:
        """Returns the extents of dims if each axis splits the first dim that it can."""
        return next(self.ways(dims))

    def ways(self, dims: Mapping[str, int]) -> Iterator[dict[str, np.ndarray]]:
        """Yields each way to split dims: an axis splits one dim of its role that the tensor has."""
        axes, choices = [], []
        for number, role in enumerate(self.structure.roles):
            if fitting := [dim for dim in role.dims if dims.get(dim, 1) > 1]:
                axes.append(number)
                choices.append(fitting)
        for chosen in itertools.islice(itertools.product(*choices), _MOST_WAYS):
            extents: dict[str, np.ndarray] = {}
            for number, dim in zip(axes, chosen, strict=True):
                extents[dim] = extents.get(dim, 1) * self.sizes[:, number]
            yield extents

    def share(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the least share of a tensor that one device has, in complete positions."""
        key = tuple(sorted(dims.items()))
        if key not in self.known:
            least = np.full(len(self.sizes), np.inf)
            for extents in self.ways(dims):
                share = np.ones(len(self.sizes))
                for dim, extent in extents.items():
                    size = np.full(len(self.sizes), float(dims[dim]))
                    if self.is_part(dim, dims[dim]):
                        size = np.maximum(1.0, size * self._smaller)
                    share *= np.ceil(size / extent) / size
                least = np.minimum(least, share)
            self.known[key] = least
        return self.known[key]

    def moved(self, row: Work) -> np.ndarray:
        """Returns the least bytes that a convolution moves on a device, [points].

        An axis splits a dim of its role, or one that such a dim is renamed to.
        """
        key = row.moves, row.repeated
        if key in self.known:
            return self.known[key]
        least = np.full(len(self.sizes), np.inf)
        axes, choices = [], []
        for number, role in enumerate(self.structure.roles):
            names = self.facts.renamed(role.dims)
            if fitting := sorted(dim for dim in names if row.dims.get(dim, 1) > 1):
                axes.append(number)
                choices.append(fitting)
        for chosen in itertools.product(*choices):
            moved = np.zeros(len(self.sizes))
            for dims, count in row.moves:
                part = np.full(len(self.sizes), float(count))
                for dim, size in dims:
                    whole = np.full(len(self.sizes), float(size))
                    if row.repeated and self.is_part(dim, size):
                        whole = np.maximum(1.0, whole * self._smaller)
                    extent = np.ones(len(self.sizes))
                    for number, name in zip(axes, chosen, strict=True):
                        extent = extent * (self.sizes[:, number] if name == dim else 1)
                    part = part * np.ceil(whole / extent) / size
                moved += part
            least = np.minimum(least, moved)
        self.known[key] = least
        return least

    def parts(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the size of a tensor of a microbatch, against its size in the facts' program."""
        part = any(self.is_part(dim, size) for dim, size in dims.items())
        return self._smaller if part else np.ones(len(self.sizes))

    def live(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns how many microbatches' activations a stage keeps of its layers, at least."""
        stages = self.stages
        if dims.keys().isdisjoint(self.facts.stacks):
            return np.ones(len(self.sizes))
        return np.minimum(2 * stages - 1, self.microbatches)

    @cached_property
    def stages(self) -> np.ndarray:
        stages = np.ones(len(self.sizes))
        for number, role in enumerate(self.structure.roles):
            if role.kind == "stack":
                stages = stages * self.sizes[:, number]
        return stages

    def scoped(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the least share of an input that the user's rules with a scope leave."""
        rules = [rule for rule in self.structure.pinned.rules if rule.scope and rule.dim in dims]
        axes = {axis for rule in rules for axis in rule.axes}
        share = np.ones(len(self.sizes))
        for number, axis in enumerate(self.structure.axes):
            if axis in axes:
                share = share / self.sizes[:, number]
        for axis, size in self.structure.storing_only:
            if axis in axes:
                share = share / size
        return share

    def storage(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the least share that storage leaves on a device, with that of `scoped`."""
        return self.stored(dims) * self.scoped(dims)

    def stored(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the share that the structure's own storage leaves on a device."""
        if not self.structure.storage:
            return np.ones(len(self.sizes))
        axes, _ = self.structure.storing
        split = self.extents(dims)
        for dim in self.structure.stored:
            if dim in dims and dim not in split:
                extent = np.ones(len(self.sizes))
                for number, axis in enumerate(self.structure.axes):
                    role = self.structure.roles[number]
                    free = not any(d in dims for d in role.splits)
                    if axis in axes and free:
                        extent = extent * self.sizes[:, number]
                return np.ceil(dims[dim] / extent) / dims[dim]
        return np.ones(len(self.sizes))

    def work(self, row: Work) -> np.ndarray:
        """Returns the work of all runs of an instruction, against that on one device."""
        return self.of_run(row) * self.runs(row)

    def of_run(self, row: Work) -> np.ndarray:
        """Returns the work of one run of an instruction, against that on one device."""
        share = self.share(row.dims)
        if frozenset(row.dims) in self.shapes:  # the update, and sums of gradients
            share = share * self.storage(row.dims)
        return share * self.parts(row.dims) if row.repeated else share

    def runs(self, row: Work) -> np.ndarray:
        """Returns how often a step runs an instruction, against the program of one device."""
        runs = np.ones(len(self.sizes))
        if row.repeated:
            runs = self.microbatches / self.facts.microbatches
        stacks = [d for d in row.stacks if d in self.facts.stacks]
        for number, role in enumerate(self.structure.roles):
            if role.kind == "stack" and role.splits[0] in stacks:
                layers, stages = self.facts.size(role.splits[0]), self.sizes[:, number]
                bubble = self.facts.bubble * (stages - 1)
                ticks = (self.microbatches + bubble) / self.microbatches
                runs = runs * np.ceil(layers / stages) / layers * ticks
        return runs

    def local(self, row: Work, extents: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the sizes of the dims of an instruction on a device, each [points]."""
        local = {}
        for dim, size in row.dims.items():
            sizes = np.full(len(self.sizes), float(size))
            if row.repeated and self.is_part(dim, size):
                sizes = np.maximum(1.0, np.round(size * self._smaller))
            local[dim] = np.ceil(sizes / extents[dim]) if dim in extents else sizes
        return local
