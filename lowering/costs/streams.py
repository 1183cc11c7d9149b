"""Streams: what one device does, as steps on its work and its links, and how long that takes.

A step works, starts a transfer, waits for one, or repeats others:

* `Work` takes the device some time.
* `Start` lets a transfer begin when its links are free and the transfers before it have arrived.
  The device goes on meanwhile.
* `Wait` lets the device wait until a transfer has arrived.
* `Repeat` runs a sequence some times; `Choose` runs the longest of several.

Time is counted in whole picoseconds, relative to the present moment. So the state of the links, and
of what is on its way, has no history in it, and a run from the same state is the same run:

* A sequence is cut into segments, and each segment remembers its runs by the state they began in. A
  changed step makes one new segment. The others answer from memory as soon as the state is one
  that they know. The times are the same, to the picosecond, as those of a run from nothing.
* A loop repeats its body until the state at its end has been there before: from then on its
  iterations repeat. So a loop costs as much to simulate as its first few iterations.

The time of the device is that of its work and of its waits (`exposed`). Jia et al. 2019, "Beyond
Data and Model Parallelism for Deep Neural Networks" (FlexFlow), section 5.3, has the idea of
simulating again only what a change reaches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

PICOSECONDS = 10**12
_SEGMENT = 24  # steps

Link: TypeAlias = Hashable
Key: TypeAlias = Hashable


@dataclass(frozen=True, eq=False, slots=True)
class Work:
    """Work of the device, in picoseconds."""

    time: int


@dataclass(frozen=True, eq=False, slots=True)
class Start:
    """The start of a transfer.

    Attributes:
        key: what tells it from all other transfers of the sequence.
        time: what its links need, in picoseconds.
        after: keys of transfers that must have arrived before it begins.
    """

    key: Key
    time: int
    links: tuple[Link, ...]
    after: tuple[Key, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Wait:
    """The device waits until a transfer has arrived."""

    key: Key


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """A sequence that runs `count` times."""

    body: Steps
    count: int


@dataclass(frozen=True, eq=False, slots=True)
class Choose:
    """Several sequences, of which the longest counts."""

    branches: tuple[Steps, ...]


Step: TypeAlias = "Work | Start | Wait | Repeat | Choose"


@dataclass(frozen=True, slots=True)
class State:
    """What is going on at a moment, in picoseconds from it.

    Attributes:
        links: when the links that are not free become so.
        flights: when the transfers on their way arrive; 0 if they have.
    """

    links: frozenset[tuple[Link, int]] = frozenset()
    flights: frozenset[tuple[Key, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Totals:
    """Picoseconds of work and of waits."""

    work: int = 0
    exposed: int = 0

    @property
    def time(self) -> int:
        """Picoseconds in all."""
        return self.work + self.exposed

    def plus(self, other: Totals, times: int = 1) -> Totals:
        """Returns these and others, so many times."""
        return Totals(self.work + times * other.work, self.exposed + times * other.exposed)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of some steps: its totals, the wait for each transfer, and the state at its end."""

    totals: Totals
    waits: Mapping[Key, int]
    state: State


@dataclass(frozen=True, eq=False)
class Segment:
    """Some steps in order, with their runs by the state that they began in."""

    steps: tuple[Step, ...]
    runs: dict[State, Run] = field(default_factory=dict, repr=False)

    def run(self, state: State) -> Run:
        """Returns the run from a state."""
        known = self.runs.get(state)
        if known is None:
            known = self.runs[state] = _Clock(state).run(self.steps)
        return known


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps in order: `Steps.of([Work(5), Start("g", 3, ("model",)), Wait("g")])`."""

    segments: tuple[Segment, ...]

    @staticmethod
    def of(steps: Iterable[Step]) -> Steps:
        """Returns steps, cut into segments."""
        rest = tuple(steps)
        cuts = range(0, len(rest), _SEGMENT)
        return Steps(tuple(Segment(rest[at : at + _SEGMENT]) for at in cuts))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """All steps."""
        return tuple(step for segment in self.segments for step in segment.steps)

    def run(self, state: State = State()) -> Run:
        """Returns the run from a state."""
        totals, waits = Totals(), dict[Key, int]()
        for segment in self.segments:
            run = segment.run(state)
            totals, state = totals.plus(run.totals), run.state
            for key, wait in run.waits.items():
                waits[key] = waits.get(key, 0) + wait
        return Run(totals, MappingProxyType(waits), state)

    def replaced(self, changes: Mapping[Step, Iterable[Step]]) -> Steps:
        """Returns these steps with others in the place of some, also inside loops and branches.

        The segments without a change are the same objects, and remember their runs.
        """
        segments = tuple(_changed(segment, changes) for segment in self.segments)
        if all(new is old for new, old in zip(segments, self.segments, strict=True)):
            return self
        return Steps(segments)


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a run, in picoseconds.

    Attributes:
        start: when it begins, after the beginning of its sequence.
        time: what it takes; of a transfer, on its links.
        wait: how long the device waits: for the transfer, or in a loop or a branch.
        inside: one iteration of a loop, or the branch that counts.
    """

    step: Step
    start: int
    time: int
    wait: int = 0
    inside: tuple[Moment, ...] = ()


def moments(steps: Steps) -> list[Moment]:
    """Returns a run step by step, without waits; of a loop, its last iteration."""
    return _Recorder(State()).record(steps)


def _changed(segment: Segment, changes: Mapping[Step, Iterable[Step]]) -> Segment:
    steps: list[Step] = []
    for step in segment.steps:
        if step in changes:
            steps += changes[step]
        elif isinstance(step, Repeat):
            body = step.body.replaced(changes)
            steps.append(step if body is step.body else Repeat(body, step.count))
        elif isinstance(step, Choose):
            branches = tuple(branch.replaced(changes) for branch in step.branches)
            same = all(new is old for new, old in zip(branches, step.branches, strict=True))
            steps.append(step if same else Choose(branches))
        else:
            steps.append(step)
    same = len(steps) == len(segment.steps) and all(
        new is old for new, old in zip(steps, segment.steps, strict=True)
    )
    return segment if same else Segment(tuple(steps))


class _Clock:
    """One run through some steps.

    Attributes:
        now: picoseconds since it began; the moments of links and flights count from there, too.
    """

    def __init__(self, state: State) -> None:
        self.now = 0
        self.links = dict(state.links)
        self.flights = dict(state.flights)
        self.totals = Totals()
        self.waits: dict[Key, int] = {}

    def run(self, steps: Iterable[Step]) -> Run:
        for step in steps:
            if isinstance(step, Work):
                self._passes(Totals(work=step.time))
            elif isinstance(step, Start):
                self._start(step)
            elif isinstance(step, Wait):
                self._wait(step.key)
            elif isinstance(step, Repeat):
                self._repeat(step)
            else:
                self._choose(step)
        return Run(self.totals, self.waits, self._state())

    def _passes(self, totals: Totals) -> None:
        self.now += totals.time
        self.totals = self.totals.plus(totals)

    def _start(self, step: Start) -> None:
        begin = max(
            self.now,
            *(self.links.get(link, 0) for link in step.links),
            *(self.flights.get(key, 0) for key in step.after),
        )
        end = begin + step.time
        self.links.update(dict.fromkeys(step.links, end))
        self.flights[step.key] = end

    def _wait(self, key: Key) -> None:
        wait = max(0, self.flights.pop(key) - self.now)
        self.waits[key] = self.waits.get(key, 0) + wait
        self._passes(Totals(exposed=wait))

    def _state(self) -> State:
        return State(
            frozenset((link, end - self.now) for link, end in self.links.items() if end > self.now),
            frozenset((key, max(0, end - self.now)) for key, end in self.flights.items()),
        )

    # Loops and branches run from the state of the links; what is on its way around them goes on.

    def _inner(self) -> State:
        return State(self._state().links)

    def _adopts(self, run: Run, waits: Mapping[Key, int]) -> None:
        """Goes on after inner steps."""
        self._passes(run.totals)
        self.links = {link: self.now + rest for link, rest in run.state.links}
        for key, wait in waits.items():
            self.waits[key] = self.waits.get(key, 0) + wait

    def _choose(self, step: Choose) -> None:
        runs = [branch.run(self._inner()) for branch in step.branches]
        longest = max(runs, key=lambda run: run.totals.time)
        self._adopts(longest, longest.waits)

    def _repeat(self, step: Repeat) -> None:
        state = self._inner()
        seen: dict[State, int] = {}
        runs: list[Run] = []
        while len(runs) < step.count and state not in seen:
            seen[state] = len(runs)
            runs.append(step.body.run(state))
            state = State(runs[-1].state.links)
        if not runs:
            return
        # From the iteration that began in this state on, the others repeat.
        times = [1] * len(runs)
        last = len(runs) - 1
        rest = step.count - len(runs)
        if rest:
            first = seen[state]
            period = len(runs) - first
            for at in range(first, len(runs)):
                times[at] += rest // period + (at - first < rest % period)
            last = first + (rest - 1) % period
        totals, waits = Totals(), dict[Key, int]()
        for run, count in zip(runs, times, strict=True):
            totals = totals.plus(run.totals, count)
            for key, wait in run.waits.items():
                waits[key] = waits.get(key, 0) + wait * count
        self._adopts(Run(totals, waits, runs[last].state), waits)


class _Recorder(_Clock):
    """A run that writes down when each step begins."""

    def record(self, steps: Steps) -> list[Moment]:
        found: list[Moment] = []
        of_key: dict[Key, int] = {}
        for step in steps.steps:
            began, before = self.now, self.totals.exposed
            inner = self._inner()
            self.run([step])
            if isinstance(step, Work):
                found.append(Moment(step, began, step.time))
            elif isinstance(step, Start):
                of_key[step.key] = len(found)
                found.append(Moment(step, self.flights[step.key] - step.time, step.time))
            elif isinstance(step, Wait):
                position = of_key[step.key]
                found[position] = replace(found[position], wait=self.totals.exposed - before)
            elif isinstance(step, Repeat | Choose):
                wait = self.totals.exposed - before
                bodies = [step.body] if isinstance(step, Repeat) else list(step.branches)
                body = max(bodies, key=lambda body: body.run(inner).totals.time)
                inside = tuple(_Recorder(inner).record(body))
                found.append(Moment(step, began, self.now - began, wait, inside))
        return found
