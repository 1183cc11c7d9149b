"""Bounds: the least time and memory of points, by arithmetic on the facts of one device.

* Work: every instruction of the program on one device, divided by the axes that split one of its
  dims, rounded up to whole positions. Products cost what they cost at their local sizes, if a table
  has that. Lowering adds work (padding, accumulation), and never splits it further. Stages of a
  pipeline also wait (m + p - 1 ticks for m microbatches and p stages).
* Sums: gradients of parameters that axes of the batch do not split must be added up over these.
* Memory: the larger of the inputs and three quarters of the buffers at the peak of one device, both
  divided in the same way.

The bounds do not have other collectives, and no other waits.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from meshdsl.layouts.layout import matches
from meshdsl.lowering.costs.simulation import sending_seconds
from meshdsl.search.facts import Facts, Stored, Work
from meshdsl.search.space import Point, Structure

_MOST_WAYS = 16
_PEAK = 0.75  # lowering may free buffers earlier than on one device: the least share seen is 0.88
_HALF = 2  # the least bytes of an element of a gradient, unless products have 8 bits


class Bounds:
    """The bounds of one step on some hardware.

    Attributes:
        facts: those of its program.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._prices: dict[tuple[int, int, int, int, int], float] = {}
        priced = facts.costs is not None
        alike: dict[tuple, list[Work]] = defaultdict(list)
        products: dict[tuple, list[Work]] = defaultdict(list)
        for row in facts.work:
            key = tuple(sorted(row.dims.items())), row.stacks, row.repeated
            if priced and row.product is not None:
                products[*key, tuple(sorted(row.product.items())), row.width].append(row)
            else:
                alike[key].append(row)
        # Rows with the same dims are added up, since a layout divides them alike.
        rest = [(rows[0], sum(row.seconds * row.runs for row in rows)) for rows in alike.values()]
        self._products = [
            (rows[0], sum(row.seconds * row.runs for row in rows), sum(row.runs for row in rows))
            for rows in products.values()
        ]
        self._width = min([row.width for row in facts.work if row.product is not None], default=2)
        self._width = min(_HALF, self._width)
        self._update = [row for row in rest if frozenset(row[0].dims) in facts.shapes]
        self._rest = [row for row in rest if frozenset(row[0].dims) not in facts.shapes]

    def seconds(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least work of many points without the update, [points], in seconds.

        Args:
            structure: how the state is stored does not matter.
            sizes: [points, axes].
            microbatches: [points].
        """
        split = Split(self.facts, replace(structure, storage=""), sizes, microbatches)
        total = np.zeros(len(sizes))
        for row, seconds in self._rest:
            total += seconds * split.work(row)
        for row, seconds, runs in self._products:
            total += self._product(row, seconds, runs, split)
        return total

    def update_seconds(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least work on tensors with the dims of parameters: as `seconds`."""
        split = Split(self.facts, structure, sizes, microbatches)
        total = np.zeros(len(sizes))
        for row, seconds in self._update:
            total += seconds * split.work(row)
        return total

    def least(self, point: Point, work: float) -> float:
        """Returns the least time of a point with some work: sums of gradients may take longer."""
        return max(work, self._sums(point))

    def _product(self, row: Work, seconds: float, runs: int, split: Split) -> np.ndarray:
        """Returns the time of a product at its local sizes, [points], in seconds.

        Where an axis may split one of several dims, lowering chooses one; the bound takes the dim
        with the least time.

        Args:
            seconds: the time of all products with these dims on one device.
            runs: the number of these products.
        """
        assert row.product is not None and self.facts.costs is not None
        share = split.work(row)
        least = np.full(len(share), np.inf)
        for extents in split.ways(row.dims):
            local = split.local(row, extents)
            sizes = {kind: np.ones(len(share)) for kind in ("batch", "rows", "inner", "columns")}
            volume = np.ones(len(share))
            for dim, kind in row.product.items():
                sizes[kind] = sizes[kind] * local[dim]
            for dim, size in row.dims.items():
                volume *= local[dim] / size
            stacked = np.stack([*sizes.values()], axis=1).astype(np.int64)
            price = np.empty(len(share))
            for at, (batch, rows, inner, columns) in enumerate(stacked.tolist()):
                key = rows, inner, columns, row.width, batch
                if key not in self._prices:
                    self._prices[key] = self.facts.costs.product(*key)
                price[at] = self._prices[key]
            least = np.minimum(least, price * runs * share / volume)
        return np.maximum(seconds * share, least)

    def _sums(self, point: Point) -> float:
        """Returns the least time in which gradients are added up and their sums come back."""
        structure, mesh = point.structure, point.mesh
        batch = [
            axis
            for role, axis in zip(structure.roles, structure.axes, strict=True)
            if role.kind in ("data", "context")
        ]
        devices = mesh.extent(batch)
        if devices == 1:
            return 0.0
        split = Split(self.facts, structure, np.array([point.sizes]), np.array([1]))
        elements = sum(
            math.prod(row.dims.values()) * float(split.share(row.dims)[0])
            for row in self.facts.parameters
            if not row.frozen
        )
        wire = self._width * elements * (devices - 1) / devices
        hardware = self.facts.hardware
        kinds = ("reduce_scatter", "all_gather")
        return sum(sending_seconds(hardware, mesh, kind, wire, batch) for kind in kinds)

    def peak_bytes(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least memory of many points of a structure, [points], in bytes."""
        split = Split(self.facts, structure, sizes, microbatches)
        inputs = sum(row.bytes * self._local_share(row, split) for row in self.facts.inputs)
        peak = sum(row.bytes * self._local_share(row, split) for row in self.facts.peak)
        return np.maximum(inputs, _PEAK * peak)

    def _local_share(self, row: Stored, split: Split) -> np.ndarray:
        """Returns the share of a buffer that one device has."""
        storage = split.structure.storage
        is_gradient = not row.path and frozenset(row.dims) in self.facts.shapes
        scopes = ("params", "optimizer") if storage == "params" else ("optimizer",)
        stored = storage and (is_gradient or any(matches(scope, row.path) for scope in scopes))
        if stored:
            return split.share(row.dims) * split.storage(row.dims)
        if row.path or is_gradient:
            return split.share(row.dims)
        return split.share(row.dims) * split.parts(row.dims) * split.live(row.dims)


class Split:
    """Divides the tensors and the work of one device as points of one structure do.

    Attributes:
        sizes: [points, axes].
        microbatches: [points].
    """

    def __init__(
        self, facts: Facts, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> None:
        self.facts, self.structure = facts, structure
        self.sizes, self.microbatches = sizes, microbatches
        self.shapes = facts.shapes
        self._shares: dict[tuple, np.ndarray] = {}

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

    def _is_part(self, dim: str, size: int) -> bool:
        """Whether a dim of some size is that of a microbatch."""
        parts = self.facts.microbatches
        return parts > 1 and size > 0 and self._batch.get(dim) == parts * size

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
        if key not in self._shares:
            least = np.full(len(self.sizes), np.inf)
            for extents in self.ways(dims):
                share = np.ones(len(self.sizes))
                for dim, extent in extents.items():
                    size = np.full(len(self.sizes), float(dims[dim]))
                    if self._is_part(dim, dims[dim]):
                        size = np.maximum(1.0, size * self._smaller)
                    share *= np.ceil(size / extent) / size
                least = np.minimum(least, share)
            self._shares[key] = least
        return self._shares[key]

    def parts(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the size of a tensor of a microbatch, against its size in the facts' program."""
        part = any(self._is_part(dim, size) for dim, size in dims.items())
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

    def storage(self, dims: Mapping[str, int]) -> np.ndarray:
        """Returns the share that storage leaves on a device."""
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
        share = self.share(row.dims)
        if frozenset(row.dims) in self.shapes:  # the update, and sums of gradients
            share = share * self.storage(row.dims)
        if row.repeated:
            share = share * self.parts(row.dims) * (self.microbatches / self.facts.microbatches)
        stacks = [d for d in row.stacks if d in self.facts.stacks]
        for number, role in enumerate(self.structure.roles):
            if role.kind == "stack" and role.splits[0] in stacks:
                layers, stages = self.facts.size(role.splits[0]), self.sizes[:, number]
                ticks = (self.microbatches + stages - 1) / self.microbatches
                share = share * np.ceil(layers / stages) / layers * ticks
        return share

    def local(self, row: Work, extents: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns the sizes of the dims of an instruction on a device, each [points]."""
        local = {}
        for dim, size in row.dims.items():
            sizes = np.full(len(self.sizes), float(size))
            if row.repeated and self._is_part(dim, size):
                sizes = np.maximum(1.0, np.round(size * self._smaller))
            local[dim] = np.ceil(sizes / extents[dim]) if dim in extents else sizes
        return local


def as_arrays(
    sizes: Sequence[Sequence[int]], microbatches: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all pairs of sizes and microbatches as arrays: [points, axes], [points]."""
    pairs = [(size, count) for size in sizes for count in microbatches]
    return np.array([size for size, _ in pairs]), np.array([count for _, count in pairs])
