"""Joint timetables: several stacks on the same stages, one after the other.

A model may have several stacks: an encoder and a decoder, or layers of two kinds. Each stage has
chunks of all of them. A microbatch goes through the first stack, then through the next one, and its
gradient back through all. So the *passes* of a microbatch are: forward through each stack, then
backward through each of them, in reverse.

Between two passes, and before the first and after the last one, is a *junction*: what is computed
of a microbatch between stacks. Junction j follows pass j; passes are numbered from 1, and junction
0 is what comes before the layers. The junction between forward and backward passes is the *head*:
loss and its gradient. The last junction is the *tail*: gradients of what comes before the layers.

Each stack keeps the order of its own timetable, and starts as many ticks later as its microbatches
need. In a tick, a stage does at most one chunk of each pass. Since a tick computes only the passes
that it has, stacks after one another wait no longer than one stack does: each pass is computed in
as many ticks as if its stack were alone.

`phases` are runs of ticks in which the same parts occur, each for one loop. `rows` has the numbers:
for each tick and stage, which chunk and microbatch, and in which buffers inputs, kept activations
and gradients are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np

from meshdsl.lowering.pipelines.actions import Action, backward, forward
from meshdsl.lowering.pipelines.buffers import assign
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.lowering.pipelining.timetable import Pass, Timetable

NONE = -1  # a buffer that nothing is written to

# What the rows of a stage say of each stack: which pass, if any, and where its tensors are kept.
OWN = (
    "forward",  # 1 if there is a forward pass
    "round",  # of the stage's chunks, the one of the forward pass
    "microbatch",
    "keep",  # the buffer to keep its activations in
    "first",  # 1 if it is the stack's first chunk, which reads what a junction computes
    "store_input",  # the buffer for the input that has just arrived, if it is not used at once
    "load_input",  # the buffer that the input waits in; NONE: it has just arrived
    "result",  # the buffer for what a chunk stacks beside what its backward pass reads
    "backward",  # 1 if there is a backward pass
    "backward_round",
    "backward_microbatch",
    "kept",  # the buffer with the activations
    "last",  # 1 if it is the stack's last chunk, whose gradient comes from a junction
    "store_gradient",
    "load_gradient",
)
# What is the same on all stages, of each junction.
SHARED = (
    "due",  # 1 if there is work
    "microbatch",
    "store",  # the buffer of what the next pass starts from, if that is not used at once
    "load",  # the buffer that the next pass reads, or NONE
)


@dataclass(frozen=True)
class Phase:
    """A run of ticks in which the same parts occur: [start, stop).

    Attributes:
        passes, junctions: the numbers of those that occur. Junction 0 is a part of pass 1, and the
            last one of the last pass.
    """

    start: int
    stop: int
    passes: tuple[int, ...]
    junctions: tuple[int, ...]

    @property
    def ticks(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Joint:
    """The timetables of stacks, in the order in which a microbatch goes through them."""

    stacks: tuple[Timetable, ...]

    @staticmethod
    def of(tables: Sequence[Timetable]) -> Joint:
        """Puts the timetables of stacks, each as if it were alone, one after the other."""
        before = 0
        forth: list[Timetable] = []
        for table in tables:
            forth.append(table.later(before, 0))
            before += max(table.forward_end(k) - table.forward_tick[0, k] for k in _every(table))
        # The last stack turns at once. Its own timetable says when it goes back.
        last = tables[-1]
        start = before - max(last.forward_end(k) - last.forward_tick[0, k] for k in _every(last))
        stacks: list[Timetable] = []
        for table, moved in zip(reversed(tables), reversed(forth), strict=True):
            stacks.insert(0, moved.later(0, start))
            chunks = table.chunks - 1
            start += max(
                table.backward_end(k) - table.backward_tick[chunks, k] for k in _every(table)
            )
        return Joint(tuple(stacks))._with_junctions()

    def _with_junctions(self) -> Joint:
        """Returns the timetables with the ticks in which each pass may start."""
        stacks = []
        for number, table in enumerate(self.stacks):
            forward_ready = {k: table.forward_tick[0, k] for k in _every(table)}
            backward_ready = {k: table.forward_end(k) for k in _every(table)}
            if number:
                before = self.stacks[number - 1]
                forward_ready = {k: before.forward_end(k) for k in _every(table)}
            if number + 1 < len(self.stacks):
                after = self.stacks[number + 1]
                backward_ready = {k: after.backward_end(k) for k in _every(table)}
            stacks.append(
                replace(table, forward_ready=forward_ready, backward_ready=backward_ready)
            )
        return Joint(tuple(stacks))

    @property
    def count(self) -> int:
        """How many stacks there are: the number of the last forward pass, and of the head."""
        return len(self.stacks)

    @property
    def passes(self) -> range:
        return range(1, 2 * self.count + 1)

    @property
    def microbatches(self) -> int:
        return self.stacks[0].microbatches

    def stack_of(self, number: int) -> int:
        """Returns which stack a pass goes through."""
        return number - 1 if number <= self.count else 2 * self.count - number

    def ticks_of(self, number: int) -> Mapping[Pass, int]:
        """Returns the ticks of a pass, by (chunk, microbatch)."""
        table = self.stacks[self.stack_of(number)]
        return table.forward_tick if number <= self.count else table.backward_tick

    def end(self, number: int, microbatch: int) -> int:
        """Returns the tick in which a microbatch has left a pass: that of the junction after it."""
        table = self.stacks[self.stack_of(number)]
        return (table.forward_end if number <= self.count else table.backward_end)(microbatch)

    @cached_property
    def ticks(self) -> int:
        """How many ticks there are."""
        return max(table.ticks for table in self.stacks)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The loops, in order."""
        passes = {n: _span(self.ticks_of(n).values()) for n in self.passes}
        middle = [n for n in self.passes if n < 2 * self.count]
        ends = {n: _span([self.end(n, k) for k in range(self.microbatches)]) for n in middle}

        def present(tick: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
            # A loop goes on through ticks in which one of its parts has nothing to do.
            among = [
                tuple(n for n, (a, b) in each.items() if a <= tick <= b) for each in (passes, ends)
            ]
            return among[0], among[1]

        phases, start = [], 0
        for parts, run in groupby(present(tick) for tick in range(self.ticks)):
            stop = start + len(list(run))
            phases.append(Phase(start, stop, *parts))
            start = stop
        return tuple(phases)

    def schedule(self) -> Schedule:
        """Returns the table of actions; chunks are numbered through all stacks.

        Each tick has one column for each pass of its phase.
        """
        stages, before = self.stacks[0].stages, [0]
        for table in self.stacks:
            before.append(before[-1] + table.chunks)
        done = {
            (number, tick, chunk % stages): (before[self.stack_of(number)] + chunk, k)
            for number in self.passes
            for (chunk, k), tick in self.ticks_of(number).items()
        }
        cells: list[list[Action | None]] = [[] for _ in range(stages)]
        for phase in self.phases:
            for tick in range(phase.start, phase.stop):
                for number in phase.passes:
                    make = forward if number <= self.count else backward
                    for stage in range(stages):
                        key = done.get((number, tick, stage))
                        cells[stage].append(None if key is None else make(*key))
        return Schedule.of(cells, self.stacks[0].name)

    def buffers(self, number: int, last: Mapping[int, int]) -> tuple[np.ndarray, int]:
        """Returns where what a microbatch has left in a pass is kept; and how many buffers.

        Args:
            last: by microbatch, the last tick in which it is read.
        """
        spans = {k: (self.end(number, k), last[k]) for k in range(self.microbatches)}
        buffers = assign(spans)
        slots = np.array([buffers[k] for k in range(self.microbatches)], np.int32)
        return slots, 1 + int(slots.max())

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers: s32[tick, stage, field] of stages, s32[tick, field] of junctions.

        Where there is no work, numbers are in range and mean nothing; buffers are `NONE`.
        """
        junctions = 2 * self.count + 1
        own = np.zeros((self.ticks, self.stacks[0].stages, self.count * len(OWN)), np.int32)
        shared = np.zeros((self.ticks, junctions * len(SHARED)), np.int32)
        for number, table in enumerate(self.stacks):
            _Rows(table, own[:, :, number * len(OWN) : (number + 1) * len(OWN)]).write()
        for number in range(junctions):
            self._share(number, shared[:, number * len(SHARED) : (number + 1) * len(SHARED)])
        return own, shared

    def _share(self, number: int, row: np.ndarray) -> None:
        """Writes the columns of a junction."""
        due, microbatch, store, load = range(len(SHARED))
        row[:, [store, load]] = NONE
        buffers: Mapping[int, int] = {}
        if number < 2 * self.count:
            table = self.stacks[self.stack_of(number + 1)]
            forth = number < self.count
            buffers = (table.waiting_starts if forth else table.waiting_loss_gradients)[0]
            start = 0 if forth else table.chunks - 1
        for k in range(self.microbatches):
            tick = self.ticks_of(1)[0, k] if number == 0 else self.end(number, k)
            row[tick, due], row[tick, microbatch] = 1, k
            if k in buffers:
                row[tick, store] = buffers[k]
                row[self.ticks_of(number + 1)[start, k], load] = buffers[k]


@dataclass(frozen=True)
class _Rows:
    """Writes the columns of a stack."""

    table: Timetable
    own: np.ndarray

    def write(self) -> None:
        buffers = [n for n in OWN if n.startswith(("store_", "load_"))] + ["keep", "result"]
        self.own[:, :, [OWN.index(name) for name in buffers]] = NONE
        for key in self.table.passes:
            self._pass(key)

    def _pass(self, key: Pass) -> None:
        (chunk, k), table = key, self.table
        turn, stage = divmod(chunk, table.stages)
        forth, back = table.forward_tick[key], table.backward_tick[key]

        def put(tick: int, **fields: int) -> None:
            for name, value in fields.items():
                self.own[tick, stage, OWN.index(name)] = value

        buffer = table.kept[0][stage][key]
        put(forth, forward=1, round=turn, microbatch=k, keep=buffer, first=chunk == 0)
        put(forth, result=k * table.rounds + turn)
        put(back, backward=1, backward_round=turn, backward_microbatch=k)
        put(back, last=chunk == table.chunks - 1, kept=buffer)
        if key in (inputs := table.waiting_inputs[0][stage]):
            put(table.forward_tick[chunk - 1, k] + 1, store_input=inputs[key])
            put(forth, load_input=inputs[key])
        if key in (gradients := table.waiting_gradients[0][stage]):
            put(table.backward_tick[chunk + 1, k] + 1, store_gradient=gradients[key])
            put(back, load_gradient=gradients[key])


def _every(table: Timetable) -> range:
    return range(table.microbatches)


def _span(ticks: Iterable[int]) -> tuple[int, int]:
    known = list(ticks)
    return min(known), max(known)
