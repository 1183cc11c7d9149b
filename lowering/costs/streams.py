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
  iterations repeat. So a loop costs as much to simulate as its first few iterations. No transfer
  crosses the end of an iteration or of a branch: its `Wait` stands in the sequence of its `Start`.

The time of the device is that of its work and of its waits (`exposed`). Jia et al. 2019, "Beyond
Data and Model Parallelism for Deep Neural Networks" (FlexFlow), section 5.3, has the idea of
simulating again only what a change reaches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

PICOSECONDS = 10**12
_SEGMENT = 24  # steps

Link: TypeAlias = Hashable
Key: TypeAlias = Hashable
Time: TypeAlias = int | Fraction


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
        work = exposed = 0
        waits = dict[Key, int]()
        for segment in self.segments:
            run = segment.run(state)
            work += run.totals.work
            exposed += run.totals.exposed
            state = run.state
            for key, wait in run.waits.items():
                waits[key] = waits.get(key, 0) + wait
        return Run(Totals(work, exposed), MappingProxyType(waits), state)

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
    """One step of a run, in picoseconds; in a loop, the mean of all its iterations.

    So the moments inside, times the count of the loop, add up to the totals of the run.

    Attributes:
        start: when it begins, after the beginning of its sequence.
        time: what it takes; of a transfer, on its links.
        wait: how long the device waits: for the transfer, or in a loop or a branch.
        hidden: how long the device works while the transfer travels.
        beside: the steps of this work, loops and branches among them.
        inside: one iteration of a loop, or the branches that count.
    """

    step: Step
    start: Time
    time: Time
    wait: Time = 0
    hidden: Time = 0
    beside: tuple[Step, ...] = ()
    inside: tuple[Moment, ...] = ()


def moments(steps: Steps) -> list[Moment]:
    """Returns a run step by step, without waits."""
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
        self.work = self.exposed = 0
        self.waits: dict[Key, int] = {}

    def run(self, steps: Iterable[Step]) -> Run:
        for step in steps:
            if isinstance(step, Work):
                self._passes(step.time, 0)
            elif isinstance(step, Start):
                self._start(step)
            elif isinstance(step, Wait):
                self._wait(step.key)
            elif isinstance(step, Repeat):
                self._repeat(step)
            else:
                self._choose(step)
        return Run(self.totals, self.waits, self._state())

    @property
    def totals(self) -> Totals:
        return Totals(self.work, self.exposed)

    def _passes(self, work: int, exposed: int) -> None:
        self.now += work + exposed
        self.work += work
        self.exposed += exposed

    def _start(self, step: Start) -> None:
        links = [self.links.get(link, 0) for link in step.links]
        begin = max([self.now, *links, *(self.flights.get(key, 0) for key in step.after)])
        end = begin + step.time
        self.links.update(dict.fromkeys(step.links, end))
        self.flights[step.key] = end

    def _wait(self, key: Key) -> None:
        wait = max(0, self.flights.pop(key) - self.now)
        self.waits[key] = self.waits.get(key, 0) + wait
        self._passes(0, wait)

    def _state(self) -> State:
        return State(
            frozenset((link, end - self.now) for link, end in self.links.items() if end > self.now),
            frozenset((key, max(0, end - self.now)) for key, end in self.flights.items()),
        )

    # Loops and branches run from the state of the links; what is on its way around them goes on.

    def _inner(self) -> State:
        return State(self._state().links)

    def _adopts(self, run: Run) -> None:
        """Goes on after inner steps."""
        self._passes(run.totals.work, run.totals.exposed)
        self.links = {link: self.now + rest for link, rest in run.state.links}
        for key, wait in run.waits.items():
            self.waits[key] = self.waits.get(key, 0) + wait

    def _choose(self, step: Choose) -> None:
        self._adopts(_longest(step, self._inner()).run(self._inner()))

    def _repeat(self, step: Repeat) -> None:
        iterations, last = _iterations(step, self._inner())
        totals, waits = Totals(), dict[Key, int]()
        for _, run, count in iterations:
            totals = totals.plus(run.totals, count)
            for key, wait in run.waits.items():
                waits[key] = waits.get(key, 0) + wait * count
        if iterations:
            self._adopts(Run(totals, waits, last))


def _longest(step: Choose, state: State) -> Steps:
    """Returns the branch that takes longest."""
    runs = [branch.run(state) for branch in step.branches]
    assert not any(run.state.flights for run in runs), "a branch ends before its transfers"
    times = [run.totals.time for run in runs]
    return step.branches[times.index(max(times))]


def _iterations(step: Repeat, state: State) -> tuple[list[tuple[State, Run, int]], State]:
    """Returns the iterations of a loop that differ, and the state at its end.

    Each one has the state that it begins in, its run, and how often it occurs.
    """
    seen: dict[State, int] = {}
    runs: list[Run] = []
    while len(runs) < step.count and state not in seen:
        seen[state] = len(runs)
        runs.append(step.body.run(state))
        assert not runs[-1].state.flights, "an iteration ends before its transfers"
        state = State(runs[-1].state.links)
    times = [1] * len(runs)
    last = len(runs) - 1
    rest = step.count - len(runs)
    if rest:  # from the iteration that began in this state on, the others repeat
        first = seen[state]
        period = len(runs) - first
        for at in range(first, len(runs)):
            times[at] += rest // period + (at - first < rest % period)
        last = first + (rest - 1) % period
    end = runs[last].state if runs else state
    return list(zip(seen, runs, times, strict=True)), end


class _Recorder(_Clock):
    """A run that writes down what each step takes."""

    def record(self, steps: Steps) -> list[Moment]:
        records: list[_Record] = []
        of_key: dict[Key, _Record] = {}
        for step in steps.steps:
            before, began, inner = self.totals, self.now, self._inner()
            self.run([step])
            wait = self.totals.exposed - before.exposed
            if isinstance(step, Wait):
                of_key.pop(step.key).wait += wait
                continue
            one = _Record(step, began, self.now - began)
            records.append(one)
            if isinstance(step, Start):
                one.start, one.time = self.flights[step.key] - step.time, step.time
                of_key[step.key] = one
                continue
            if not isinstance(step, Work):
                one.wait, one.inside = wait, _inside(step, inner)
            work = self.totals.work - before.work
            if work:
                for flight in of_key.values():
                    flight.travels_beside(step, began, self.now, work)
        return [record.moment() for record in records]


@dataclass(slots=True)
class _Record:
    """A moment that is being written."""

    step: Step
    start: int
    time: int
    wait: int = 0
    hidden: Time = 0
    beside: list[Step] = field(default_factory=list)
    inside: tuple[Moment, ...] = ()

    def travels_beside(self, step: Step, began: int, ended: int, work: int) -> None:
        """Counts the work of a step while this transfer travels."""
        together = min(self.start + self.time, ended) - max(self.start, began)
        if together > 0:
            self.beside.append(step)
            # In a loop, work and waits take turns: its share of work counts.
            only_works = isinstance(step, Work)
            self.hidden += together if only_works else Fraction(together * work, ended - began)

    def moment(self) -> Moment:
        beside = tuple(self.beside)
        return Moment(self.step, self.start, self.time, self.wait, self.hidden, beside, self.inside)


def _inside(step: Repeat | Choose, state: State) -> tuple[Moment, ...]:
    """Returns the moments in a loop or a branch that begins in a state."""
    if isinstance(step, Choose):
        return tuple(_Recorder(state).record(_longest(step, state)))
    iterations, _ = _iterations(step, state)
    return _mean([(_Recorder(start).record(step.body), n) for start, _, n in iterations])


def _mean(records: Sequence[tuple[Sequence[Moment], int]]) -> tuple[Moment, ...]:
    """Returns the moments of iterations on average; each one occurs some times."""
    if len(records) == 1:
        return tuple(records[0][0])
    count = sum(times for _, times in records)
    of_step: dict[Step, list[tuple[Moment, int]]] = {}
    for runs, times in records:
        for moment in runs:
            of_step.setdefault(moment.step, []).append((moment, times))

    def mean(values: Iterable[tuple[Time, int]], over: int) -> Fraction:
        return sum((Fraction(value) * times for value, times in values), Fraction()) / over

    # A step of a branch does not occur in every iteration: it takes less of the mean.
    return tuple(
        Moment(
            step,
            mean([(one.start, times) for one, times in runs], sum(times for _, times in runs)),
            mean([(one.time, times) for one, times in runs], count),
            mean([(one.wait, times) for one, times in runs], count),
            mean([(one.hidden, times) for one, times in runs], count),
            tuple(dict.fromkeys(other for one, _ in runs for other in one.beside)),
            _mean_inside([(one.inside, times) for one, times in runs], count),
        )
        for step, runs in of_step.items()
    )


def _mean_inside(records: Sequence[tuple[Sequence[Moment], int]], count: int) -> tuple[Moment, ...]:
    """Returns the mean of what is inside a step, which does not occur in all iterations."""
    if not any(runs for runs, _ in records):
        return ()
    missing = count - sum(times for _, times in records)
    return _mean([*records, ((), missing)] if missing else records)
