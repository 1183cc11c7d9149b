"""Rewriting: replaces the loop over microbatches of a training step by a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.graphs.hoist import hoist_casts
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.named import ROUNDS, WITH_ROUNDS, named
from meshdsl.lowering.pipelines.running import PipelineDims, RunningPipeline, RunningStack
from meshdsl.lowering.pipelining.chunks import Dims
from meshdsl.lowering.pipelining.clocking import clocked
from meshdsl.lowering.pipelining.finding import (
    NoPipelineError,
    Stack,
    find_stacks,
    longest_of,
    scope_of,
)
from meshdsl.lowering.pipelining.joint import Joint
from meshdsl.lowering.pipelining.loops import Pipeline
from meshdsl.lowering.pipelining.parts import Parts
from meshdsl.lowering.pipelining.timetable import Timetable, circular
from meshdsl.lowering.placement.storage import stored_inputs, tensors_with_paths
from meshdsl.lowering.writing.loops import within
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.trace import Trace, bind, located, tracing


@dataclass(frozen=True)
class Pipelined:
    """A training step with a pipeline.

    Attributes:
        graph: the rewritten graph.
        layout: the layout, with a rule for the dim of the stages.
        facts: the facts of the pipeline, for reports.
    """

    graph: Graph
    layout: Layout
    facts: RunningPipeline


def pipelined(graph: Graph, layout: Layout, mesh: Mesh, options: Options) -> Pipelined | None:
    """Returns a training step with a pipeline; None if the layout or the options make none.

    Raises:
        ValueError: the step cannot be a pipeline. The message has the reason and the fix.
    """
    if options.pipeline == "none":
        return None
    if not find_stacks(graph, layout, mesh):
        return None
    rounds = _rounds(options)
    # Casts happen before layers are gathered or sent to other stages, because this sends less.
    moved = graph.inputs if rounds > 1 else stored_inputs(graph, layout)
    graph = simplify(hoist_casts(graph, moved))
    stacks = find_stacks(graph, layout, mesh)
    longest = longest_of(stacks)
    assert longest is not None
    stages = mesh.extent(longest.rule.axes)
    timetable = _timetable(options, stages, longest.loop.params["dim"].size)
    useful = [s for s in stacks if s is longest or _gains(s.layers.size, stages, rounds)]
    try:
        return _pipelined(graph, useful, timetable, layout)
    except NoPipelineError:
        if len(useful) == 1:
            raise
        # These stacks cannot form one pipeline. The report lists the stacks outside of it.
        return _pipelined(graph, [longest], timetable, layout)


def _gains(layers: int, stages: int, rounds: int) -> bool:
    """Whether a stage computes fewer layers if the stack is divided over the stages."""
    return rounds * -(-layers // (stages * rounds)) < layers


def _pipelined(
    graph: Graph, stacks: Sequence[Stack], timetable: Timetable, layout: Layout
) -> Pipelined:
    """Returns the step with a pipeline of some stacks, which all have the same timetable."""
    used = {name for tensor in _tensors(graph) for name in tensor.shape.names}
    axes = stacks[0].rule.axes
    dims: list[Dims] = []
    for stack in stacks:
        dims.append(Dims.of(stack.layers, timetable, axes, used | {d.kept for d in dims}))
    _check(stacks, dims, layout, timetable)
    rule = Rule("", dims[0].stage.name, axes)
    joint = Joint.of([timetable] * len(stacks))
    return Pipelined(
        _rewritten(graph, stacks, joint, dims),
        Layout((*layout.rules, rule)),
        _facts(graph, stacks, dims, joint),
    )


def _facts(
    graph: Graph, stacks: Sequence[Stack], dims: Sequence[Dims], joint: Joint
) -> RunningPipeline:
    """Returns the facts of a pipeline, for reports."""
    body = stacks[0].loop.params["body"]
    passes = [op for stack in stacks for op in (stack.forward, stack.backward)]
    rest = [
        op
        for op in body.operations
        if op.name == "scan" and op not in passes and not op.source.backward
    ]
    also = [_named(graph, stacks[0].loop, op) for op in rest if _computes(op.params["body"])]
    ticks = [sum(p.ticks for p in joint.phases if n in p.passes) for n in joint.passes]
    return RunningPipeline(
        str(stacks[0].rule),
        stacks[0].rule.axes,
        tuple(
            RunningStack(
                stack.layers.size,
                dim.inside.size,
                str(stack.forward.source),
                dim.kept,
                table.live,
                scope_of(graph, stack.loop, stack.forward),
            )
            for stack, dim, table in zip(stacks, dims, joint.stacks, strict=True)
        ),
        joint.schedule(),
        sum(ticks[: joint.count]),
        sum(ticks[joint.count :]),
        PipelineDims(dims[0].stage.name, dims[0].tick, dims[0].inside.name),
        tuple(also),
    )


def _named(graph: Graph, loop: Operation, scan: Operation) -> str:
    """Returns a loop in the body of the loop over microbatches as reports name it."""
    scope = scope_of(graph, loop, scan)
    return f"{scan.params['dim']}{f' of {scope}' * bool(scope)} at {scan.source}"


def _computes(graph: Graph) -> bool:
    """Whether a body has products, so that it costs time on every stage."""
    return any("products" in op.primitive.rule.__module__.split(".") for op in within(graph))


def _rounds(options: Options) -> int:
    """Returns the number of rounds: the given one, or else that of the schedule."""
    if options.pipeline_rounds is not None:
        return options.pipeline_rounds
    if options.pipeline.endswith(".csv"):
        return csv_files.read(options.pipeline).rounds
    return ROUNDS if options.pipeline in ("interleaved", "zbv") else 1


def _timetable(options: Options, stages: int, microbatches: int) -> Timetable:
    """Returns the timetable of the schedule that the options name.

    Raises:
        ValueError: there is no such schedule or file, the schedule is incorrect, or it has
            another number of stages, microbatches or rounds.
    """
    name, rounds = options.pipeline, _rounds(options)
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
            f"pipeline schedule {name} has {', '.join(wrong)}. It must agree with the mesh, "
            "--microbatches and --pipeline_rounds"
        )
    return clocked(table)


def _rewritten(graph: Graph, stacks: Sequence[Stack], joint: Joint, dims: Sequence[Dims]) -> Graph:
    trace = Trace()
    with tracing(trace):
        values: dict[Tensor, Tensor] = {
            t: trace.input(t.shape, t.dtype, t.source) for t in graph.inputs
        }
        for op in graph.operations:
            arguments = [values[t] for t in op.inputs]
            if op is stacks[0].loop:
                outputs = Pipeline(Parts(stacks), joint, dims).write(arguments)
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


def _check(stacks: Sequence[Stack], dims: Sequence[Dims], layout: Layout, table: Timetable) -> None:
    """Raises ValueError if the stages cannot divide the layers; the message has all reasons."""
    stages, rounds = dims[0].stage.size, dims[0].round.size
    stack = longest_of(stacks)
    assert stack is not None
    rule, problems = stack.rule, []
    if stack.layers.size < stages * rounds:
        problems.append(_too_few(stack, table))
    claims = {}
    for scan in (scan for s in stacks for scan in (s.forward, s.backward)):
        body = scan.params["body"]
        inside = [layout.inside(tensor.shape) for tensor in _tensors(body)]
        inside += [layout.assign(t.shape, path) for t, path in tensors_with_paths(body)]
        for dim, axes in (split for each in inside for split in each.splits):
            if not set(axes).isdisjoint(rule.axes):
                own = (str(r) for r in layout.rules if r.dim == dim and {*axes} <= {*r.axes})
                claims[dim] = next(own, f"{dim}:{'+'.join(axes)}")
    loop = stack.loop
    for tensor in (*loop.inputs, *loop.outputs):
        axes = layout.inside(tensor.shape).axes(loop.params["dim"].name)
        if not set(axes).isdisjoint(rule.axes):
            problems.append(
                f"`{loop.params['dim'].name}:{'+'.join(axes)}` splits the microbatches over an "
                "axis of the pipeline, but each stage works on all of them: give them other axes"
            )
            break
    # A stage also computes while it waits for data, and not what only a print needs.
    problems += [
        f"a stage cannot print: leave out md.print at {source}"
        for source in dict.fromkeys(str(op.source) for op in _effects(loop.params["body"]))
    ]
    for dim, claim in claims.items():
        problems.append(
            f"`{claim}` splits `{dim}` inside of the layers over an axis of the pipeline, but "
            f"its stages have different layers: give `{dim}` other axes"
        )
    if problems:
        raise ValueError(
            "\n  ".join(
                [f"`{rule}` makes no pipeline of the loop at {stack.forward.source}", *problems]
            )
        )


def _effects(graph: Graph) -> Iterator[Operation]:
    """Yields the operations of a graph and its bodies that do more than compute."""
    for op in graph.operations:
        if op.primitive.effect:
            yield op
        for body in op.bodies:
            yield from _effects(body)


def _too_few(stack: Stack, table: Timetable) -> str:
    """Returns why the stack with the most layers has too few, and how to have enough."""
    layers, stages, rounds = stack.layers.size, table.stages, table.rounds
    axes, enough = "+".join(stack.rule.axes), layers // stages
    why = f"{stack.layers} are fewer than one per stage: there are {stages} stages"
    if rounds > 1:
        why += f", and {rounds} rounds"
    fixes = []
    if rounds > 1 and enough and table.name in ("circular", *WITH_ROUNDS):
        fixes.append(f"--pipeline_rounds={enough}")
    elif rounds > 1 and enough:
        fixes.append("another schedule, as --pipeline=circular --pipeline_rounds=1")
    if layers // rounds > 1:
        fixes.append(f"at most {layers // rounds} devices along {axes}")
    fixes.append(f"more layers, so that a stack of the model has {stages * rounds}")
    return f"{why}. Take {', or '.join(fixes)}"


def _tensors(graph: Graph) -> Iterator[Tensor]:
    yield from graph.inputs
    for op in graph.operations:
        yield from op.outputs
        for body in op.bodies:
            yield from _tensors(body)
