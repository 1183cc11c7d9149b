"""The pipeline of a program: what its stages do, what waits, and what is computed in vain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from meshdsl.lowering.costs.timeline import Interval, Timeline
from meshdsl.lowering.costs.units import show_bytes, show_share
from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.named import WITH_ROUNDS
from meshdsl.lowering.pipelines.running import RunningPipeline
from meshdsl.lowering.program import SpmdProgram, Value

_MOST_COLUMNS = 24  # of the grid; a wider one shows its begin
_OUTSIDE = 0.02  # of the arithmetic: less of it is not worth an advice


@dataclass(frozen=True)
class PipelineReport:
    """What a report says of a pipeline.

    Attributes:
        running: the pipeline.
        step_bubble: the share of the step in which a stage waits: the bubble of the ticks, by the
            time that they take.
        forward_seconds, backward_seconds: what the passes of a stage's chunks take, on average.
        onward_bytes, back_bytes: what each stage sends to the next one, and to the one before, in
            all ticks of a step.
        outside: the share of a device's products, by their arithmetic, that is not in layers.
        alike: the share of those that are in stacks of layers that every stage computes.
        divided: whether the stages divide what is outside; else each computes all of it.
        rule: the rule that would divide it; empty if there is none.
        spare_bytes: by stage, the bytes of its buffers of activations that it never uses. All
            stages run one program, so each has the memory of the fullest one.
    """

    running: RunningPipeline
    step_bubble: float
    forward_seconds: float
    backward_seconds: float
    onward_bytes: float
    back_bytes: float
    outside: float
    alike: float
    divided: bool
    rule: str
    spare_bytes: tuple[int, ...]


def pipeline_report(program: SpmdProgram, timeline: Timeline) -> PipelineReport | None:
    """Returns what a report says of the pipeline of a program, if it is one."""
    pipeline = program.pipeline
    if pipeline is None:
        return None
    ticks = [i for i in timeline.intervals if i.kind == "scan" and i.name == pipeline.dims.tick]
    passes = [(tick, i) for tick in ticks for i in tick.inside if _is_scan(i, pipeline.dims.inside)]
    layers = pipeline.rule.partition(":")[0]
    others = [(tick, i) for tick in ticks for i in tick.inside if _is_scan(i, layers)]
    total = _flops(timeline.intervals) or 1
    inside, alike = (
        sum(tick.count * i.count * _flops(i.inside) for tick, i in loops) / total
        for loops in (passes, others)
    )
    sent = [
        (c.source.backward, c.wire_bytes * c.count)
        for c in program.collectives
        if c.kind == "permute" and c.dims and pipeline.dims.stage in c.dims.names
    ]
    onward = sum(count for backward, count in sent if not backward)
    back = sum(count for backward, count in sent if backward)
    if pipeline.turns:  # each pass sends to both sides
        onward = back = (onward + back) / 2
    outer = [v for v in program.block.inputs if _is_outside(v, pipeline)]
    divided = any(not set(v.layout.split_axes).isdisjoint(pipeline.axes) for v in outer)
    return PipelineReport(
        running=pipeline,
        step_bubble=pipeline.bubble
        * sum(tick.seconds for tick in ticks)
        / (timeline.seconds or 1.0),
        forward_seconds=_mean(i.seconds for _, i in passes if not i.source.backward),
        backward_seconds=_mean(i.seconds for _, i in passes if i.source.backward),
        onward_bytes=onward,
        back_bytes=back,
        outside=1 - inside - alike,
        alike=alike,
        divided=divided,
        rule=_rule(outer, pipeline),
        spare_bytes=_spare(program, pipeline),
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def _is_scan(interval: Interval, dim: str) -> bool:
    return interval.kind == "scan" and interval.name == dim


def _flops(intervals: Iterable[Interval]) -> int:
    return sum(
        i.count * _flops(i.inside) if i.kind == "scan" else i.flops + _flops(i.inside)
        for i in intervals
    )


def _is_outside(value: Value, pipeline: RunningPipeline) -> bool:
    """Whether an input may be a parameter that is in no layer."""
    layers = pipeline.rule.partition(":")[0]
    return value.dtype.kind != "i" and len(value.shape) > 1 and value.shape.find(layers) is None


def _rule(outer: Iterable[Value], pipeline: RunningPipeline) -> str:
    """Returns a rule that splits the largest parameter outside of the layers among the stages."""
    largest = max(outer, key=lambda v: v.shape.volume, default=None)
    if largest is None:
        return ""
    dim = max(largest.shape, key=lambda d: d.size)
    return f"{dim.name}:{'+'.join((*largest.layout.axes(dim.name), *pipeline.axes))}"


def _spare(program: SpmdProgram, pipeline: RunningPipeline) -> tuple[int, ...]:
    """Returns the bytes of buffers that each stage never uses."""
    loops = [
        i
        for i in program.block.instructions
        if i.op == "scan" and i.params["dim"] == pipeline.dims.tick
    ]
    spare = [0] * pipeline.schedule.stages
    for stack in pipeline.stacks:
        # The buffers are operands of all loops between the first and the last pass of the stack.
        of_loops = [
            {v for v in loop.inputs if v.shape.find(stack.kept) is not None} for loop in loops
        ]
        total = max((sum(v.bytes for v in buffers) for buffers in of_loops), default=0)
        for stage, used in enumerate(stack.live):
            spare[stage] += total * (max(stack.live) - used) // max(stack.live)
    return tuple(spare)


def pipeline_lines(report: PipelineReport, width: int) -> list[str]:
    """Returns the section about a pipeline."""
    lines = [f"pipeline {headline(report)}", *(f"  {line}" for line in facts_of(report))]
    return [*lines, *_grid(report.running, width)]


def headline(report: PipelineReport) -> str:
    """Returns what the pipeline is."""
    pipeline, schedule = report.running, report.running.schedule
    return (
        f"{pipeline.rule}: {_stages(pipeline)}; "
        f"{_many(schedule.microbatches, 'microbatch', 'es')}; schedule {schedule.name}"
    )


def facts_of(report: PipelineReport) -> list[str]:
    """Returns what there is to say of a pipeline, a sentence each."""
    pipeline, schedule = report.running, report.running.schedule
    lines = [
        *_stacks(pipeline),
        f"{pipeline.forward_ticks} ticks with forward passes, {pipeline.backward_ticks} with "
        f"backward passes; bubble {pipeline.bubble:.1%} of them, "
        f"{show_share(report.step_bubble)} of the step: stages wait {_waiting(pipeline)}",
    ]
    passes = pipeline.forward_ticks + pipeline.backward_ticks
    if passes > pipeline.circular_passes:
        lines.append(
            f"--pipeline=circular needs fewer passes on a clock: {pipeline.circular_passes}, "
            f"not {passes}"
        )
    if schedule.name in ("zb-h1", "zbv"):
        lines.append(
            "gradients of inputs and of weights are computed in one tick: apart, both would "
            "compute the activations again"
        )
    lines.append(
        "chunks whose activations are kept, by stage, at most: "
        + " ".join(map(str, pipeline.live))
        + f"; each has the memory of the fullest, stage {_fullest(report)}"
        + (f", of which others leave up to {_most(report)} unused" if _most(report) else "")
    )
    if report.onward_bytes or report.back_bytes:
        where = f"{show_bytes(report.onward_bytes)} to the next one and "
        where += f"{show_bytes(report.back_bytes)} to the one before"
        if schedule.stages == 2:  # both are the same link
            where = f"{show_bytes(report.onward_bytes + report.back_bytes)} to the other one"
        lines.append(f"each stage sends {where}, per device and step")
    lines += _outside(report)
    if pipeline.filling > 0:
        chunks = schedule.stages * pipeline.rounds
        for_none = ", ".join(
            f"{stack.layers} layers are computed as {chunks} × {stack.per_chunk}"
            for stack in pipeline.stacks
            if stack.layers < chunks * stack.per_chunk
        )
        lines.append(
            f"{pipeline.filling:.1%} of the layers' work is for none: {for_none}{_less(pipeline)}"
        )
    lines += [f"not part of it, computed by every stage: {one}" for one in pipeline.also]
    if report.alike:
        lines.append(f"these layers are {show_share(report.alike)} of the arithmetic of each stage")
    return lines


def _less(pipeline: RunningPipeline) -> str:
    """Returns with how many rounds the layers fill chunks up best, if those are fewer."""
    if pipeline.schedule.name not in WITH_ROUNDS:
        return ""

    def computed(rounds: int) -> int:
        chunks = rounds * pipeline.schedule.stages
        return sum(chunks * -(-stack.layers // chunks) for stack in pipeline.stacks)

    best = min(range(1, pipeline.rounds + 1), key=computed)
    if computed(best) == computed(pipeline.rounds):
        return ""
    layers = sum(stack.layers for stack in pipeline.stacks)
    return f"; with --pipeline_rounds={best} it is {computed(best)} for {layers}"


def _fullest(report: PipelineReport) -> int:
    return report.spare_bytes.index(min(report.spare_bytes))


def _most(report: PipelineReport) -> str:
    most = max(report.spare_bytes)
    return show_bytes(most) if most else ""


def _outside(report: PipelineReport) -> list[str]:
    """Returns how equal the stages' work is, and what would divide what all of them compute."""
    if report.outside < _OUTSIDE:
        return []
    text = f"{show_share(report.outside)} of the arithmetic is outside of the layers, as the loss"
    if report.divided:
        equal = "" if report.alike else ", so all have equal work"
        return [f"{text}: stages divide it{equal}"]
    rule = f": {report.rule} divides it" if report.rule else ""
    return [f"{text}, and every stage computes all of it{rule}"]


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
        f"chunks {n * count} to {(n + 1) * count - 1}: {_many(stack.per_chunk, 'layer')} each of "
        f"the layers={stack.layers}{f' of {stack.scope}' * bool(stack.scope)} at {stack.line}"
        for n, stack in enumerate(pipeline.stacks)
    ]


def _waiting(pipeline: RunningPipeline) -> str:
    passes = 2 * pipeline.schedule.rounds * pipeline.schedule.microbatches
    ticks = pipeline.forward_ticks + pipeline.backward_ticks
    fewer = f"{ticks - passes} of {ticks} passes"
    if pipeline.bubble < 0.05:
        return fewer
    more = range(pipeline.rounds + 1, _most_layers(pipeline) // pipeline.schedule.stages + 1)
    fitting = [n for n in more if pipeline.fits(n)] if pipeline.schedule.name in WITH_ROUNDS else []
    rounds = f" or --pipeline_rounds={fitting[0]}" if fitting else ""
    return f"{fewer}; more --microbatches{rounds} make that fewer"


def _most_layers(pipeline: RunningPipeline) -> int:
    return max(stack.layers for stack in pipeline.stacks)


def _grid(pipeline: RunningPipeline, width: int) -> list[str]:
    """Returns what each stage does in each tick; a wide grid only in its first columns."""
    cells = grid_cells(pipeline)
    size = max(len(cell) for row in cells for cell in row)
    count = min(len(cells[0]), _MOST_COLUMNS, (width - 12) // (size + 1))
    more = " …" if count < len(cells[0]) else ""
    lines = []
    for stage, row in enumerate(cells):
        shown = " ".join(f"{cell:>{size}}" for cell in row[:count])
        lines.append(f"  stage {stage:<3} {shown}{more}")
    return lines


def grid_cells(pipeline: RunningPipeline) -> list[list[str]]:
    """Returns what each stage does in each tick, as short texts: `F0`, `B3`, `.` for a wait."""
    rows, brief = pipeline.schedule.rows, pipeline.schedule.rounds == 1
    return [[_label(action, brief) for action in row] for row in rows]


def _label(action: Action | None, brief: bool) -> str:
    if action is None:
        return "."
    return f"{action.kind}{action.microbatch}" if brief else str(action)


def _many(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
