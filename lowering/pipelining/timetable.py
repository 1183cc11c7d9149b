"""Timetables: in which ticks the chunks of a stack do their passes.

A `Timetable` has the tick of every forward and backward pass. All stages share the ticks. In a
tick, a stage does at most one forward pass, and then at most one backward pass. Results travel
between ticks: a pass may read what another stage has computed in an earlier tick.

`joint` puts the timetables of several stacks one after the other, and writes all as tables of
numbers that loops read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from meshdsl.lowering.pipelines.buffers import assign
from meshdsl.lowering.pipelines.circular import Circular

Pass = tuple[int, int]  # (chunk, microbatch)


@dataclass(frozen=True)
class Timetable:
    """The ticks of all passes over one stack.

    Attributes:
        stages, rounds, microbatches: p, v and m. Chunk c of p v is on stage c mod p.
        name: the schedule's.
        forward_tick, backward_tick: by (chunk, microbatch).
        forward_ready, backward_ready: by microbatch, the tick in which what the first pass of each
            kind starts from is known: what the model's first chunk reads, and the gradient that its
            last chunk reads. In that tick, it may be used already.
    """

    stages: int
    rounds: int
    microbatches: int
    name: str
    forward_tick: Mapping[Pass, int]
    backward_tick: Mapping[Pass, int]
    forward_ready: Mapping[int, int]
    backward_ready: Mapping[int, int]

    @staticmethod
    def of(
        stages: int,
        rounds: int,
        microbatches: int,
        name: str,
        forward_tick: Mapping[Pass, int],
        backward_tick: Mapping[Pass, int],
    ) -> Timetable:
        """Returns the timetable of a stack whose loss follows at once."""
        last, every = stages * rounds - 1, range(microbatches)
        return Timetable(
            stages,
            rounds,
            microbatches,
            name,
            forward_tick,
            backward_tick,
            {k: forward_tick[0, k] for k in every},
            {k: forward_tick[last, k] for k in every},
        )

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

    def forward_end(self, microbatch: int) -> int:
        """Returns the tick in which a microbatch leaves the last chunk."""
        return self.forward_tick[self.chunks - 1, microbatch]

    def backward_end(self, microbatch: int) -> int:
        """Returns the tick in which the gradient of a microbatch leaves the first chunk."""
        return self.backward_tick[0, microbatch]

    def later(self, forward: int, backward: int) -> Timetable:
        """Returns the timetable with its passes some ticks later."""
        return replace(
            self,
            forward_tick={key: tick + forward for key, tick in self.forward_tick.items()},
            backward_tick={key: tick + backward for key, tick in self.backward_tick.items()},
        )

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
    def waiting_starts(self) -> tuple[dict[int, int], int]:
        """By microbatch, the buffer of what the first chunk reads if it is not read at once."""
        return self._waiting(self.forward_ready, 0, self.forward_tick)

    @cached_property
    def waiting_loss_gradients(self) -> tuple[dict[int, int], int]:
        """By microbatch, the buffer of the loss's gradient if it is not used at once."""
        return self._waiting(self.backward_ready, self.chunks - 1, self.backward_tick)

    def _waiting(
        self, ready: Mapping[int, int], chunk: int, ticks: Mapping[Pass, int]
    ) -> tuple[dict[int, int], int]:
        spans = {k: (tick, ticks[chunk, k]) for k, tick in ready.items() if tick < ticks[chunk, k]}
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


def circular(stages: int, rounds: int, microbatches: int) -> Timetable:
    """Returns the timetable of `pipelines.circular`: interleaved 1F1B on a clock."""
    clock = Circular(stages, rounds, microbatches)
    keys = list(product(range(stages * rounds), range(microbatches)))
    return Timetable.of(
        stages,
        rounds,
        microbatches,
        "circular",
        {key: clock.forward_tick(*key) for key in keys},
        {key: clock.backward_tick(*key) for key in keys},
    )
