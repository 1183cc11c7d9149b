"""The pipeline of a program: what its stages do, what waits, and what is computed in vain."""

from __future__ import annotations

from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.running import RunningPipeline

_MOST_COLUMNS = 24  # of the grid; a wider one shows its begin


def pipeline_lines(pipeline: RunningPipeline, width: int) -> list[str]:
    """Returns the section about a pipeline."""
    schedule = pipeline.schedule
    lines = [
        f"pipeline {pipeline.rule}: {_stages(pipeline)}; "
        f"{_many(schedule.microbatches, 'microbatch', 'es')}; schedule {schedule.name}",
        *_stacks(pipeline),
        f"  {pipeline.forward_ticks} ticks with forward passes, {pipeline.backward_ticks} with "
        f"backward passes; bubble {pipeline.bubble:.1%} of them: stages wait "
        f"{_waiting(pipeline)}",
        "  chunks whose activations are kept, by stage, at most: "
        + " ".join(map(str, pipeline.live)),
    ]
    if pipeline.filling > 0:
        chunks = schedule.stages * pipeline.rounds
        for_none = ", ".join(
            f"{stack.layers} layers are computed as {chunks} × {stack.per_chunk}"
            for stack in pipeline.stacks
            if stack.layers < chunks * stack.per_chunk
        )
        lines.append(f"  {pipeline.filling:.1%} of the layers' work is for none: {for_none}")
    lines += [f"  not part of it, computed by every stage: {one}" for one in pipeline.also]
    return [*lines, *_grid(pipeline, width)]


def _stages(pipeline: RunningPipeline) -> str:
    """Returns how many stages there are, and what each has."""
    stages, chunks = pipeline.schedule.stages, _many(pipeline.rounds, "chunk")
    text = f"{_many(stages, 'stage')} of {chunks}"
    if len(pipeline.stacks) == 1:
        return f"{text} of {_many(pipeline.stacks[0].per_chunk, 'layer')}"
    return f"{text} of each of {len(pipeline.stacks)} stacks, one after the other"


def _stacks(pipeline: RunningPipeline) -> list[str]:
    """Returns which chunks the stacks have, if they are several."""
    if len(pipeline.stacks) == 1:
        return []
    count = pipeline.schedule.stages * pipeline.rounds
    return [
        f"  chunks {n * count} to {(n + 1) * count - 1}: {_many(stack.per_chunk, 'layer')} each of "
        f"the layers={stack.layers} at {stack.line}"
        for n, stack in enumerate(pipeline.stacks)
    ]


def _waiting(pipeline: RunningPipeline) -> str:
    passes = 2 * pipeline.schedule.rounds * pipeline.schedule.microbatches
    ticks = pipeline.forward_ticks + pipeline.backward_ticks
    fewer = f"{ticks - passes} of {ticks} passes"
    if pipeline.bubble < 0.05:
        return fewer
    rounds = " or --pipeline_rounds" if pipeline.stacks[0].per_chunk > 1 else ""
    return f"{fewer}; more --microbatches{rounds} make that fewer"


def _grid(pipeline: RunningPipeline, width: int) -> list[str]:
    """Returns what each stage does in each tick; a wide grid only in its first columns."""
    rows, brief = pipeline.schedule.rows, pipeline.schedule.rounds == 1
    cells = [[_label(action, brief) for action in row] for row in rows]
    size = max(len(cell) for row in cells for cell in row)
    count = min(len(cells[0]), _MOST_COLUMNS, (width - 12) // (size + 1))
    more = " …" if count < len(cells[0]) else ""
    lines = []
    for stage, row in enumerate(cells):
        shown = " ".join(f"{cell:>{size}}" for cell in row[:count])
        lines.append(f"  stage {stage:<3} {shown}{more}")
    return lines


def _label(action: Action | None, brief: bool) -> str:
    if action is None:
        return "."
    return f"{action.kind}{action.microbatch}" if brief else str(action)


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
