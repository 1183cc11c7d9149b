"""Circular: interleaved 1F1B on a clock, for one SPMD program of three scans.

All stages share ticks. In a tick, a stage does at most one forward pass of one of its chunks, and
then at most one backward pass. A pass sends its result along a ring of permutes. A forward pass
sends to the next stage; the last stage sends to stage 0. A backward pass sends to the previous
stage. The kinds of passes depend on the tick only:

| ticks | every stage does | loop |
|---|---|---|
| 0 ... `delay` - 1 | forward passes | warm-up |
| `delay` ... `delay` + `steady_ticks` - 1 | forward, then backward passes | steady state |
| the last `delay` | backward passes | cool-down |

So the lowering needs three scans, and no branches. If a stage has no work in a tick, `Slot.valid`
is false: the stage computes on arbitrary data, and its result is masked.

There are p stages, v rounds and m microbatches. Chunk c is on stage c mod p, in round c // p.
Microbatches go through the rounds in groups (`groups.py`). All stages do the same work items in the
same order. Item k of the forward passes is a (round, microbatch). Stage s does it in tick k + s.
Item k of the backward passes has the same microbatch, and its round is counted from the last one.
Stage s does it in tick `delay` + k + (p - 1 - s).

A backward pass of the last chunk needs its forward pass, in the same tick or earlier. `delay` is
the smallest delay with this property: (v - 1)G + p - 1. G is the number of items between two rounds
of the largest group.

A forward pass of one chunk takes the time F, a backward pass the time B.

* The schedule takes (`items` + p - 1)(F + B). If m >= p, this is (v m + p - 1)(F + B), as for
  interleaved 1F1B, and the bubble is the share (p - 1)/(v m + p - 1).
* If m >= p, stage s keeps the inputs of at most min(v m, (v - 1)G + 2(p - s) - 1) chunks. With
  groups of p, this is at most (v + 1)p - 1 - 2s, for any number of microbatches.
* In the steady state, permutes travel while the stage works. A forward pass sends during the
  backward pass of its tick. A backward pass sends during the forward pass of the next tick. In the
  warm-up and the cool-down, there is no such overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from meshdsl.lowering.pipelines.actions import Action, backward, forward
from meshdsl.lowering.pipelines.groups import fewest_ticks
from meshdsl.lowering.pipelines.schedule import Schedule


class Slot(NamedTuple):
    """The pass of one stage in a tick: three ints and a bool, or arrays of them.

    Attributes:
        chunk: the number of the chunk in the model, `round * stages + stage`.
        round: the number of the chunk among the chunks of the stage.
        microbatch: the number of the microbatch.
        valid: whether there is a pass. If not, the numbers are arbitrary, but in range.
    """

    chunk: Any
    round: Any
    microbatch: Any
    valid: Any


@dataclass(frozen=True)
class Circular:
    """The circular schedule, as functions from ticks to passes.

    Attributes:
        stages: p.
        rounds: v, the number of chunks of a stage.
        microbatches: m.
        groups: the number of groups of microbatches. With 0, it is `groups.fewest_ticks`: groups
            of p or more. `groups.fewest_live` makes groups of p or less. If p does not divide m,
            those need more ticks and less memory.
    """

    stages: int
    rounds: int
    microbatches: int
    groups: int = 0

    def __post_init__(self) -> None:
        groups = self.groups or fewest_ticks(self.stages, self.microbatches)
        if not 1 <= groups <= self.microbatches:
            raise ValueError(
                f"cannot divide {self.microbatches} microbatches into {groups} groups: give 1 to "
                f"{self.microbatches} groups, or 0 for the fewest ticks"
            )
        object.__setattr__(self, "groups", groups)

    @cached_property
    def _sizes(self) -> tuple[int, int, int]:
        """The number of groups with one microbatch more; their size; the size of the others."""
        size, larger = divmod(self.microbatches, self.groups)
        return larger, size + 1, size

    def _stride(self, size: int) -> int:
        """Returns the number of items from one round of a group to its next round."""
        return max(size, self.stages)

    def _span(self, size: int) -> int:
        """Returns the number of items of a group, with idle items between its rounds."""
        return (self.rounds - 1) * self._stride(size) + size

    @cached_property
    def stride(self) -> int:
        """G: the number of items from one round of the largest group to its next round."""
        larger, large, small = self._sizes
        return self._stride(large if larger else small)

    @cached_property
    def items(self) -> int:
        """The number of ticks of a stage for its forward passes; v m if it never waits."""
        larger, large, small = self._sizes
        return larger * self._span(large) + (self.groups - larger) * self._span(small)

    @property
    def delay(self) -> int:
        """The number of ticks of the warm-up, and of the cool-down."""
        return (self.rounds - 1) * self.stride + self.stages - 1

    @property
    def steady_ticks(self) -> int:
        """The number of ticks of the steady state."""
        return self.items + self.stages - 1 - self.delay

    @property
    def ticks(self) -> int:
        """The number of ticks of all three loops."""
        return 2 * self.delay + self.steady_ticks

    @property
    def bubble(self) -> float:
        """The share of the time in which a stage has no work."""
        return 1 - self.rounds * self.microbatches / (self.items + self.stages - 1)

    def forward(self, tick: Any, stage: Any) -> Slot:
        """Returns the forward pass of a stage in a tick.

        The arguments may be ints, or arrays of numpy or JAX, also in a trace: the function uses
        arithmetic only.
        """
        return self._slot(tick - stage, stage, reverse=False)

    def backward(self, tick: Any, stage: Any) -> Slot:
        """Returns the backward pass of a stage in a tick, for the same arguments as `forward`."""
        return self._slot(tick - self.delay - (self.stages - 1 - stage), stage, reverse=True)

    def _slot(self, item: Any, stage: Any, reverse: bool) -> Slot:
        larger, large, small = self._sizes
        items_of_large = larger * self._span(large)
        inside = (item >= 0) * (item < self.items)
        item = item * inside
        # A product with a bool selects without a branch, so this also works in a trace.
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
        """Returns the table, with one column per pass; all stages have the same columns.

        Column t of the warm-up is tick t. Tick `delay` + j of the steady state has two columns:
        `delay` + 2j for the forward pass, and `delay` + 2j + 1 for the backward pass.
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
        """Returns the tick of a forward pass. This is the inverse of `forward`."""
        turn, stage = divmod(chunk, self.stages)
        return self._item(turn, microbatch) + stage

    def backward_tick(self, chunk: int, microbatch: int) -> int:
        """Returns the tick of a backward pass. This is the inverse of `backward`."""
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
