"""Resharding: the cheapest chain of moves from one layout of a tensor to another.

A chain is what the compiler may choose; its two ends are not. It has the least wire bytes, where a
byte that crosses a slow axis of the mesh counts for `SLOWER` (so a sum over a slow and a fast axis
is scattered inside, reduced across, and gathered inside); among equals the fewest moves, then the
fewest collectives (a permute counts for two, as the least regular one), then the first in a fixed
order, so that equal questions have equal answers in every process.

The search is A* over layouts. It is kept small by what it leaves alone: an axis that is idle at
both ends, an axis that both ends keep partial or in one place (major to where a dim's splits begin
to differ), and every dim split alike at both ends, except two that may hold axes on the way.
Costs are compared as exact integers, so a tie is a tie whatever the sizes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import combinations, permutations
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshdsl.dims import Shape
from meshdsl.layouts.tensor_layout import Kind, TensorLayout
from meshdsl.lowering.program import wire_bytes
from meshdsl.mesh import Mesh

# What a byte on a slow axis counts: about the ratio of a chip's links to its share of the network.
SLOWER = 16


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a chain: a collective, or a local and free `slice`.

    The `params` of a collective are those that `program` lists. A `slice` has `axes` and `dim`:
    replicated axes are appended, minor, to dim. A slice over no axes leaves every block where it is
    and only renames the layout: nothing but axes of size 1 has changed place.

    The `pairs` of a permute are a bijection of all devices, sorted by source, in which a device
    that already holds its block is its own source. Its `axes` are those along which a shard moves,
    in mesh order; never a partial one.
    """

    op: str
    params: Mapping[str, Any] = field(hash=False)
    result: TensorLayout
    wire_bytes: float


@lru_cache(maxsize=1 << 16)
def reshard(
    shape: Shape, itemsize: int, start: TensorLayout, goal: TensorLayout, mesh: Mesh
) -> tuple[Move, ...]:
    """Returns the moves, of least wire bytes, that take a tensor from `start` to `goal`.

    The partial axes of `start` have one kind, not `varying`; `goal` may keep some or all of them,
    and has no others.
    """
    kinds = {kind for _, kind in start.partial}
    assert len(kinds) <= 1 and "varying" not in kinds, f"cannot move a tensor that is {start}"
    assert set(goal.partial) <= set(start.partial), f"`{goal}` is partial where `{start}` is not"
    for end in (start, goal):
        assert {dim for dim, _ in end.splits} <= set(shape.names), f"`{end}` is not of {shape}"
    if start == goal:
        return ()
    problem = _Problem.between(shape, start, goal, mesh)
    here, state, moves = start, problem.start, []
    others = start.local(shape, mesh).volume // problem.volume(state[0])
    for step in problem.shortcut() or problem.search():
        there = problem.layout(step.state)
        payload = problem.payload(step, state) * others * itemsize
        params: dict[str, Any] = {"axes": step.axes, **step.dims}
        if step.op == "all_reduce":
            params["kind"] = problem.kind
        elif step.op == "permute":
            params = _permutation(here, there, mesh)
        devices = 1 if step.op == "slice" else mesh.extent(params["axes"])
        moves.append(Move(step.op, params, there, wire_bytes(step.op, payload, devices)))
        here, state = there, step.state
    assert here == goal
    return tuple(moves)


def reshard_cost(
    shape: Shape, itemsize: int, start: TensorLayout, goal: TensorLayout, mesh: Mesh
) -> float:
    """Returns the bytes that one device sends on the cheapest way from `start` to `goal`.

    Those that cross a slow axis count for `SLOWER`.
    """
    return math.fsum(
        move.wire_bytes * (1 if mesh.slow.isdisjoint(move.params["axes"]) else SLOWER)
        for move in reshard(shape, itemsize, start, goal, mesh)
    )


def _permutation(here: TensorLayout, there: TensorLayout, mesh: Mesh) -> dict[str, Any]:
    """Returns the params of the permute between two layouts with equal local shapes.

    A shard never moves along an axis that splits neither layout. Every device that holds the block
    it needs keeps it; the others, in order, send to those, in order, that lack the block they hold.
    """
    index = np.indices(tuple(mesh.sizes.values())).reshape(len(mesh.axes), mesh.size)
    along = dict(zip(mesh.names, index, strict=True))
    moving = here.split_axes | there.split_axes
    dims = sorted({dim for dim, _ in here.splits + there.splits})

    def blocks(layout: TensorLayout) -> np.ndarray:
        """Numbers the block of each device, distinct for distinct places along the other axes."""
        digits = [axis for axis in mesh.names if axis not in moving]
        digits += [axis for dim in dims for axis in layout.axes(dim)]
        number = np.zeros(mesh.size, np.int64)
        for axis in digits:
            number = number * mesh.sizes[axis] + along[axis]
        return number

    has, needs = blocks(here), blocks(there)
    away = np.flatnonzero(has != needs)
    sources = away[np.argsort(has[away], kind="stable")]
    target = np.arange(mesh.size)
    target[sources] = away[np.argsort(needs[away], kind="stable")]
    axes = [axis for axis in mesh.names if (along[axis] != along[axis][target]).any()]
    pairs = tuple(enumerate(target.tolist()))
    return {"axes": tuple(axes), "pairs": pairs, "mesh_axes": mesh.names}


_Splits: TypeAlias = tuple[tuple[str, ...], ...]
_State: TypeAlias = tuple[_Splits, tuple[str, ...]]
_COLLECTIVES = {"slice": 0, "permute": 2}


class _Step(NamedTuple):
    """A move of a `_Problem`, and the state it leads to."""

    op: str
    axes: tuple[str, ...]
    dims: dict[str, str]
    state: _State


@dataclass(frozen=True, eq=False)
class _Problem:
    """What differs between two layouts of a tensor.

    A state is, for each of `dims`, the axes beyond those `kept`, and the axes yet to be reduced.

    Attributes:
        dims: the dims that a chain may split.
        room: for each of them, its size in the shard of `kept`.
        sizes: the axes that a chain may use, in mesh order.
        kept: what both ends have in common, and with them every layout on the way.
        kind: the kind of the partial axes, if there are any.
    """

    dims: tuple[str, ...]
    room: tuple[int, ...]
    sizes: dict[str, int]
    kept: TensorLayout
    kind: Kind | None
    start: _State
    goal: _State
    slow: frozenset[str] = frozenset()

    @staticmethod
    def between(shape: Shape, start: TensorLayout, goal: TensorLayout, mesh: Mesh) -> _Problem:
        """Sets aside what both ends have in common."""
        shared = {dim: _prefix(start.axes(dim), goal.axes(dim)) for dim in shape.names}
        first = {dim: start.axes(dim)[len(shared[dim]) :] for dim in shape.names}
        last = {dim: goal.axes(dim)[len(shared[dim]) :] for dim in shape.names}
        pending = set(start.partial_axes) - set(goal.partial_axes)
        used = pending.union(*first.values(), *last.values())
        sizes = {axis: size for axis, size in mesh.axes if axis in used}
        kept = TensorLayout.of(shared, dict(goal.partial))
        room = dict(zip(shape.names, kept.local(shape, mesh).sizes, strict=True))

        dims = [dim for dim in shape.names if first[dim] or last[dim]]
        idle = [dim for dim in shape.names if dim not in dims]
        extent = math.prod(sizes.values())
        dims += sorted(idle, key=lambda dim: math.gcd(room[dim], extent), reverse=True)[:2]
        return _Problem(
            dims=tuple(dims),
            room=tuple(room[dim] for dim in dims),
            sizes=sizes,
            kept=kept,
            kind=start.partial[0][1] if start.partial else None,
            start=(tuple(first[dim] for dim in dims), tuple(a for a in sizes if a in pending)),
            goal=(tuple(last[dim] for dim in dims), ()),
            slow=mesh.slow,
        )

    def layout(self, state: _State) -> TensorLayout:
        """Returns the layout that a state stands for."""
        splits, pending = state
        whole = {d: self.kept.axes(d) + axes for d, axes in zip(self.dims, splits, strict=True)}
        layout = TensorLayout.of({**dict(self.kept.splits), **whole}, dict(self.kept.partial))
        return layout.add_partial(pending, self.kind) if self.kind else layout

    def shortcut(self) -> list[_Step]:
        """Returns the chain where it is plain: one all_reduce, or slices; else an empty list."""
        splits, pending = self.start
        across = self.slow.intersection(pending)
        if splits == self.goal[0] and not (across and across != set(pending)):
            return [_Step("all_reduce", pending, {}, self.goal)]
        steps = []
        if not pending and not any(splits):
            for at, axes in enumerate(self.goal[0]):
                if axes:
                    splits = _put(splits, at, axes)
                    steps.append(_Step("slice", axes, {"dim": self.dims[at]}, (splits, ())))
        return steps

    def search(self) -> list[_Step]:
        """Returns the cheapest chain, by A*."""
        best: dict[_State, tuple[int, int, int]] = {self.start: (0, 0, 0)}
        came: dict[_State, tuple[_State, _Step]] = {}
        queue = [(self.missing(self.start), 0, 0, self.start)]
        done = set()
        while self.goal not in done:
            *_, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            wire, moves, collectives = best[state]
            for step in self.steps(state):
                if step.state in done or not self.fits(step.state[0]):
                    continue
                sent = wire + self.wire(step, state)
                cost = (sent, moves + 1, collectives + _COLLECTIVES.get(step.op, 1))
                if step.state not in best or cost < best[step.state]:
                    best[step.state] = cost
                    came[step.state] = state, step
                    bound = sent + self.missing(step.state)
                    heapq.heappush(queue, (bound, *cost[1:], step.state))
        chain: list[_Step] = []
        state = self.goal
        while state != self.start:
            state, step = came[state]
            chain.append(step)
        return chain[::-1]

    def steps(self, state: _State) -> Iterator[_Step]:
        """Yields every move from a state; those that need pads are among them."""
        splits, pending = state
        free = [a for a in self.sizes if a not in pending and not any(a in s for s in splits)]
        for at, (dim, held) in enumerate(zip(self.dims, splits, strict=True)):
            for axes in _selections(free):
                yield _Step("slice", axes, {"dim": dim}, (_put(splits, at, held + axes), pending))
            for axes in _selections(pending) if self.kind == "sum" else ():
                rest = tuple(axis for axis in pending if axis not in axes)
                there = _put(splits, at, held + axes)
                yield _Step("reduce_scatter", axes, {"dim": dim}, (there, rest))
            for cut in range(len(held)):
                axes, without = held[cut:], _put(splits, at, held[:cut])
                yield _Step("all_gather", axes, {"dim": dim}, (without, pending))
                for to, other in enumerate(self.dims):
                    if to != at:
                        there = _put(without, to, splits[to] + axes)
                        dims = {"concat": dim, "split": other}
                        yield _Step("all_to_all", axes, dims, (there, pending))
        for length in range(1, len(pending) + 1):
            for axes in combinations(pending, length):
                rest = tuple(axis for axis in pending if axis not in axes)
                yield _Step("all_reduce", axes, {}, (splits, rest))
        movable = tuple(axis for axis in self.sizes if axis not in pending)
        cuts = tuple(map(self.cuts, splits, self.room))
        for there in self.arrangements(cuts, movable):
            if there != splits:
                if list(map(self.proper, there)) == list(map(self.proper, splits)):
                    yield _Step("slice", (), {"dim": self.dims[0]}, (there, pending))
                else:
                    yield _Step("permute", (), {}, (there, pending))

    def arrangements(
        self, shards: tuple[tuple[int, ...], ...], axes: tuple[str, ...]
    ) -> Iterator[_Splits]:
        """Yields every way of splitting the dims over some of `axes` into such shards each."""
        if not shards:
            yield ()
            return
        room, held = self.room[-len(shards)], shards[0]
        for chosen in [(), *_selections(axes)]:
            if self.cuts(chosen, room) == held:
                rest = tuple(axis for axis in axes if axis not in chosen)
                for others in self.arrangements(shards[1:], rest):
                    yield (chosen, *others)

    def fits(self, splits: _Splits) -> bool:
        """Returns whether the splits divide the dims, apart from those with pads at an end."""
        return all(
            padded or room % self.shards(axes) == 0
            for room, axes, padded in zip(self.room, splits, self.padded, strict=True)
        )

    @cached_property
    def padded(self) -> tuple[bool, ...]:
        """Tells of each dim whether it has pads at one of the ends."""
        ends = zip(self.room, self.start[0], self.goal[0], strict=True)
        return tuple(
            any(room % self.shards(axes) for axes in (first, last)) for room, first, last in ends
        )

    def wire(self, step: _Step, state: _State) -> int:
        """Returns the wire bytes of a move, in units in which all costs are integers."""
        if step.op == "slice":
            return 0
        devices = 2 if step.op == "permute" else self.shards(step.axes)
        sent = round(wire_bytes(step.op, self.payload(step, state) * self.extent, devices))
        across = self.slow.intersection(step.axes or self.sizes)
        return sent * SLOWER if across else sent

    def payload(self, step: _Step, state: _State) -> int:
        """Returns the larger of local operand and result as sent, with all pads, in elements."""
        before, after = self.volume(state[0]), self.volume(step.state[0])
        devices = self.shards(step.axes)
        if step.op == "all_gather":
            return devices * before
        if step.op == "reduce_scatter":
            return devices * after
        if step.op == "all_to_all":
            at = self.dims.index(step.dims["split"])
            here, there = (self.block(at, splits[at]) for splits in (state[0], step.state[0]))
            return before // here * devices * there
        return max(before, after)

    def missing(self, state: _State) -> int:
        """Returns a lower bound on the wire bytes from a state to the goal, in the same units.

        No device sends less than some device must receive: the part of its goal block that it does
        not hold, or all of it as long as no value is complete. Blocks of a dim are nested where the
        axes of one begin with those of the other; otherwise some device holds nothing it needs.
        Where there are pads, what a device needs may be nothing but pads.
        """
        splits, pending = state
        if any(self.padded):
            return 0
        needed = self.extent * self.volume(self.goal[0])
        held = []
        for have, want in zip(splits, self.goal[0], strict=True):
            shorter, longer = sorted((self.proper(have), self.proper(want)), key=len)
            if longer[: len(shorter)] != shorter:
                return needed
            held.append(longer)
        if self.proper(pending):
            return needed
        return needed - self.extent * self.volume(tuple(held))

    def volume(self, splits: _Splits) -> int:
        """Returns the elements of a shard, along `dims`."""
        return math.prod(self.block(at, axes) for at, axes in enumerate(splits))

    def block(self, at: int, axes: tuple[str, ...]) -> int:
        """Returns the size of one dim in a shard."""
        return -(-self.room[at] // self.shards(axes))

    def cuts(self, axes: tuple[str, ...], room: int) -> tuple[int, ...]:
        """Returns what tells the shards of a dim; with pads, they depend on each cut."""
        shards = self.shards(axes)
        if room % shards == 0:
            return (shards,)
        return tuple([self.sizes[axis] for axis in self.proper(axes)])

    def shards(self, axes: tuple[str, ...]) -> int:
        return math.prod([self.sizes[axis] for axis in axes])

    def proper(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes that do split: those with a size above 1."""
        return tuple([axis for axis in axes if self.sizes[axis] > 1])

    @cached_property
    def extent(self) -> int:
        return math.prod(self.sizes.values())


def _prefix(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes with which both begin."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]


def _put(splits: _Splits, at: int, axes: tuple[str, ...]) -> _Splits:
    """Returns the splits with those of one dim replaced."""
    return (*splits[:at], axes, *splits[at + 1 :])


def _selections(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yields some or all of the axes, in every order."""
    for length in range(1, len(axes) + 1):
        yield from permutations(axes, length)
