"""Timetables: what each stage does in each tick, as tables of numbers that loops read.

A `Timetable` has the tick of every forward and backward pass. All stages share the ticks. In a
tick, a stage does at most one forward pass, and then at most one backward pass. Results travel
between ticks: a pass may read what another stage has computed in an earlier tick.

`phases` are runs of ticks in which the same parts occur, each for one loop:

| part | runs in a phase if some tick of it has |
|---|---|
| forward | a forward pass |
| head | a forward pass of the last chunk: then the loss and its gradient follow at once |
| backward | a backward pass |

`rows` has the numbers: for each tick and stage, which chunk and microbatch, and in which buffers
inputs, kept activations and gradients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, product

import numpy as np

from meshdsl.lowering.pipelines.actions import Action, backward, forward
from meshdsl.lowering.pipelines.buffers import assign
from meshdsl.lowering.pipelines.circular import Circular
from meshdsl.lowering.pipelines.schedule import Schedule

Pass = tuple[int, int]  # (chunk, microbatch)

NONE = -1  # a buffer that nothing is written to

# What the rows of a stage say: which pass, if any, and where its tensors are kept.
OWN = (
    "forward",  # 1 if there is a forward pass
    "round",  # of the stage's chunks, the one of the forward pass
    "microbatch",
    "keep",  # the buffer to keep its activations in
    "first",  # 1 if it is the model's first chunk, which reads the embedding
    "store_input",  # the buffer for the input that has just arrived, if it is not used at once
    "load_input",  # the buffer that the input waits in; NONE: it has just arrived
    "result",  # the buffer for what a chunk stacks beside what its backward pass reads
    "backward",  # 1 if there is a backward pass
    "backward_round",
    "backward_microbatch",
    "kept",  # the buffer with the activations
    "last",  # 1 if it is the model's last chunk, whose gradient comes from the loss
    "store_gradient",
    "load_gradient",
)
# What is the same on all stages: the microbatch that the model's first or last chunk works on.
SHARED = (
    "enters",  # 1 if the first chunk has a forward pass
    "entering",  # its microbatch
    "heads",  # 1 if the last chunk has a forward pass: loss and gradient of its microbatch follow
    "heading",
    "leaves",  # 1 if the first chunk has a backward pass
    "leaving",
    "store_loss_gradient",  # the buffer of the gradient of the loss, if it is not used at once
    "load_loss_gradient",  # the buffer that the last chunk's backward pass reads, or NONE
)


@dataclass(frozen=True)
class Phase:
    """A run of ticks in which the same parts occur: [start, stop)."""

    start: int
    stop: int
    forward: bool
    head: bool
    backward: bool

    @property
    def ticks(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Timetable:
    """The ticks of all passes.

    Attributes:
        stages, rounds, microbatches: p, v and m. Chunk c of p v is on stage c mod p.
        name: the schedule's.
        forward_tick, backward_tick: by (chunk, microbatch).
    """

    stages: int
    rounds: int
    microbatches: int
    name: str
    forward_tick: Mapping[Pass, int]
    backward_tick: Mapping[Pass, int]

    @property
    def chunks(self) -> int:
        return self.stages * self.rounds

    @property
    def passes(self) -> Iterator[Pass]:
        """All (chunk, microbatch)."""
        return product(range(self.chunks), range(self.microbatches))

    @cached_property
    def ticks(self) -> int:
        """How many ticks there are."""
        return 1 + max(*self.forward_tick.values(), *self.backward_tick.values())

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The loops, in order."""
        head = [self.head_tick(k) for k in range(self.microbatches)]
        every = (self.forward_tick.values(), head, self.backward_tick.values())
        # A loop goes on through ticks in which one of its parts has nothing to do.
        spans = [(min(ticks), max(ticks)) for ticks in every]
        parts = [tuple(a <= tick <= b for a, b in spans) for tick in range(self.ticks)]
        phases, start = [], 0
        for present, run in groupby(parts):
            stop = start + len(list(run))
            phases.append(Phase(start, stop, *present))
            start = stop
        return tuple(phases)

    def head_tick(self, microbatch: int) -> int:
        """Returns the tick in which the loss of a microbatch is computed."""
        return self.forward_tick[self.chunks - 1, microbatch]

    def schedule(self) -> Schedule:
        """Returns the table of actions. Each tick has one column for each pass of its phase."""
        cells: list[list[Action | None]] = [[] for _ in range(self.stages)]
        passes = {
            (tick, key[0] % self.stages, True): key for key, tick in self.forward_tick.items()
        }
        passes |= {(t, key[0] % self.stages, False): key for key, t in self.backward_tick.items()}
        for phase in self.phases:
            for tick in range(phase.start, phase.stop):
                for forth, present in ((True, phase.forward), (False, phase.backward)):
                    for stage in range(self.stages if present else 0):
                        key = passes.get((tick, stage, forth))
                        make = forward if forth else backward
                        cells[stage].append(make(*key) if key is not None else None)
        return Schedule.of(cells, self.name)

    @cached_property
    def kept(self) -> tuple[list[dict[Pass, int]], int]:
        """Per stage, the buffer of the activations of each pass; and how many there are."""
        return self._buffers(lambda key: (self.forward_tick[key], self.backward_tick[key]))

    @cached_property
    def waiting_inputs(self) -> tuple[list[dict[Pass, int]], int]:
        """Per stage, the buffer of inputs that are not used in the tick in which they arrive."""

        def span(key: Pass) -> tuple[int, int] | None:
            chunk, k = key
            arrives = self.forward_tick[chunk - 1, k] + 1 if chunk else self.forward_tick[key]
            used = self.forward_tick[key]
            return (arrives, used) if arrives < used else None

        return self._buffers(span)

    @cached_property
    def waiting_gradients(self) -> tuple[list[dict[Pass, int]], int]:
        """Per stage, the buffer of gradients that are not used in the tick of their arrival."""

        def span(key: Pass) -> tuple[int, int] | None:
            chunk, k = key
            used = self.backward_tick[key]
            if chunk == self.chunks - 1:
                return None
            arrives = self.backward_tick[chunk + 1, k] + 1
            return (arrives, used) if arrives < used else None

        return self._buffers(span)

    @cached_property
    def waiting_loss_gradients(self) -> tuple[dict[int, int], int]:
        """By microbatch, the buffer of the loss's gradient if it is not used at once."""
        last = self.chunks - 1
        spans = {
            k: (self.head_tick(k), self.backward_tick[last, k])
            for k in range(self.microbatches)
            if self.head_tick(k) < self.backward_tick[last, k]
        }
        buffers = assign(spans)
        return buffers, 1 + max(buffers.values(), default=-1)

    def _buffers(
        self, span: Callable[[Pass], tuple[int, int] | None]
    ) -> tuple[list[dict[Pass, int]], int]:
        """Returns buffers for all passes with a span of ticks, and how many a stage needs."""
        every = []
        for stage in range(self.stages):
            spans = {key: span(key) for key in self.passes if key[0] % self.stages == stage}
            every.append(assign({key: ticks for key, ticks in spans.items() if ticks is not None}))
        return every, 1 + max((n for buffers in every for n in buffers.values()), default=-1)

    @cached_property
    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of `OWN`, s32[tick, stage, field], and those of `SHARED`, s32[tick, field].

        Where there is no work, numbers are in range and mean nothing; buffers are `NONE`.
        """
        own = np.zeros((self.ticks, self.stages, len(OWN)), np.int32)
        shared = np.zeros((self.ticks, len(SHARED)), np.int32)
        buffers = [n for n in OWN if n.startswith(("store_", "load_"))] + ["keep", "result"]
        own[:, :, [OWN.index(name) for name in buffers]] = NONE
        shared[:, [SHARED.index(n) for n in SHARED if "_loss_" in n]] = NONE
        for key in self.passes:
            self._write(own, shared, key)
        return own, shared

    def _write(self, own: np.ndarray, shared: np.ndarray, key: Pass) -> None:
        chunk, k = key
        turn, stage = divmod(chunk, self.stages)
        first, last = chunk == 0, chunk == self.chunks - 1
        forth, back = self.forward_tick[key], self.backward_tick[key]

        def put(tick: int, **fields: int) -> None:
            for name, value in fields.items():
                own[tick, stage, OWN.index(name)] = value

        def share(tick: int, **fields: int) -> None:
            for name, value in fields.items():
                shared[tick, SHARED.index(name)] = value

        buffer = self.kept[0][stage][key]
        put(forth, forward=1, round=turn, microbatch=k, keep=buffer, first=first)
        put(forth, result=k * self.rounds + turn)
        put(back, backward=1, backward_round=turn, backward_microbatch=k, last=last)
        put(back, kept=buffer)
        if key in (inputs := self.waiting_inputs[0][stage]):
            put(self.forward_tick[chunk - 1, k] + 1, store_input=inputs[key])
            put(forth, load_input=inputs[key])
        if key in (gradients := self.waiting_gradients[0][stage]):
            put(self.backward_tick[chunk + 1, k] + 1, store_gradient=gradients[key])
            put(back, load_gradient=gradients[key])
        if first:
            share(forth, enters=1, entering=k)
            share(back, leaves=1, leaving=k)
        if last:
            share(forth, heads=1, heading=k)
            if k in (losses := self.waiting_loss_gradients[0]):
                share(forth, store_loss_gradient=losses[k])
                share(back, load_loss_gradient=losses[k])


def circular(stages: int, rounds: int, microbatches: int) -> Timetable:
    """Returns the timetable of `pipelines.circular`: interleaved 1F1B on a clock."""
    clock = Circular(stages, rounds, microbatches)
    keys = list(product(range(stages * rounds), range(microbatches)))
    return Timetable(
        stages,
        rounds,
        microbatches,
        "circular",
        {key: clock.forward_tick(*key) for key in keys},
        {key: clock.backward_tick(*key) for key in keys},
    )
