"""The search for the cheapest chain of moves between two layouts of a tensor; see `reshard`.

The search is A* over layouts. To stay small it never moves

- an axis that neither layout uses;
- an axis that is partial in both, or that splits a dim in both at the same place (before the dim's
  axes begin to differ);
- a dim split alike in both, except two such dims that may get axes on the way.

Costs are compared as exact integers, so equal costs compare equal whatever the sizes.
"""

from __future__ import annotations

import heapq
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import chain, combinations, permutations
from typing import Any, NamedTuple, TypeAlias

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.prices import LinkPrices
from meshdsl.layouts.tensor_layout import Kind, TensorLayout
from meshdsl.lowering.program import wire_bytes
from meshdsl.tensors.dims import Shape

# What a byte on a slow axis counts: about the ratio of a chip's links to its share of the network.
SLOWER = 16

Splits: TypeAlias = tuple[tuple[str, ...], ...]
State: TypeAlias = tuple[Splits, tuple[str, ...]]
_Cost: TypeAlias = tuple[int, int, int]  # wire, moves, collectives
_COLLECTIVES = {"slice": 0, "permute": 2}


class Step(NamedTuple):
    """A move of a `Problem`, and the state it leads to; `at` are indices of the problem's dims."""

    op: str
    axes: tuple[str, ...]
    at: tuple[int, ...]
    state: State


@dataclass(frozen=True, eq=False)
class Problem:
    """What differs between two layouts of a tensor.

    Layouts whose dims have the same numbers of shards form a class: a permute leads from each of
    them to each other one, at the same cost.

    A state lists, for each of `dims`, its axes beyond those of `kept`; and the axes yet to reduce.

    Attributes:
        dims: the dims that a chain may split.
        room: the size of each of them in the shard of `kept`.
        sizes: the axes that a chain may use, in mesh order.
        kept: the splits and partial axes that both layouts, and all between them, have in common.
        kind: the kind of the partial axes, if there are any.
        start, goal: the states of the two layouts.
        slow: the slow axes of the mesh.
        prices: what moves cost, if not their bytes. The search compares what bytes cost, and no
            latencies: so all problems that differ in scale have the same chain.
    """

    dims: tuple[str, ...]
    room: tuple[int, ...]
    sizes: dict[str, int]
    kept: TensorLayout
    kind: Kind | None
    start: State
    goal: State
    slow: frozenset[str] = frozenset()
    prices: LinkPrices | None = None
    known_shards: dict[tuple[str, ...], int] = field(default_factory=dict)
    known_choices: dict[Any, dict[tuple[int, ...], list[tuple[str, ...]]]] = field(
        default_factory=dict
    )

    @staticmethod
    def between(shape: Shape, start: TensorLayout, goal: TensorLayout, mesh: Mesh) -> Problem:
        """Returns the problem of two layouts: sets aside what they have in common."""
        shared = {dim: _prefix(start.axes(dim), goal.axes(dim)) for dim in shape.names}
        first = {dim: start.axes(dim)[len(shared[dim]) :] for dim in shape.names}
        last = {dim: goal.axes(dim)[len(shared[dim]) :] for dim in shape.names}
        pending = set(start.partial_axes) - set(goal.partial_axes)
        used = pending.union(*first.values(), *last.values())
        sizes = {axis: size for axis, size in mesh.axes if axis in used}
        common = TensorLayout.of(shared, dict(goal.partial))
        room = dict(zip(shape.names, common.local(shape, mesh).sizes, strict=True))

        dims = [dim for dim in shape.names if first[dim] or last[dim]]
        idle = [dim for dim in shape.names if dim not in dims]
        extent = math.prod(sizes.values())
        dims += sorted(idle, key=lambda dim: math.gcd(room[dim], extent), reverse=True)[:2]
        return Problem(
            dims=tuple(dims),
            room=tuple(room[dim] for dim in dims),
            sizes=sizes,
            kept=common,
            kind=start.partial[0][1] if start.partial else None,
            start=(tuple(first[dim] for dim in dims), tuple(a for a in sizes if a in pending)),
            goal=(tuple(last[dim] for dim in dims), ()),
            slow=mesh.slow,
            prices=mesh.prices,
        )

    def layout(self, state: State) -> TensorLayout:
        """Returns the layout that a state stands for."""
        splits, pending = state
        splits_of_dims = {
            d: self.kept.axes(d) + axes for d, axes in zip(self.dims, splits, strict=True)
        }
        layout = TensorLayout.of(
            {**dict(self.kept.splits), **splits_of_dims}, dict(self.kept.partial)
        )
        return layout.add_partial(pending, self.kind) if self.kind else layout

    def shortcut(self) -> list[Step]:
        """Returns the chain if it is one all_reduce or only slices; else an empty list."""
        splits, pending = self.start
        across = self.slow.intersection(pending)
        if splits == self.goal[0] and not (across and across != set(pending)):
            return [Step("all_reduce", pending, (), self.goal)]
        steps = []
        if not pending and not any(splits):
            for at, axes in enumerate(self.goal[0]):
                if axes:
                    splits = _put(splits, at, axes)
                    steps.append(Step("slice", axes, (at,), (splits, ())))
        return steps

    def named(self, step: Step) -> dict[str, str]:
        """Returns the dims among the params of a step."""
        names = ("concat", "split") if step.op == "all_to_all" else ("dim",)
        return {name: self.dims[at] for name, at in zip(names, step.at, strict=False)}

    def cheapest(self) -> tuple[Step, ...]:
        """Returns the cheapest chain, searched once for all problems that differ in scale."""
        # Without pads only the common divisors of a dim and the axes matter: all costs are
        # proportional to the rest.
        room = tuple(
            size if padded else math.gcd(size, self.extent)
            for size, padded in zip(self.room, self.padded, strict=True)
        )
        sizes = tuple(self.sizes.items())
        sums = self.kind == "sum"
        return _searched(room, sizes, sums, self.start, self.goal, self.slow, self.prices)

    def chains(self) -> list[Sequence[Step]]:
        """Returns the chains to choose from: that of least bytes, and what may take less time.

        These are the chain whose bytes cost least, and a single all_reduce, whose latency is one.
        """
        plain = self if self.prices is None else replace(self, prices=None)
        found: list[Sequence[Step]] = [plain.shortcut() or plain.cheapest()]
        (least,) = found
        moves = sum(step.op != "slice" for step in least)
        if self.prices is None or not moves or (moves == 1 and len(self.proper(self.axes)) == 1):
            return found
        splits, pending = self.start
        if splits == self.goal[0]:
            found.append([Step("all_reduce", pending, (), self.goal)])
        return [*found, self.cheapest()]

    def search(self) -> list[Step]:
        """Returns the cheapest chain, by A*."""
        best: dict[State, _Cost] = {self.start: (0, 0, 0)}
        came: dict[State, tuple[State, Step]] = {}
        queue = [(self.missing(self.start), 0, 0, self.start)]
        done: set[State] = set()
        permuted: dict[object, _Cost] = {}
        limit = math.inf  # what a known chain sends: dearer ones are not looked at
        while self.goal not in done:
            *_, state = heapq.heappop(queue)
            if state in done:
                continue
            done.add(state)
            wire, moves, collectives = cost = best[state]
            steps = self.steps(state)
            # Where a member of its class was reached at no more, permutes from there are as good.
            alike = self.alike(state)
            if alike not in permuted or cost < permuted[alike]:
                permuted[alike] = cost
                steps = chain(steps, self.permutes(state))
            for sent, step in steps:
                there = step.state
                if wire + sent > limit or there in done:
                    continue
                cost = (wire + sent, moves + 1, collectives + _COLLECTIVES.get(step.op, 1))
                if there in best and cost >= best[there]:
                    continue
                bound = cost[0] + self.missing(there)
                if bound > limit:
                    continue
                if there == self.goal:
                    limit = cost[0]
                best[there] = cost
                came[there] = state, step
                heapq.heappush(queue, (bound, *cost[1:], there))
        steps_back: list[Step] = []
        state = self.goal
        while state != self.start:
            state, step = came[state]
            steps_back.append(step)
        return steps_back[::-1]

    def steps(self, state: State) -> Iterator[tuple[int, Step]]:
        """Yields every move from a state but permutes, with its wire bytes."""
        splits, pending = state
        volume = self.volume(splits)
        free = tuple(
            [a for a in self.sizes if a not in pending and not any(a in s for s in splits)]
        )
        scattered = _selections(pending) if self.kind == "sum" else ()
        for at, axes_of_dim in enumerate(splits):
            rest = volume // self.block(at, axes_of_dim)
            for axes in _selections(free):
                if self.fits(at, axes_of_dim + axes):
                    there = (_put(splits, at, axes_of_dim + axes), pending)
                    yield 0, Step("slice", axes, (at,), there)
            for axes in scattered:
                if self.fits(at, axes_of_dim + axes):
                    there = (_put(splits, at, axes_of_dim + axes), _without(pending, axes))
                    payload = self.shards(axes) * rest * self.block(at, axes_of_dim + axes)
                    sent = self.wire("reduce_scatter", axes, payload)
                    yield sent, Step("reduce_scatter", axes, (at,), there)
            for cut in range(len(axes_of_dim)):
                axes, left = axes_of_dim[cut:], axes_of_dim[:cut]
                if not self.fits(at, left):
                    continue
                without = _put(splits, at, left)
                sent = self.wire("all_gather", axes, self.shards(axes) * volume)
                yield sent, Step("all_gather", axes, (at,), (without, pending))
                for to in range(len(splits)):
                    if to == at or not self.fits(to, splits[to] + axes):
                        continue
                    after = splits[to] + axes
                    others = volume // self.block(to, splits[to])
                    payload = others * self.shards(axes) * self.block(to, after)
                    there = (_put(without, to, after), pending)
                    sent = self.wire("all_to_all", axes, payload)
                    yield sent, Step("all_to_all", axes, (at, to), there)
        for length in range(1, len(pending) + 1):
            for axes in combinations(pending, length):
                there = (splits, _without(pending, axes))
                yield self.wire("all_reduce", axes, volume), Step("all_reduce", axes, (), there)

    def permutes(self, state: State) -> Iterator[tuple[int, Step]]:
        """Yields every permute from a state; a slice where only axes of size 1 change place."""
        splits, pending = state
        proper = [self.proper(axes) for axes in splits]
        movable = tuple([axis for axis in self.sizes if axis not in pending])
        sent = self.wire("permute", (), self.volume(splits))
        for there in self.arrangements(self.cut(splits), movable):
            if there != splits:
                if [self.proper(axes) for axes in there] == proper:
                    yield 0, Step("slice", (), (0,), (there, pending))
                else:
                    yield sent, Step("permute", (), (), (there, pending))

    def alike(self, state: State) -> object:
        """Returns a key that is equal for states with the same permutes at the same cost."""
        splits, pending = state
        # Between layouts that differ in axes of size 1 only, a slice moves nothing.
        places = tuple([self.proper(axes) for axes in splits]) if self.idle else ()
        return self.cut(splits), pending, places

    def arrangements(
        self, shards: tuple[tuple[int, ...], ...], axes: tuple[str, ...]
    ) -> Iterator[Splits]:
        """Yields every way of splitting the dims over some of `axes` into `shards`."""
        if not shards:
            yield ()
            return
        for chosen in self.choices(self.room[-len(shards)], shards[0], axes):
            rest = _without(axes, chosen)
            for others in self.arrangements(shards[1:], rest):
                yield (chosen, *others)

    def choices(
        self, room: int, shards: tuple[int, ...], axes: tuple[str, ...]
    ) -> Sequence[tuple[str, ...]]:
        """Returns the selections of some axes that split a dim into `shards`."""
        if (room, axes) not in self.known_choices:
            by_shards: dict[tuple[int, ...], list[tuple[str, ...]]] = {}
            for chosen in ((), *_selections(axes)):
                by_shards.setdefault(self.cuts(chosen, room), []).append(chosen)
            self.known_choices[room, axes] = by_shards
        return self.known_choices[room, axes].get(shards, ())

    def cut(self, splits: Splits) -> tuple[tuple[int, ...], ...]:
        return tuple([self.cuts(axes, room) for axes, room in zip(splits, self.room, strict=True)])

    def fits(self, at: int, axes: tuple[str, ...]) -> bool:
        """Returns whether axes divide a dim, or the dim has pads in one of the two layouts."""
        return self.padded[at] or self.room[at] % self.shards(axes) == 0

    @cached_property
    def padded(self) -> tuple[bool, ...]:
        """For each dim: whether it has pads in one of the two layouts."""
        rooms = zip(self.room, self.start[0], self.goal[0], strict=True)
        return tuple(
            any(room % self.shards(axes) for axes in (first, last)) for room, first, last in rooms
        )

    def wire(self, op: str, axes: tuple[str, ...], payload: int) -> int:
        """Returns the wire bytes of a move, in units in which all costs are integers."""
        devices = 2 if op == "permute" else self.shards(axes)
        sent = round(wire_bytes(op, payload * self.extent, devices))
        if self.prices is not None:
            return sent * self.prices.price(op, axes or self.sizes).parts
        across = not self.slow.isdisjoint(axes) if axes else self.is_across
        return sent * SLOWER if across else sent

    def payload(self, step: Step, state: State) -> int:
        """Returns the larger of local operand and result, in elements, with all pads."""
        before, after = self.volume(state[0]), self.volume(step.state[0])
        devices = self.shards(step.axes)
        if step.op == "all_gather":
            return devices * before
        if step.op == "reduce_scatter":
            return devices * after
        if step.op == "all_to_all":
            at = step.at[1]
            here, there = (self.block(at, splits[at]) for splits in (state[0], step.state[0]))
            return before // here * devices * there
        return max(before, after)

    def missing(self, state: State) -> int:
        """Returns a lower bound on the cost from a state to the goal, in the same units.

        With prices it is the least number of bytes, at the lowest price of all.
        """
        if self.prices is not None:
            return self.missing_bytes(state, 0) * self.lowest
        if not self.is_across:
            return self.missing_bytes(state, 0)
        slow = (SLOWER - 1) * self.crossing(state)
        bound = self.missing_bytes(state, slow)
        if any(self.padded):
            return bound
        # A chain either permutes, across the slow axes too, or moves axes to each dim by itself.
        return max(bound, min(self.landing(state[0]) + slow, SLOWER * self.least))

    def missing_bytes(self, state: State, slow: int) -> int:
        """Returns a lower bound on the wire bytes from a state to the goal.

        First bound: a device sends at least as much as some device must receive. That is the part
        of its goal block that it does not own, or all of the block while values are partial. Blocks
        of a dim are nested if the axes of one layout begin with those of the other; otherwise some
        device owns nothing that it needs. With pads, a device may need pads only; but the first
        device along all axes needs data, since its blocks begin at 0 in every layout.

        Second bound: the largest number of bytes is at least the average. An element in p partial
        sums is sent p - 1 times until it is complete, and once more to each further device that
        needs it. The same bound holds for bytes across slow axes, between groups of devices.

        Args:
            slow: what bytes across slow axes count more than others.
        """
        splits, pending = state
        needed = self.needed
        if self.proper(pending):
            copies = self.extent // math.prod(map(self.shards, self.goal[0]))
            sent = self.least * (self.shards(pending) + copies - 2)
            return max(needed, sent) + slow
        needed += slow
        if any(self.padded):
            pairs = zip(splits, self.goal[0], strict=True)
            blocks = [min(self.block(n, a), self.block(n, b)) for n, (a, b) in enumerate(pairs)]
            return needed - self.extent * math.prod(blocks)
        nested = []
        for have, want in zip(splits, self.goal[0], strict=True):
            shorter, longer = sorted((self.proper(have), self.proper(want)), key=len)
            if longer[: len(shorter)] != shorter:
                return needed
            nested.append(longer)
        return needed - self.extent * self.volume(tuple(nested))

    def landing(self, splits: Splits) -> int:
        """Returns a lower bound on the bytes of a chain without permutes, where no dim has pads.

        A dim whose goal has an axis that splits another dim gets it by a move to this dim alone, or
        after a gather, which sends no less. That sends all but one part of a block, and no block is
        smaller than where all axes split.
        """
        place = {axis: at for at, axes in enumerate(splits) for axis in axes}
        sent = 0
        for at, axes in enumerate(self.goal[0]):
            parts = max([self.sizes[axis] for axis in axes if place.get(axis, at) != at], default=1)
            sent += self.least * (parts - 1) // parts
        return sent

    def crossing(self, state: State) -> int:
        """Returns a lower bound on the bytes across slow axes, not weighed by `SLOWER`.

        The devices at one position along a single slow axis must receive what they need together
        and do not own together. With several slow axes, or pads, only amounts are compared.
        """
        splits, pending = state
        slow = [axis for axis in self.sizes if axis in self.slow]
        if len(slow) == 1 and not any(self.padded):
            (axis,) = slow
            here, there = self.digit(axis, splits), self.digit(axis, self.goal[0])
            if here and there:
                same, parts = _agreement(here, there, self.sizes[axis])
                return self.least - self.least * same // parts
        sums = self._across(pending)
        owned = math.prod([self.sizes[axis] for axis in slow]) // sums
        wanted = owned * sums
        for have, want in zip(splits, self.goal[0], strict=True):
            owned //= self._across(have)
            wanted //= self._across(want)
        sent = sums + wanted - 2 if sums > 1 else max(0, wanted - owned)
        return self.least * sent

    def digit(self, axis: str, splits: Splits) -> tuple[int, int] | None:
        """Returns the dim that an axis splits, and into how many parts the axes before it do."""
        for at, axes in enumerate(splits):
            if axis in axes:
                return at, self.shards(axes[: axes.index(axis)])
        return None

    def _across(self, axes: tuple[str, ...]) -> int:
        """Returns the number of device groups that the slow ones of some axes separate."""
        return self.shards(tuple([axis for axis in axes if axis in self.slow]))

    def volume(self, splits: Splits) -> int:
        """Returns the elements of a shard, along `dims`."""
        return math.prod([self.block(at, axes) for at, axes in enumerate(splits)])

    def block(self, at: int, axes: tuple[str, ...]) -> int:
        """Returns the size of one dim in a shard."""
        return -(-self.room[at] // self.shards(axes))

    def cuts(self, axes: tuple[str, ...], room: int) -> tuple[int, ...]:
        """Returns a key of a dim's shards: their number; with pads, the size of each axis."""
        shards = self.shards(axes)
        if room % shards == 0:
            return (shards,)
        return tuple([self.sizes[axis] for axis in self.proper(axes)])

    def shards(self, axes: tuple[str, ...]) -> int:
        known = self.known_shards.get(axes)
        if known is None:
            known = self.known_shards[axes] = math.prod([self.sizes[axis] for axis in axes])
        return known

    def proper(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the axes of a size above 1."""
        return tuple([axis for axis in axes if self.sizes[axis] > 1]) if self.idle else axes

    @cached_property
    def needed(self) -> int:
        """The elements that all devices together need in the goal."""
        return self.extent * self.volume(self.goal[0])

    @cached_property
    def least(self) -> int:
        """The elements of all shards together where all axes split, so that none has a copy."""
        return math.prod(self.room)

    @cached_property
    def is_across(self) -> bool:
        """Whether a chain may use slow axes."""
        return not self.slow.isdisjoint(self.sizes)

    @cached_property
    def idle(self) -> bool:
        """Whether some axes have size 1."""
        return 1 in self.sizes.values()

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that a chain may use."""
        return tuple(self.sizes)

    @cached_property
    def lowest(self) -> int:
        """The lowest price of a byte."""
        return 1 if self.prices is None else self.prices.lowest(self.sizes)

    @cached_property
    def extent(self) -> int:
        return math.prod(self.sizes.values())


@lru_cache(maxsize=1 << 14)
def _searched(
    room: tuple[int, ...],
    sizes: tuple[tuple[str, int], ...],
    sums: bool,
    start: State,
    goal: State,
    slow: frozenset[str],
    prices: LinkPrices | None,
) -> tuple[Step, ...]:
    kind: Kind = "sum" if sums else "max"
    names = tuple(map(str, range(len(room))))
    problem = Problem(names, room, dict(sizes), TensorLayout(), kind, start, goal, slow, prices)
    return tuple(problem.search())


def _prefix(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the axes with which both begin."""
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return first[:same]


@lru_cache(maxsize=1 << 10)
def _agreement(here: tuple[int, int], there: tuple[int, int], size: int) -> tuple[int, int]:
    """Returns how many positions, of how many, have the same index along an axis in two layouts.

    Args:
        here, there: as `Problem.digit` returns them.
        size: that of the axis.
    """
    if here[0] != there[0]:
        return 1, size
    parts = math.lcm(here[1] * size, there[1] * size)
    before, after = (
        [n * at * size // parts % size for n in range(parts)] for _, at in (here, there)
    )
    return sum(map(operator.eq, before, after)), parts


def _without(axes: tuple[str, ...], gone: tuple[str, ...]) -> tuple[str, ...]:
    return tuple([axis for axis in axes if axis not in gone])


def _put(splits: Splits, at: int, axes: tuple[str, ...]) -> Splits:
    """Returns the splits with those of one dim replaced."""
    return (*splits[:at], axes, *splits[at + 1 :])


@lru_cache(maxsize=1 << 10)
def _selections(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Returns some or all of the axes, in every order."""
    lengths = range(1, len(axes) + 1)
    return tuple([chosen for length in lengths for chosen in permutations(axes, length)])
