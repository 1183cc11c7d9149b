"""Circular: interleaved 1F1B on a clock, as one SPMD program of three scans can run it.

All stages share ticks. In a tick, a stage does at most one forward pass of one of its chunks and
then at most one backward pass. Each result is needed one stage further in the next tick, so a ring
of permutes carries all results: forward passes send to the next stage (the last one to stage 0),
backward passes to the previous one. Which passes a tick has depends on the tick alone:

| ticks | every stage does | loop |
|---|---|---|
| 0 ... `delay` - 1 | forward passes | warm-up |
| `delay` ... `delay` + `steady_ticks` - 1 | forward, then backward passes | steady |
| the last `delay` | backward passes | cool-down |

So the lowering needs three scans without a branch. A stage without work in a tick computes on
anything and its result is masked: `Slot.valid` is false.

Chunk c of p v chunks is on stage c mod p in round c // p. Microbatches go through the rounds in
groups (`groups.py`). Work item k of the forward passes is the same (round, microbatch) on all
stages; stage s does it in tick k + s. Item k of the backward passes has the same microbatch in the
round counted from the end; stage s does it in tick `delay` + k + (p - 1 - s). The delay is the
least one with which the last chunk has done its forward pass before, in the same tick or earlier:
(v - 1)G + p - 1, where G is the number of items between two rounds of the largest group.

Of p stages, v rounds, m microbatches, and times F and B of one chunk:

* the time is (v m + p - 1)(F + B) if m >= p, that of interleaved 1F1B, and its bubble is
  (p - 1)/(v m + p - 1) of it. In general the time is (`items` + p - 1)(F + B);
* stage s keeps the inputs of min(v m, (v - 1)G + 2(p - s) - 1) chunks if m >= p. With groups of p,
  this is at most (v + 1)p - 1 - 2s, whatever the number of microbatches;
* permutes travel beside work in the steady loop: those of a forward pass beside the backward pass
  of its tick, those of a backward pass beside the forward pass of the next tick. In the other two
  loops there is no such work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from meshdsl.lowering.pipelines.actions import Action, backward, forward
from meshdsl.lowering.pipelines.buffers import assign
from meshdsl.lowering.pipelines.groups import fewest_ticks
from meshdsl.lowering.pipelines.schedule import Schedule


class Slot(NamedTuple):
    """What one stage computes in a tick: three ints and a bool, or arrays of them.

    Attributes:
        chunk: the number of the chunk in the model, `round * stages + stage`.
        round: which of the stage's chunks it is.
        microbatch: the number of the microbatch.
        valid: whether there is work at all. If not, the numbers are in range and mean nothing.
    """

    chunk: Any
    round: Any
    microbatch: Any
    valid: Any


@dataclass(frozen=True)
class Circular:
    """The circular schedule, as functions from ticks to work.

    Attributes:
        stages: p.
        rounds: v, the chunks of a stage.
        microbatches: m.
        groups: into how many groups the microbatches are divided. 0 means as few ticks as there
            can be (`groups.fewest_ticks`): groups of p or more. `groups.fewest_live` makes groups
            of p or less: if p does not divide m, it costs ticks and saves memory.
    """

    stages: int
    rounds: int
    microbatches: int
    groups: int = 0

    def __post_init__(self) -> None:
        groups = self.groups or fewest_ticks(self.stages, self.microbatches)
        if not 1 <= groups <= self.microbatches:
            raise ValueError(
                f"cannot divide {self.microbatches} microbatches into {groups} groups: take 1 to "
                f"{self.microbatches} groups, or 0 to have as few ticks as possible"
            )
        object.__setattr__(self, "groups", groups)

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """How many groups are larger by one, their size, and the size of the others."""
        size, larger = divmod(self.microbatches, self.groups)
        return larger, size + 1, size

    def _stride(self, size: int) -> int:
        """Returns the items from one round of a group to its next round."""
        return max(size, self.stages)

    def _span(self, size: int) -> int:
        """Returns the items of a group, with idle ones before it comes back."""
        return (self.rounds - 1) * self._stride(size) + size

    @cached_property
    def stride(self) -> int:
        """G: the items from one round of the largest group to its next round."""
        larger, large, small = self._sizes
        return self._stride(large if larger else small)

    @cached_property
    def items(self) -> int:
        """How many ticks a stage needs for its forward passes; v m if it never waits."""
        larger, large, small = self._sizes
        return larger * self._span(large) + (self.groups - larger) * self._span(small)

    @property
    def delay(self) -> int:
        """The ticks of the warm-up loop, which are those of the cool-down loop."""
        return (self.rounds - 1) * self.stride + self.stages - 1

    @property
    def steady_ticks(self) -> int:
        """The ticks of the steady loop."""
        return self.items + self.stages - 1 - self.delay

    @property
    def ticks(self) -> int:
        """All ticks, those of the three loops."""
        return 2 * self.delay + self.steady_ticks

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage has no work."""
        return 1 - self.rounds * self.microbatches / (self.items + self.stages - 1)

    def seconds(self, forward: float, backward: float) -> float:
        """Returns the time of all ticks, of the times of the two passes of one chunk."""
        return self.delay * (forward + backward) + self.steady_ticks * (forward + backward)

    def live(self, stage: int) -> int:
        """Returns of how many chunks a stage keeps the inputs, at most.

        It is exact for the groups that there are by default.
        """
        per_round = min(self.stride, self.microbatches)
        ahead = (self.rounds - 1) * per_round + 2 * (self.stages - stage) - 1
        return min(self.rounds * self.microbatches, ahead)

    def forward(self, tick: Any, stage: Any) -> Slot:
        """Returns the forward pass of a stage in a tick.

        The arguments are ints, or arrays of numpy or JAX, traced or not: there is only arithmetic.
        """
        return self._slot(tick - stage, stage, reverse=False)

    def backward(self, tick: Any, stage: Any) -> Slot:
        """Returns the backward pass of a stage in a tick, as `forward` does."""
        return self._slot(tick - self.delay - (self.stages - 1 - stage), stage, reverse=True)

    def _slot(self, item: Any, stage: Any, reverse: bool) -> Slot:
        larger, large, small = self._sizes
        items_of_large = larger * self._span(large)
        inside = (item >= 0) * (item < self.items)
        item = item * inside
        # A product with a bool is a choice without a branch, so that tracers will do.
        late = item >= items_of_large
        size = large - late * (large - small)
        span = self._span(large) - late * (self._span(large) - self._span(small))
        stride = self._stride(large) - late * (self._stride(large) - self._stride(small))
        rest = item - late * items_of_large
        group = rest // span
        within = rest - group * span
        turn = within // stride
        position = within - turn * stride
        busy = position < size
        microbatch = late * (larger * large) + group * size + position * busy
        turn = self.rounds - 1 - turn if reverse else turn
        return Slot(turn * self.stages + stage, turn, microbatch, inside * busy == 1)

    def schedule(self) -> Schedule:
        """Returns the table. Columns are aligned: one per pass, so two per tick of the steady loop.

        Column t of the warm-up is tick t. Columns `delay` + 2j and `delay` + 2j + 1 are the
        forward and the backward pass of tick `delay` + j.
        """
        rows = []
        for stage in range(self.stages):
            row: list[Action | None] = []
            for tick in range(self.ticks):
                if tick < self.delay + self.steady_ticks:
                    slot = self.forward(tick, stage)
                    row.append(forward(slot.chunk, slot.microbatch) if slot.valid else None)
                if tick >= self.delay:
                    slot = self.backward(tick, stage)
                    row.append(backward(slot.chunk, slot.microbatch) if slot.valid else None)
            rows.append(row)
        return Schedule.of(rows, "circular")

    def forward_tick(self, chunk: int, microbatch: int) -> int:
        """Returns the tick of a forward pass: the inverse of `forward`."""
        turn, stage = divmod(chunk, self.stages)
        return self._item(turn, microbatch) + stage

    def backward_tick(self, chunk: int, microbatch: int) -> int:
        """Returns the tick of a backward pass: the inverse of `backward`."""
        turn, stage = divmod(chunk, self.stages)
        item = self._item(self.rounds - 1 - turn, microbatch)
        return self.delay + item + self.stages - 1 - stage

    def _item(self, turn: int, microbatch: int) -> int:
        larger, large, small = self._sizes
        if microbatch < larger * large:
            group, position = divmod(microbatch, large)
            return group * self._span(large) + turn * self._stride(large) + position
        group, position = divmod(microbatch - larger * large, small)
        before = larger * self._span(large) + group * self._span(small)
        return before + turn * self._stride(small) + position

    def input_buffers(self, stage: int) -> dict[tuple[int, int], int]:
        """Returns the buffer in which a stage keeps the input of each (chunk, microbatch).

        The input is there when the tick of the forward pass begins, or earlier: in a group of more
        than p, it waits for its round. The buffer is in use until the backward pass has ended.
        """
        ticks = {}
        for chunk, k in self._work(stage):
            came = self.forward_tick(chunk - 1, k) + 1 if chunk else self.forward_tick(chunk, k)
            ticks[chunk, k] = (came, self.backward_tick(chunk, k))
        return assign(ticks)

    def gradient_buffers(self, stage: int) -> dict[tuple[int, int], int]:
        """Returns the buffer of the gradient that each backward pass (chunk, microbatch) reads.

        With groups of p or less there is one buffer: each gradient is used in the tick in which it
        is there. The last chunk has no such gradient.
        """
        ticks = {}
        for chunk, k in self._work(stage):
            if chunk + 1 < self.stages * self.rounds:
                came = self.backward_tick(chunk + 1, k) + 1
                ticks[chunk, k] = (came, self.backward_tick(chunk, k))
        return assign(ticks)

    def _work(self, stage: int) -> list[tuple[int, int]]:
        """Returns (chunk, microbatch) of all that a stage does."""
        chunks = range(stage, self.stages * self.rounds, self.stages)
        return [(chunk, k) for chunk in chunks for k in range(self.microbatches)]
