"""Joint timetables: the ticks of several stacks on the same stages.

A model may have several stacks, such as an encoder and a decoder. Each stage has chunks of all of
them. A microbatch goes forward through the stacks in order, and then backward in the reverse order.
So a microbatch has two *passes* per stack. Passes are numbered from 1.

A *junction* has the operations of a microbatch between two passes. Junction j follows pass j.
Junction 0 has the operations before the first pass. The *head* is the junction between the forward
and the backward passes: it computes the loss and its gradient. The *tail* is the last junction: it
computes the gradients of the operations before the layers.

Each stack keeps the order of its own timetable. It starts later by the number of ticks that its
microbatches need to arrive. In a tick, a stage does at most one chunk of each pass. A tick computes
the passes of its phase only. So each pass takes as many ticks as if its stack were alone.

`phases` divides the ticks into runs with the same passes and junctions; each phase becomes a loop.
`rows` has the numbers of each tick and stage: chunk, microbatch, and the buffers of inputs,
activations and gradients.
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

NONE = -1  # the number of no buffer: nothing is written, and no tensor waits

# The columns of each stack in the rows of a stage: the passes of the tick, and their buffers.
OWN = (
    "forward",  # 1 if there is a forward pass
    "round",  # the round of the chunk of the forward pass
    "microbatch",
    "keep",  # the buffer for its activations
    "first",  # 1 if it is the first chunk of the stack, which reads results of a junction
    "store_input",  # the buffer for the input that arrives in this tick, if it has to wait
    "store_turned_input",  # of a round that goes through the stages in reverse; see `timetable`
    "load_input",  # the buffer of the input; NONE if it arrives in this tick
    "result",  # the buffer for stacked tensors that the backward pass does not read
    "backward",  # 1 if there is a backward pass
    "backward_round",
    "backward_microbatch",
    "kept",  # the buffer of the activations
    "last",  # 1 if it is the last chunk of the stack, which reads gradients of a junction
    "store_gradient",
    "store_turned_gradient",
    "load_gradient",
)
# The columns of each junction, which are the same on all stages.
SHARED = (
    "due",  # 1 if there is work
    "microbatch",
    "store",  # the buffer for the operands of the next pass, if they have to wait
    "load",  # the buffer of the operands of the next pass; NONE if they are from this tick
)


@dataclass(frozen=True)
class Phase:
    """A run of ticks with the same passes and junctions: [start, stop).

    Attributes:
        passes: the numbers of the passes.
        junctions: the numbers of the junctions, without the first and the last one. The first
            junction occurs with pass 1, and the last junction with the last pass.
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
    """The timetables of the stacks of a model, in the order of the model."""

    stacks: tuple[Timetable, ...]

    @staticmethod
    def of(tables: Sequence[Timetable]) -> Joint:
        """Returns the joint timetable of stacks whose own timetables all start at tick 0."""
        start = 0
        delayed: list[Timetable] = []
        for table in tables:
            delayed.append(table.later(start, 0))
            start += max(table.forward_end(k) - table.forward_tick[0, k] for k in _every(table))
        # The backward passes of the last stack are as late as its forward passes.
        last = tables[-1]
        start -= max(last.forward_end(k) - last.forward_tick[0, k] for k in _every(last))
        stacks: list[Timetable] = []
        for table, moved in zip(reversed(tables), reversed(delayed), strict=True):
            stacks.insert(0, moved.later(0, start))
            last_chunk = table.chunks - 1
            start += max(
                table.backward_end(k) - table.backward_tick[last_chunk, k] for k in _every(table)
            )
        return Joint(tuple(stacks))._with_junctions()

    def _with_junctions(self) -> Joint:
        """Returns the timetables with the ticks in which junctions compute operands of passes."""
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
        """The number of stacks. The last forward pass and the head also have this number."""
        return len(self.stacks)

    @property
    def passes(self) -> range:
        return range(1, 2 * self.count + 1)

    @property
    def microbatches(self) -> int:
        return self.stacks[0].microbatches

    def stack_of(self, number: int) -> int:
        """Returns the number of the stack of a pass."""
        return number - 1 if number <= self.count else 2 * self.count - number

    def ticks_of(self, number: int) -> Mapping[Pass, int]:
        """Returns the tick of each (chunk, microbatch) of a pass."""
        table = self.stacks[self.stack_of(number)]
        return table.forward_tick if number <= self.count else table.backward_tick

    def end(self, number: int, microbatch: int) -> int:
        """Returns the tick of the last chunk of a pass, and of the junction after the pass."""
        table = self.stacks[self.stack_of(number)]
        return (table.forward_end if number <= self.count else table.backward_end)(microbatch)

    @cached_property
    def ticks(self) -> int:
        """The number of ticks."""
        return max(table.ticks for table in self.stacks)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases, in order."""
        passes = {n: _span(self.ticks_of(n).values()) for n in self.passes}
        junctions = {
            n: _span([self.end(n, k) for k in range(self.microbatches)])
            for n in self.passes
            if n < 2 * self.count
        }

        def present(spans: Mapping[int, tuple[int, int]], tick: int) -> tuple[int, ...]:
            # A part is present from its first to its last tick, also in ticks without work.
            return tuple(n for n, (first, last) in spans.items() if first <= tick <= last)

        parts = [(present(passes, t), present(junctions, t)) for t in range(self.ticks)]
        phases, start = [], 0
        for (in_passes, in_junctions), run in groupby(parts):
            stop = start + len(list(run))
            phases.append(Phase(start, stop, in_passes, in_junctions))
            start = stop
        return tuple(phases)

    def schedule(self) -> Schedule:
        """Returns the table of actions. Chunks of all stacks have consecutive numbers.

        Each tick has one column for each pass of its phase.
        """
        stages, before = self.stacks[0].stages, [0]
        for table in self.stacks:
            before.append(before[-1] + table.chunks)
        done = {
            (number, tick, self.stacks[self.stack_of(number)].placement[chunk]): (
                before[self.stack_of(number)] + chunk,
                k,
            )
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
        """Returns the buffer of the results of a pass for each microbatch; and their number.

        Args:
            number: the number of the pass.
            last: the last tick that reads the results, by microbatch.
        """
        spans = {k: (self.end(number, k), last[k]) for k in range(self.microbatches)}
        buffers = assign(spans)
        slots = np.array([buffers[k] for k in range(self.microbatches)], np.int32)
        return slots, 1 + int(slots.max())

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The tables: s32[tick, stage, field] of stages, s32[tick, field] of junctions.

        Without work, buffers are `NONE`, and other numbers are arbitrary, but in range.
        """
        junctions = 2 * self.count + 1
        own = np.zeros((self.ticks, self.stacks[0].stages, self.count * len(OWN)), np.int32)
        shared = np.zeros((self.ticks, junctions * len(SHARED)), np.int32)
        for number, table in enumerate(self.stacks):
            _Rows(table, own[:, :, number * len(OWN) : (number + 1) * len(OWN)]).write()
        for number in range(junctions):
            self._write_junction(
                number, shared[:, number * len(SHARED) : (number + 1) * len(SHARED)]
            )
        return own, shared

    def _write_junction(self, number: int, row: np.ndarray) -> None:
        """Writes the columns of a junction."""
        due, microbatch, store, load = range(len(SHARED))
        row[:, [store, load]] = NONE
        buffers: Mapping[int, int] = {}
        if number < 2 * self.count:
            table = self.stacks[self.stack_of(number + 1)]
            is_forward = number < self.count
            buffers = (table.waiting_starts if is_forward else table.waiting_loss_gradients)[0]
            start = 0 if is_forward else table.chunks - 1
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
            self._write_pass(key)

    def _write_pass(self, key: Pass) -> None:
        (chunk, k), table = key, self.table
        turn, stage = chunk // table.stages, table.placement[chunk]
        turned = "turned_" if table.turns and turn % 2 else ""
        forward_tick, backward_tick = table.forward_tick[key], table.backward_tick[key]

        def put(tick: int, **fields: int) -> None:
            for name, value in fields.items():
                self.own[tick, stage, OWN.index(name)] = value

        buffer = table.kept[0][stage][key]
        put(forward_tick, forward=1, round=turn, microbatch=k, keep=buffer, first=chunk == 0)
        put(forward_tick, result=k * table.rounds + turn)
        put(backward_tick, backward=1, backward_round=turn, backward_microbatch=k)
        put(backward_tick, last=chunk == table.chunks - 1, kept=buffer)
        if key in (inputs := table.waiting_inputs[0][stage]):
            put(table.forward_tick[chunk - 1, k] + 1, **{f"store_{turned}input": inputs[key]})
            put(forward_tick, load_input=inputs[key])
        if key in (gradients := table.waiting_gradients[0][stage]):
            arrives = table.backward_tick[chunk + 1, k] + 1
            put(arrives, **{f"store_{turned}gradient": gradients[key]})
            put(backward_tick, load_gradient=gradients[key])


def _every(table: Timetable) -> range:
    return range(table.microbatches)


def _span(ticks: Iterable[int]) -> tuple[int, int]:
    every = list(ticks)
    return min(every), max(every)
