"""Running: the facts of a pipeline that a program runs, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.circular import Circular
from meshdsl.lowering.pipelines.schedule import Schedule


@dataclass(frozen=True)
class RunningStack:
    """A stack of layers of a pipeline.

    Attributes:
        layers: the number of layers.
        per_chunk: the number of layers of a chunk. The last chunks may have fewer layers of the
            model, but take the same time.
        line: the line of the loop over the layers.
        kept: the name of the dim of the buffers of its activations.
        live: the number of these buffers that each stage uses.
        scope: what the paths of its parameters have in common.
    """

    layers: int
    per_chunk: int
    line: str
    kept: str
    live: tuple[int, ...]
    scope: str = ""


@dataclass(frozen=True)
class PipelineDims:
    """The names of the dims that a pipeline adds to its program.

    Attributes:
        stage: the stages; tick: of the loops over ticks; inside: the layers of a chunk.
    """

    stage: str
    tick: str
    inside: str


@dataclass(frozen=True)
class RunningPipeline:
    """A pipeline that a program runs, on ticks that all stages share.

    Attributes:
        rule: the rule of the layout that makes the pipeline, such as `layers:pipe`.
        axes: the mesh axes over which the stages are split.
        stacks: the stacks of layers, in the order of the model. A stage has the same number of
            chunks of each stack.
        schedule: the actions of each stage. Empty cells align ticks. Chunks of all stacks have
            consecutive numbers.
        forward_ticks: the number of ticks with forward passes, summed over the stacks.
        backward_ticks: the number of ticks with backward passes, summed over the stacks.
        dims: the names of the dims that the pipeline adds.
        also: stacks of layers that are not part of the pipeline. Every stage computes them.
    """

    rule: str
    axes: tuple[str, ...]
    stacks: tuple[RunningStack, ...]
    schedule: Schedule
    forward_ticks: int
    backward_ticks: int
    dims: PipelineDims
    also: tuple[str, ...] = ()

    @cached_property
    def live(self) -> tuple[int, ...]:
        """The largest number of live chunk inputs of each stage."""
        return peaks(self.schedule)

    @property
    def bubble(self) -> float:
        """The share of the time of all ticks in which a stage has no work.

        Every stage does `schedule.rounds * microbatches` passes in each direction.
        """
        passes = 2 * self.schedule.rounds * self.schedule.microbatches
        return 1 - passes / (self.forward_ticks + self.backward_ticks)

    @property
    def rounds(self) -> int:
        """The number of chunks of each stack on a stage."""
        return self.schedule.rounds // len(self.stacks)

    @property
    def turns(self) -> bool:
        """Whether every second round goes through the stages in reverse, as in `zbv`."""
        stages = self.schedule.stages
        return self.rounds > 1 and self.schedule.placement[stages] == stages - 1 > 0

    @property
    def circular_passes(self) -> int:
        """How many passes the ticks of `circular` have, which needs the fewest."""
        schedule = self.schedule
        clock = Circular(schedule.stages, self.rounds, schedule.microbatches)
        return 2 * len(self.stacks) * (clock.items + schedule.stages - 1)

    def fits(self, rounds: int) -> bool:
        """Whether a number of rounds leaves no chunk empty, and fills up no more than this one."""
        chunks = rounds * self.schedule.stages
        layers = max(stack.layers for stack in self.stacks)
        own = self.rounds * max(stack.per_chunk for stack in self.stacks)
        return layers >= chunks and rounds * -(-layers // chunks) <= own

    @property
    def filling(self) -> float:
        """The share of the work of layers that fill up chunks; the model does not have these."""
        chunks = self.schedule.stages * self.rounds
        computed = sum(stack.per_chunk * chunks for stack in self.stacks)
        return 1 - sum(stack.layers for stack in self.stacks) / computed
