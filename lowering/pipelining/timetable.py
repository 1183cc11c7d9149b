"""Timetables: the ticks of all passes over one stack of layers.

A `Timetable` has the tick of each forward and backward pass. All stages share the ticks. In a tick,
a stage does at most one forward pass, and then at most one backward pass. Results travel between
ticks. So a pass may read results of other stages from earlier ticks.

`joint` combines the timetables of several stacks. It also makes tables of numbers of them, which
the loops read.
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
        stages: p.
        rounds: v.
        microbatches: m.
        name: the name of the schedule.
        placement: the stage of each of the p v chunks.
        forward_tick: the tick of the forward pass of each (chunk, microbatch).
        backward_tick: the tick of the backward pass of each (chunk, microbatch).
        forward_ready: for each microbatch, the first tick that can use the input of chunk 0.
        backward_ready: for each microbatch, the first tick that can use the gradient of the output
            of the last chunk.
    """

    stages: int
    rounds: int
    microbatches: int
    name: str
    placement: tuple[int, ...]
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
        turns: bool = False,
    ) -> Timetable:
        """Returns the timetable of a single stack: its loss is computed directly after it.

        Args:
            turns: whether the chunks turn around; see `placement`.
        """
        last, every = stages * rounds - 1, range(microbatches)
        return Timetable(
            stages,
            rounds,
            microbatches,
            name,
            placement(stages, rounds, turns),
            forward_tick,
            backward_tick,
            {k: forward_tick[0, k] for k in every},
            {k: forward_tick[last, k] for k in every},
        )

    @property
    def chunks(self) -> int:
        return self.stages * self.rounds

    @property
    def turns(self) -> bool:
        """Whether the chunks turn around; see `placement`."""
        return self.placement != placement(self.stages, self.rounds, turns=False)

    @property
    def passes(self) -> Iterator[Pass]:
        """The (chunk, microbatch) of all passes of one direction."""
        return product(range(self.chunks), range(self.microbatches))

    @cached_property
    def ticks(self) -> int:
        """The number of ticks."""
        return 1 + max(*self.forward_tick.values(), *self.backward_tick.values())

    def forward_end(self, microbatch: int) -> int:
        """Returns the tick of the forward pass of the last chunk."""
        return self.forward_tick[self.chunks - 1, microbatch]

    def backward_end(self, microbatch: int) -> int:
        """Returns the tick of the backward pass of the first chunk."""
        return self.backward_tick[0, microbatch]

    def later(self, forward: int, backward: int) -> Timetable:
        """Returns the timetable with its passes delayed by some ticks in each direction."""
        return replace(
            self,
            forward_tick={key: tick + forward for key, tick in self.forward_tick.items()},
            backward_tick={key: tick + backward for key, tick in self.backward_tick.items()},
        )

    @cached_property
    def kept(self) -> tuple[list[dict[Pass, int]], int]:
        """The buffer of the activations of each pass, per stage; and the number of buffers."""
        return self._buffers(lambda key: (self.forward_tick[key], self.backward_tick[key]))

    @property
    def live(self) -> tuple[int, ...]:
        """The number of buffers of activations that each stage uses."""
        return tuple(1 + max(buffers.values(), default=-1) for buffers in self.kept[0])

    @cached_property
    def waiting_inputs(self) -> tuple[list[dict[Pass, int]], int]:
        """The buffer of each input that arrives before its use, per stage; and their number."""

        def span(key: Pass) -> tuple[int, int] | None:
            chunk, k = key
            arrives = self.forward_tick[chunk - 1, k] + 1 if chunk else self.forward_tick[key]
            used = self.forward_tick[key]
            return (arrives, used) if arrives < used else None

        return self._buffers(span)

    @cached_property
    def waiting_gradients(self) -> tuple[list[dict[Pass, int]], int]:
        """The buffer of each gradient that arrives before its use, per stage; and their number."""

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
        """The buffer of each input of chunk 0 that waits for its use; and their number."""
        return self._waiting(self.forward_ready, 0, self.forward_tick)

    @cached_property
    def waiting_loss_gradients(self) -> tuple[dict[int, int], int]:
        """The buffer of each gradient of the last chunk that waits for its use; their number."""
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
        """Returns the buffers of all passes with a span of ticks, and the number of buffers."""
        every = []
        for stage in range(self.stages):
            spans = {key: span(key) for key in self.passes if self.placement[key[0]] == stage}
            every.append(assign({key: ticks for key, ticks in spans.items() if ticks is not None}))
        return every, 1 + max((n for buffers in every for n in buffers.values()), default=-1)


def placement(stages: int, rounds: int, turns: bool) -> tuple[int, ...]:
    """Returns the stage of each chunk.

    Chunk c is on stage c mod p. If the chunks turn around, every second round goes through the
    stages in reverse, so that a round begins on the stage on which the round before ends.
    """
    onward = tuple(range(stages))
    return sum((onward[::-1] if turns and n % 2 else onward for n in range(rounds)), ())


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
