"""Rewriting: the graph of a training step, with its loop over microbatches as a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.graphs.hoist import hoist_casts
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.named import WITH_ROUNDS, named
from meshdsl.lowering.pipelines.running import RunningPipeline
from meshdsl.lowering.pipelining.chunks import Dims
from meshdsl.lowering.pipelining.clocking import clocked
from meshdsl.lowering.pipelining.finding import Stack, find_stack
from meshdsl.lowering.pipelining.loops import Pipeline
from meshdsl.lowering.pipelining.parts import Parts
from meshdsl.lowering.pipelining.timetable import Timetable, circular
from meshdsl.lowering.placement.storage import stored_inputs, tensors_with_paths
from meshdsl.lowering.writing.loops import within
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph
from meshdsl.tracing.trace import Trace, bind, located, tracing


@dataclass(frozen=True)
class Pipelined:
    """A step as a pipeline.

    Attributes:
        graph: the rewritten graph.
        layout: the layout, with a rule for the dim of the stages.
        facts: the pipeline, for reports.
    """

    graph: Graph
    layout: Layout
    facts: RunningPipeline


def pipelined(graph: Graph, layout: Layout, mesh: Mesh, options: Options) -> Pipelined | None:
    """Returns a training step as a pipeline; None if the layout makes none of it.

    Raises:
        ValueError: the step cannot be a pipeline; the message says why, and what to do.
    """
    if options.pipeline == "none":
        return None
    if find_stack(graph, layout, mesh) is None:
        return None
    rounds = options.pipeline_rounds
    # What is gathered once per step, or sent to another stage, is cast before that.
    moved = graph.inputs if rounds > 1 else stored_inputs(graph, layout)
    graph = simplify(hoist_casts(graph, moved))
    stack = find_stack(graph, layout, mesh)
    assert stack is not None
    stages = mesh.extent(stack.rule.axes)
    microbatches = stack.loop.params["dim"].size
    timetable = _timetable(options, stages, microbatches)
    used = {name for tensor in _tensors(graph) for name in tensor.shape.names}
    dims = Dims.of(stack.layers, stages, rounds, stack.rule.axes, used)
    _check(stack, dims, layout)
    rule = Rule("", dims.stage.name, stack.rule.axes)
    layout = Layout((*layout.rules, rule))
    return Pipelined(
        _rewritten(graph, stack, timetable, dims), layout, _facts(stack, dims, timetable)
    )


def _facts(stack: Stack, dims: Dims, timetable: Timetable) -> RunningPipeline:
    """Returns what reports say of a pipeline."""
    body = stack.loop.params["body"]
    passes = (stack.forward, stack.backward)
    rest = [
        op
        for op in body.operations
        if op.name == "scan" and op not in passes and not op.source.backward
    ]
    also = [f"{op.params['dim']} at {op.source}" for op in rest if _computes(op.params["body"])]
    phases = timetable.phases
    return RunningPipeline(
        str(stack.rule),
        stack.rule.axes,
        stack.layers.size,
        dims.inside.size,
        timetable.schedule(),
        sum(phase.ticks for phase in phases if phase.forward),
        sum(phase.ticks for phase in phases if phase.backward),
        tuple(also),
    )


def _computes(graph: Graph) -> bool:
    """Whether a body has products, so that computing it on every stage takes time."""
    return any("products" in op.primitive.rule.__module__.split(".") for op in within(graph))


def _timetable(options: Options, stages: int, microbatches: int) -> Timetable:
    """Returns the timetable of the schedule that the options name.

    Raises:
        ValueError: there is no such schedule or file, it is wrong, or it is for other numbers of
            stages, microbatches or rounds.
    """
    name, rounds = options.pipeline, options.pipeline_rounds
    if name in ("auto", "circular"):
        return circular(stages, rounds, microbatches)
    if not name.endswith(".csv"):
        given = rounds if name in WITH_ROUNDS or rounds > 1 else None
        return clocked(named(name, stages, microbatches, given))
    table = csv_files.read(name)
    have = (table.stages, table.microbatches, table.rounds)
    want = (stages, microbatches, rounds)
    words = ("stages", "microbatches", "rounds")
    wrong = [f"{a} {w}, not {b}" for a, b, w in zip(have, want, words, strict=True) if a != b]
    if wrong:
        raise ValueError(
            f"pipeline schedule {name} has {', '.join(wrong)}, as the mesh, --microbatches and "
            "--pipeline_rounds say"
        )
    return clocked(table)


def _rewritten(graph: Graph, stack: Stack, timetable: Timetable, dims: Dims) -> Graph:
    trace = Trace()
    with tracing(trace):
        values: dict[Tensor, Tensor] = {
            t: trace.input(t.shape, t.dtype, t.source) for t in graph.inputs
        }
        for op in graph.operations:
            arguments = [values[t] for t in op.inputs]
            if op is stack.loop:
                outputs = Pipeline(Parts(stack), timetable, dims).write(arguments)
            else:
                with located(op.source):
                    outputs = list(bind(op.primitive, arguments, op.params).outputs)
            values.update(zip(op.outputs, outputs, strict=True))
        result, _ = trace.finish([values[t] for t in graph.outputs])
    return replace(
        result,
        name=graph.name,
        input_paths=graph.input_paths,
        output_paths=graph.output_paths,
        names={values[t]: name for t, name in graph.names.items() if t in values},
        notes=(*graph.notes, *result.notes),
    )


def _check(stack: Stack, dims: Dims, layout: Layout) -> None:
    """Raises ValueError, with all reasons, if the layers cannot be divided among the stages."""
    stages, rounds = dims.stage.size, dims.round.size
    rule, problems = stack.rule, []
    if stack.layers.size < stages * rounds:
        fewer = f", and {rounds} rounds" if rounds > 1 else ""
        problems.append(
            f"{stack.layers} are fewer than one per stage: there are {stages} stages{fewer}. Give "
            f"the axes {'+'.join(rule.axes)} fewer devices, or use another rule"
        )
    claims = {}
    for body in (stack.forward.params["body"], stack.backward.params["body"]):
        inside = [layout.inside(tensor.shape) for tensor in _tensors(body)]
        inside += [layout.assign(t.shape, path) for t, path in tensors_with_paths(body)]
        for dim, axes in (split for each in inside for split in each.splits):
            if not set(axes).isdisjoint(rule.axes):
                claims[dim] = f"{dim}:{'+'.join(axes)}"
    loop = stack.loop
    for tensor in (*loop.inputs, *loop.outputs):
        axes = layout.inside(tensor.shape).axes(loop.params["dim"].name)
        if not set(axes).isdisjoint(rule.axes):
            problems.append(
                f"`{loop.params['dim'].name}:{'+'.join(axes)}` splits the microbatches over an "
                "axis of the pipeline, each stage of which works on any of them: give them other "
                "axes"
            )
            break
    for dim, claim in claims.items():
        problems.append(
            f"`{claim}` splits `{dim}` inside of the layers over an axis of the pipeline, whose "
            f"stages have different layers: give `{dim}` other axes"
        )
    if problems:
        raise ValueError(
            "\n  ".join(
                [f"`{rule}` makes no pipeline of the loop at {stack.forward.source}", *problems]
            )
        )


def _tensors(graph: Graph) -> Iterator[Tensor]:
    yield from graph.inputs
    for op in graph.operations:
        yield from op.outputs
        for body in op.bodies:
            yield from _tensors(body)
