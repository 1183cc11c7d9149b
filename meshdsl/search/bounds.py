"""Bounds: the least time and memory of points, by arithmetic on the facts of one device.

* Work: every instruction of the program on one device, divided by the axes that split one of its
  dims, rounded up to whole positions. If there is a table, products cost what they cost at their
  local sizes, and other work at least what it costs to move its local bytes: small work is
  relatively slow. Lowering adds work (padding, accumulation), and never splits it further. Stages
  of a pipeline also wait (m + (p - 1) / v ticks for m microbatches, p stages of v rounds).
* Convolutions move at least the bytes of their operands and of their result. An axis splits one of
  their dims, so it leaves operands without this dim whole.
* Waits: sums over split dims that need each other travel one after another (`waits.py`). What may
  run beside them hides them.
* Sums: gradients of parameters that axes of the batch do not split must be added up over these, if
  they are sums over what these axes split (`gradients.py`).
* Ends: where the state of the optimizer is split over them, the updated shares of parameters are
  gathered after all that the update needs (`ends.py`).
* Memory: the larger of the inputs and three quarters of the buffers at the peak of one device, both
  divided in the same way.

The bounds do not have other collectives, and no other waits.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

import numpy as np

from meshdsl.layouts.calibration import calibration_of
from meshdsl.layouts.costs import ELEMENTWISE, Costs
from meshdsl.layouts.layout import matches
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.simulation import sending_seconds
from meshdsl.search.facts import Facts, Stored, Work
from meshdsl.search.space import Point, Structure
from meshdsl.search.splits import Split
from meshdsl.search.waits import Crossing, chain_of

_Dims = tuple[tuple[str, int], ...]
_Products = tuple[Work, float, int]  # one of them, the time of all on one device, their number
_PARTS = 8  # waits are added up for so many parts of a chain
_CROSSING = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_Part = Literal["params", "optimizer", "gradients", "values", "others"]
_MOVED = (1e3, 1e12, 2000)  # bytes: from, to, and how many sizes between
_MANY = 1e15  # bytes that take so long that no hop counts
_PEAK = 0.75  # lowering may free buffers earlier than on one device: the least share seen is 0.88


_Groups: TypeAlias = "tuple[list[_Alike], list[_Products]]"


class Bounds:
    """The bounds of one step on some hardware.

    Attributes:
        facts: those of its program.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self._prices: dict[tuple[int, int, int, int, int], float] = {}
        self._last: Split | None = None
        self._calibrated = calibration_of(facts.hardware.name) is not None
        self._moved = None if facts.costs is None else Moved(facts.costs)
        self._priced = facts.costs is not None
        rest, self._products = self._grouped(facts.work)
        self._chains: dict[tuple, list[_Chained]] = {}
        rows = [*zip(facts.work, facts.outer, strict=True)]
        self._before = [
            self._grouped(row for row, outer in rows if outer in end.before) for end in facts.ends
        ]
        self._update = [rows for rows in rest if frozenset(rows.first.dims) in facts.shapes]
        self._rest = [rows for rows in rest if frozenset(rows.first.dims) not in facts.shapes]
        self._inputs, self._peak = self._alike(facts.inputs), self._alike(facts.peak)

    def _grouped(self, work: Iterable[Work]) -> _Groups:
        """Returns work in groups that a layout divides alike, and products likewise."""
        alike: dict[tuple, list[Work]] = defaultdict(list)
        products: dict[tuple, list[Work]] = defaultdict(list)
        for row in work:
            key = tuple(sorted(row.dims.items())), row.stacks, row.repeated
            if self._priced and row.product is not None:
                products[*key, tuple(sorted(row.product.items())), row.width].append(row)
            else:
                alike[*key, row.moves].append(row)
        return [_Alike.of(rows, self._moved) for rows in alike.values()], [
            (rows[0], sum(row.seconds * row.runs for row in rows), sum(row.runs for row in rows))
            for rows in products.values()
        ]

    def _total(
        self, alike: Sequence[_Alike], products: Sequence[_Products], split: Split
    ) -> np.ndarray:
        """Returns the least time of groups of work, [points]."""
        total = np.zeros(len(split.sizes))
        for rows in alike:
            total += rows.seconds(split)
        for row, seconds, runs in products:
            total += self._product(row, seconds, runs, split)
        return total

    def _waits(self, structure: Structure, split: Split) -> np.ndarray:
        """Returns the least time, [points], that devices wait for sums that need each other."""
        total = np.zeros(len(split.sizes))
        kinds = {role.kind for role in structure.roles}
        if not kinds & {"data", "context"} or "stack" in kinds or self._calibrated:
            return total
        last = max(n for n, role in enumerate(structure.roles) if role.kind in ("data", "context"))
        key = tuple(
            role if role.kind != "weights" else None for role in structure.roles[: last + 1]
        )
        if key not in self._chains:
            self._chains[key] = [*self._chained(structure)]
        for one in self._chains[key]:
            times = one.first.runs * split.runs(one.first)
            work = self._total(*one.all, split) / times
            travels, beside = np.zeros(len(total)), np.zeros(len(total))
            most = np.zeros(len(total))
            whole = np.ones(len(total), bool)  # no halves of a dim are apart
            for crossings, kept, groups in one.parts:
                for crossing, count in crossings.items():
                    travels += count * self._latency(crossing, one.first, structure, split)
                for dim, size in kept:
                    whole &= split.local_size(dim, size, one.first) <= 1
                beside += self._total(*groups, split) / times
                halves = np.maximum(2 * travels - work, travels - (work + beside) / 2)
                least = travels - beside
                most = np.maximum(most, np.where(whole, least, np.minimum(least, halves)))
            total += most * times
        return total

    def _chained(self, structure: Structure) -> Iterator[_Chained]:
        for leaf in self.facts.leaves:
            chain = chain_of(leaf.block, structure.roles) if leaf.work else None
            if chain is None or not chain.crossings:
                continue
            count = len(chain.crossings)
            parts = []
            for start, end in itertools.pairwise(range(0, count + 1, -(-count // _PARTS))):
                here = slice(start, end)
                rows = itertools.chain(*chain.beside[here])
                grouped = self._grouped(leaf.work[i] for i in rows if i in leaf.work)
                kept = frozenset(itertools.chain(*chain.kept[here]))
                parts.append((Counter(chain.crossings[here]), kept, grouped))
            first = next(iter(leaf.work.values()))
            yield _Chained(first, self._grouped(leaf.work.values()), parts)

    def _latency(
        self, crossing: Crossing, row: Work, structure: Structure, split: Split
    ) -> np.ndarray:
        """Returns the least time of a sum over axes, [points]; 0 where they may not split it."""
        hardware = self.facts.hardware
        seconds = np.zeros(len(split.sizes))
        for at, sizes in enumerate(split.sizes):
            mesh = structure.mesh(sizes)
            joint = hardware.torus and not hardware.slow_axes(mesh)
            kinds = _CROSSING if joint else (*_CROSSING, "permute")
            each = []
            for number, dim, size in crossing.dims:
                if row.repeated and split.is_part(dim, size):
                    size = round(size * self.facts.microbatches / split.microbatches[at])
                same = [n for n, role in enumerate(structure.roles) if dim in role.dims]
                if size and size % math.prod(int(sizes[n]) for n in same) == 0:
                    send = partial(sending_seconds, hardware, mesh, wire=1.0)
                    axis = [structure.axes[number]]
                    if mesh.extent(axis) > 1:
                        each.append(min(send(kind=kind, axes=axis) for kind in kinds))
            # A sum over several axes takes the hops of all of them on a torus.
            seconds[at] = (sum(each) if joint else max(each)) if each else 0.0
        return seconds

    def seconds(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least work and waits of many points without the update, [points].

        Args:
            structure: how the state is stored does not matter.
            sizes: [points, axes].
            microbatches: [points].
        """
        split = self._split(replace(structure, storage=""), sizes, microbatches)
        return self._total(self._rest, self._products, split)

    def waits(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least time, beside `seconds`, that devices wait for sums, [points]."""
        split = self._split(replace(structure, storage=""), sizes, microbatches)
        return self._waits(structure, split)

    def update_seconds(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least work on tensors with the dims of parameters: as `seconds`."""
        split = self._split(structure, sizes, microbatches)
        total = np.zeros(len(sizes))
        for rows in self._update:
            total += rows.seconds(split)
        return total

    def _split(self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray) -> Split:
        """Returns a split that remembers what the one before has found for the same points."""
        split, last = Split(self.facts, structure, sizes, microbatches), self._last
        if last is not None and last.divides(structure, sizes, microbatches):
            split.known = last.known
        self._last = split
        return split

    def least(self, point: Point, work: float) -> float:
        """Returns the least time of a point with some work: what is sent may take longer."""
        return max(work, self._sums(point), self._gathers(point))

    def _gathers(self, point: Point) -> float:
        """Returns the least time until the updated shares of parameters are gathered."""
        structure, least = point.structure, 0.0
        stacked = any(role.kind == "stack" for role in structure.roles)
        if structure.storage != "optimizer" or stacked or self._calibrated:
            return least
        axes, _ = structure.storing
        split = Split(
            self.facts,
            structure,
            np.array([point.sizes]),
            np.array([point.variant.microbatches]),
        )
        rows = {row.path: row for row in self.facts.parameters}
        for end, before in zip(self.facts.ends, self._before, strict=True):
            wire = 0.0
            for row in (rows[path] for path in end.paths):
                held = math.prod(row.dims.values()) * end.itemsize[row.path]
                if split.scoped(row.dims)[0] < 1:  # the user's rules may leave it split
                    continue
                stored = 1 - float(split.stored(row.dims)[0])
                wire += held * float(split.share(row.dims)[0]) * stored
            if wire:
                sent = self._at_once("all_gather", wire, axes, point.mesh)
                least = max(least, float(self._total(*before, split)[0]) + sent)
        return least

    def _at_once(self, kind: str, wire: float, axes: Sequence[str], mesh: Mesh) -> float:
        """Returns the least time of collectives that send some bytes over any of some axes."""
        hardware = self.facts.hardware
        send = partial(sending_seconds, hardware, mesh, kind, least=True)
        ways = [(axis,) for axis in axes if mesh.extent([axis]) > 1]
        hops = min(send(wire=1.0, axes=way) for way in ways)
        if hardware.torus:  # what a byte takes beyond all hops
            return max(hops, send(wire=_MANY, axes=axes) / _MANY * wire)
        return min(send(wire=wire, axes=way) for way in (*ways, tuple(axes)))

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
        batch = {
            axis: role.splits
            for role, axis in zip(structure.roles, structure.axes, strict=True)
            if role.kind in ("data", "context") and mesh.extent([axis]) > 1
        }
        devices = mesh.extent([*batch])
        if devices == 1:
            return 0.0
        split = Split(self.facts, structure, np.array([point.sizes]), np.array([1]))
        elements = sum(
            math.prod(row.dims.values())
            * float((split.share(row.dims) * split.scoped(row.dims))[0])
            for row in self.facts.parameters
            if not any(self._summed(row).isdisjoint(dims) for dims in batch.values())
        )
        wire = self.facts.width * elements * (devices - 1) / devices
        hardware = self.facts.hardware
        kinds = ("reduce_scatter", "all_gather")
        axes = [*batch]
        return sum(sending_seconds(hardware, mesh, kind, wire, axes, least=True) for kind in kinds)

    def _summed(self, row: Stored) -> frozenset[str]:
        """Returns the dims that the gradient of a parameter is summed over."""
        return self.facts.summed.get(row.path, frozenset())

    def gradient_bytes(self, point: Point) -> float:
        """Returns the bytes of a device's gradients if the axes of the batch do not split them."""
        split = Split(self.facts, point.structure, np.array([point.sizes]), np.array([1]))
        rows = (row for row in self.facts.parameters if not row.frozen)
        return float(sum(row.bytes * split.share(row.dims)[0] for row in rows))

    def peak_bytes(
        self, structure: Structure, sizes: np.ndarray, microbatches: np.ndarray
    ) -> np.ndarray:
        """Returns the least memory of many points of a structure, [points], in bytes."""
        split = self._split(structure, sizes, microbatches)
        inputs = sum(count * self._local_share(*key, split) for key, count in self._inputs)
        peak = sum(count * self._local_share(*key, split) for key, count in self._peak)
        return np.maximum(inputs, _PEAK * peak)

    def _alike(self, rows: Sequence[Stored]) -> list[tuple[tuple[_Dims, _Part], int]]:
        """Returns the bytes of all buffers that every layout divides alike."""
        totals: Counter[tuple[_Dims, _Part]] = Counter()
        for row in rows:
            part: _Part = "gradients" if frozenset(row.dims) in self.facts.shapes else "values"
            if row.path:
                part = "params" if row.is_parameter else "others"
                part = "optimizer" if matches("optimizer", row.path) else part
            totals[tuple(row.dims.items()), part] += row.bytes
        return list(totals.items())

    def _local_share(self, sizes: _Dims, part: _Part, split: Split) -> np.ndarray:
        """Returns the share of a buffer that one device has."""
        dims, storage = dict(sizes), split.structure.storage
        if part == "values":
            return split.share(dims) * split.parts(dims) * split.live(dims)
        stored = part != "others" and (part != "params" or storage == "params")
        if storage and stored:
            return split.share(dims) * split.storage(dims)
        return split.share(dims) * split.scoped(dims)


class Moved:
    """The least time of elementwise work by the bytes that it moves, from a table.

    It is computed once for sizes that are close to each other: arrays of points are looked up.
    """

    def __init__(self, costs: Costs) -> None:
        self.sizes = np.geomspace(*_MOVED)
        seconds = np.array([costs.moved(ELEMENTWISE, size) for size in self.sizes])
        # More bytes may take less time by the table, but by no bound.
        self._seconds = np.minimum.accumulate(seconds[::-1])[::-1]

    def seconds(self, moved: np.ndarray) -> np.ndarray:
        """Returns the least time to move some bytes, of any shape."""
        below = np.searchsorted(self.sizes, moved, side="right") - 1
        return self._seconds[np.maximum(below, 0)]


@dataclass(frozen=True, eq=False)
class _Chained:
    """Sums of a block that need each other, with its work.

    Attributes:
        first: a row of its work.
        all: its work.
        parts: for some sums after each other: how many there are of each kind, the dims that they
            keep, and what may run beside one of them or a later one, but not before.
    """

    first: Work
    all: _Groups
    parts: Sequence[tuple[Counter[Crossing], frozenset[tuple[str, int]], _Groups]]


@dataclass(frozen=True, eq=False)
class _Alike:
    """Work that layouts divide alike.

    Attributes:
        first: one row of it.
        runs: of each kind of rows, how often a step runs them.
        each: of each kind of rows, the seconds of one run on one device.
        bytes: of each kind of rows, what a run moves, which takes a least time; 0 of products.
    """

    first: Work
    runs: np.ndarray
    each: np.ndarray
    bytes: np.ndarray
    moved: Moved | None

    @property
    def moves(self) -> Sequence[tuple[_Dims, int]]:
        """Of a convolution, the dims and bytes of each operand and of its result."""
        return self.first.moves

    @staticmethod
    def of(rows: Sequence[Work], moved: Moved | None) -> _Alike:
        runs: Counter[tuple[float, int]] = Counter()
        for row in rows:
            runs[row.seconds, row.bytes] += row.runs
        each, sizes = zip(*runs, strict=True)
        return _Alike(rows[0], np.array([*runs.values()]), np.array(each), np.array(sizes), moved)

    def seconds(self, split: Split) -> np.ndarray:
        """Returns the least time of all runs, [points]."""
        share = split.of_run(self.first)
        runs = split.runs(self.first)
        if self.moved is None:
            return float(self.runs @ self.each) * share * runs
        local = np.outer(self.bytes, share)
        least = np.where(local > 0, self.moved.seconds(local), 0.0)
        if self.moves:
            least = np.maximum(least, self.moved.seconds(split.moved(self.first)))
        return self.runs @ np.maximum(np.outer(self.each, share), least) * runs


def as_arrays(
    sizes: Sequence[Sequence[int]], microbatches: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns all pairs of sizes and microbatches as arrays: [points, axes], [points]."""
    pairs = [(size, count) for size in sizes for count in microbatches]
    return np.array([size for size, _ in pairs]), np.array([count for _, count in pairs])
