"""Running: the facts of a pipeline that a program runs, for reports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.circular import Circular
from meshdsl.lowering.pipelines.schedule import Schedule


@dataclass(frozen=True)
class RunningStack:
    """A stack of layers that is a part of a pipeline.

    Attributes:
        layers: how many layers it has.
        per_chunk: the layers of a chunk; the last chunks may have fewer, and compute as long.
        line: where the loop over the layers is.
    """

    layers: int
    per_chunk: int
    line: str


@dataclass(frozen=True)
class PipelineDims:
    """The names of the dims that a pipeline adds to its program.

    Attributes:
        stage: the stages; tick: of the loops over ticks; slot: buffers.
        inside: the layers of a chunk.
    """

    stage: str
    tick: str
    slot: str
    inside: str


@dataclass(frozen=True)
class RunningPipeline:
    """A pipeline that a program runs, on ticks that all stages share.

    Attributes:
        rule: the rule of the layout that makes it, as `layers:pipe`.
        axes: the axes of the mesh that number the stages.
        stacks: the stacks of layers, in the order in which a microbatch goes through them. Each
            stage has as many chunks of each.
        schedule: what each stage does; None cells align ticks. Chunks are numbered through all
            stacks.
        forward_ticks, backward_ticks: in how many ticks the program computes forward, and backward
            passes; a tick counts once for each stack whose chunks it computes.
        dims: the names of the dims that it adds.
        also: stacks of layers that are not part of it, so that every stage computes them.
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
        """Per stage, of how many microbatches' chunks it keeps the activations, at most."""
        return peaks(self.schedule)

    @property
    def bubble(self) -> float:
        """The share of the time of all ticks in which a stage has no work.

        Every stage does `rounds * microbatches` passes each way, in as many ticks as there are.
        """
        passes = 2 * self.schedule.rounds * self.schedule.microbatches
        return 1 - passes / (self.forward_ticks + self.backward_ticks)

    @property
    def rounds(self) -> int:
        """How many chunks of each stack a stage has."""
        return self.schedule.rounds // len(self.stacks)

    @property
    def circular_passes(self) -> int:
        """How many passes the ticks of `circular` have, which needs the fewest."""
        schedule = self.schedule
        clock = Circular(schedule.stages, self.rounds, schedule.microbatches)
        return 2 * len(self.stacks) * (clock.items + schedule.stages - 1)

    @property
    def filling(self) -> float:
        """The share of the layers' work that is done for layers that the model does not have."""
        chunks = self.schedule.stages * self.rounds
        computed = sum(stack.per_chunk * chunks for stack in self.stacks)
        return 1 - sum(stack.layers for stack in self.stacks) / computed
