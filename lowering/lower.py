"""Lowering: a graph, a mesh and a layout become an SpmdProgram.

The stages (`lowering.stages`) run here, each once: `simplify`; `place` gives every tensor its
layout; `plan` gives every operation its strategy; `reduce` decides where partial sums are reduced;
a `Scope` writes the program; `run_passes` improves it. If memory is limited, `choose` runs the
stages after the first with several choices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.prices import LinkPrices
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.layouts.validate import LabelledTensor, check, problems
from meshdsl.lowering.choices import Choice, choose
from meshdsl.lowering.decisions import decide, small_bytes
from meshdsl.lowering.graphs.creation import creates_state
from meshdsl.lowering.graphs.hoist import hoist_casts
from meshdsl.lowering.graphs.lookalikes import lookalikes
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.options import DEFAULT, Context, Options
from meshdsl.lowering.passes import run_passes
from meshdsl.lowering.passes.blocks import are_alike
from meshdsl.lowering.passes.halves import in_halves
from meshdsl.lowering.passes.prefetch import prefetch
from meshdsl.lowering.passes.reduce_inside import reduce_inside
from meshdsl.lowering.passes.schedule import schedule
from meshdsl.lowering.passes.tidy import tidy
from meshdsl.lowering.pipelining.finding import find_stacks, notes_without
from meshdsl.lowering.placement.choosing import Chooser
from meshdsl.lowering.placement.identity import given_by, placement_of
from meshdsl.lowering.placement.joint import better_of, choose_jointly
from meshdsl.lowering.placement.keeping import allowance, keep_gathered
from meshdsl.lowering.placement.placing import place
from meshdsl.lowering.placement.planning import plan, reduce
from meshdsl.lowering.placement.storage import stored_inputs, tensors_with_paths
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.stages import Given, Placed, Planned, Reduced, Simplified, Written
from meshdsl.lowering.unused import paths_of, warn_of_layout, warn_of_options
from meshdsl.lowering.writing.results import without_pads
from meshdsl.lowering.writing.scope import Scope
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.source import UNKNOWN
from meshdsl.tracing.statements import statement_at

if TYPE_CHECKING:
    from meshdsl.lowering.pipelining.rewriting import Pipelined


@dataclass(frozen=True)
class Stages:
    """A lowering, stage by stage; see `lowering.stages`."""

    simplified: Simplified
    placed: Placed
    planned: Planned
    reduced: Reduced
    written: Written
    program: SpmdProgram

    @property
    def placement(self) -> Placement:
        """The layout of every tensor of the simplified graph; `lower` accepts it again."""
        return placement_of(self.simplified.graph, self.reduced, self.written.program)


def lower(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options | None = None,
    donated: Sequence[bool] = (),
    *,
    hardware: Hardware | None = None,
    placement: Placement | None = None,
    choice: Choice | None = None,
) -> SpmdProgram:
    """Lowers a traced graph.

    Args:
        donated: for each input, whether an output may be written over it.
        hardware: the devices that the program is for, by whose time lowering decides (see
            `choices`); `options.hardware` comes first.
        placement: layouts of some tensors, or of all; `layout` decides about the others.
        choice: the way to lower the program; None: lowering chooses.

    Raises:
        ValueError: the layout or the placement does not fit the program; all problems are listed.
    """
    return lower_in_stages(
        graph,
        mesh,
        layout,
        options,
        donated,
        hardware=hardware,
        placement=placement,
        choice=choice,
    ).program


def lower_in_stages(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options | None = None,
    donated: Sequence[bool] = (),
    *,
    hardware: Hardware | None = None,
    placement: Placement | None = None,
    choice: Choice | None = None,
) -> Stages:
    """Lowers a traced graph, and returns the result of every stage; see `lower`."""
    options = options or DEFAULT
    simplified = Simplified(simplify(graph), mesh, layout.on(mesh))
    validate(simplified.graph, mesh, layout)
    if options.hardware is not None:
        hardware = find_hardware(options.hardware)

    def by(options: Options) -> Stages:
        return _by(simplified, options, donated, hardware, placement, choice)

    stages = by(options)
    if stages.program.pipeline is not None and _is_open(options):
        from meshdsl.lowering.pipelining.choosing import choose_pipeline

        known = hardware if _is_timed(hardware, options) else None
        chosen, decision = choose_pipeline(
            lambda options: by(options).program, stages.program, options, known
        )
        if chosen.pipeline_rounds not in (None, 1) or chosen.pipeline == "1f1b":
            stages = by(chosen)
        if decision is not None:
            decisions = (*stages.program.decisions, decision)
            stages = replace(stages, program=replace(stages.program, decisions=decisions))
    if stages.program.layout is not layout:  # reports show the layout as the user wrote it
        stages = replace(stages, program=replace(stages.program, layout=layout))
    warn_of_options(stages.program, options)
    return stages


def _is_open(options: Options) -> bool:
    """Whether the schedule of a pipeline is for lowering to choose."""
    return options.pipeline == "auto" and options.pipeline_rounds is None


def _is_timed(hardware: Hardware | None, options: Options) -> bool:
    """Whether lowering decides by simulated times.

    Of other devices at hand than TPUs, simulations have not been held against a compiler.
    """
    return hardware is not None and (hardware.torus > 0 or options.hardware is not None)


def _by(
    simplified: Simplified,
    options: Options,
    donated: Sequence[bool],
    hardware: Hardware | None,
    placement: Placement | None,
    choice: Choice | None,
) -> Stages:
    """Lowers a simplified graph, by one schedule if it is a pipeline."""
    pipeline = _pipelined(simplified, options)
    simplified = _with_pipeline(simplified, pipeline)
    mesh, layout = simplified.mesh, simplified.layout
    given = given_by(placement, simplified)
    _check_halves(options, simplified.graph)

    # What choices share is lowered once. A pass without effect returns the program it was given, so
    # the passes after it run once as well.
    gathered_ahead, halved = cache(prefetch), cache(in_halves)

    @cache
    def priced() -> Mesh:
        assert hardware is not None, "only the hardware knows what moves take"
        return replace(mesh, prices=LinkPrices.on(hardware, mesh))

    @cache
    def placed(
        keep: bool, reduce_each: bool, again: bool, context: Context | Literal[""], timed: bool
    ) -> _Start:
        chosen = replace(options, context=context) if context else options
        choice = Choice(keep, reduce_each=reduce_each, context=context, again=again)
        chooser = Chooser(priced() if timed else mesh, chosen, hardware)
        return _Start.of(simplified, chooser, choice, given)

    @cache
    def staged(choice: Choice) -> Stages:
        start = placed(choice.keep, choice.reduce_each, choice.again, choice.context, choice.timed)
        return start.stages(simplified, choice, given)

    # Choices that write the same program get the same object, so that passes and simulations run
    # once. None of these functions calls itself: else a cycle would keep all stages.
    def jointly(choice: Choice) -> Stages:
        together = staged(replace(choice, joint=True))
        return staged(choice) if not choice.joint and together.placed.joint else together

    @cache
    def written(choice: Choice) -> Stages:
        usual = jointly(replace(choice, timed=False))
        if choice.timed:
            timed = jointly(choice)
            if not are_alike(timed.program.block, usual.program.block):
                return timed
        return usual

    @cache
    def kept(program: SpmdProgram) -> tuple[SpmdProgram, SpmdProgram]:
        """Returns a written program, and the one that keeps weights where lowering may choose.

        Both ways to send collectives, apart and joined, begin there.
        """
        program = replace(program, donated=tuple(donated))
        is_open = options.weights == "auto"
        return program, keep_gathered(program, options.memory) if is_open else program

    @cache
    def improved(program: SpmdProgram, apart: bool) -> SpmdProgram:
        program, keeping = kept(program)

        def passed(program: SpmdProgram) -> SpmdProgram:
            if not apart or hardware is None:
                return run_passes(program, options)
            small = small_bytes(hardware, mesh)
            return run_passes(reduce_inside(program, small), replace(options, bucket_bytes=small))

        better = passed(keeping)
        if keeping is not program and better.peak_bytes > allowance(program, options.memory):
            # Passes may raise the peak further where weights are kept.
            usual = passed(program)
            better = better if better.peak_bytes <= usual.peak_bytes else usual
        return better

    @cache
    def tidied(program: SpmdProgram) -> SpmdProgram:
        return schedule(tidy(program, options), options)

    def write(choice: Choice) -> Stages:
        stages = written(replace(choice, prefetch=False, apart=False, halves=""))
        program = improved(stages.program, choice.apart)
        if choice.prefetch and (ahead := gathered_ahead(program)) is not program:
            program = tidied(ahead)
        if choice.halves:
            program = halved(program, choice.halves)
        return replace(stages, program=program)

    if choice is not None:
        stages = write(choice)
    elif hardware is not None and _is_timed(hardware, options):
        stages, decisions = decide(write, simplified.graph, layout, options, hardware)
        stages = replace(stages, program=replace(stages.program, decisions=decisions))
    else:
        _, stages = choose(write, simplified.graph, layout, options)
    if pipeline is not None:
        stages = replace(stages, program=replace(stages.program, pipeline=pipeline.facts))
    return stages


def _pipelined(simplified: Simplified, options: Options) -> Pipelined | None:
    """Returns a training step as a pipeline; None if its layout makes none of it."""
    graph, mesh, layout = simplified.graph, simplified.mesh, simplified.layout
    if options.pipeline == "none" or not find_stacks(graph, layout, mesh):
        return None
    # Few programs are pipelines: the others do not wait for the modules that make them.
    from meshdsl.lowering.pipelining.rewriting import pipelined

    return pipelined(graph, layout, mesh, options)


def _with_pipeline(simplified: Simplified, pipeline: Pipelined | None) -> Simplified:
    """Returns the graph of a pipeline; without one, the graph with notes on what prevents it."""
    graph, mesh, layout = simplified.graph, simplified.mesh, simplified.layout
    if pipeline is not None:
        return Simplified(simplify(pipeline.graph), mesh, pipeline.layout)
    notes = tuple(notes_without(graph, layout, mesh))
    if not notes:
        return simplified
    return replace(simplified, graph=replace(graph, notes=(*graph.notes, *notes)))


def _check_halves(options: Options, graph: Graph) -> None:
    """Raises ValueError if `options.halves` names a dim that the graph lacks."""
    if options.halves in ("auto", "none"):
        return
    names = sorted({name for tensor, _ in tensors_of(graph) for name in tensor.shape.names})
    if options.halves not in names:
        raise ValueError(
            f"halves={options.halves}: the program has no such dim, but {', '.join(names)}; or "
            f"write auto or none{did_you_mean(options.halves, names)}"
        )


@dataclass(frozen=True)
class _Start:
    """A placed graph, from which choices that keep the same weights go on.

    Attributes:
        one_by_one: placed so that each product takes its own cheapest strategy.
        together: placed so that products choose together; the same object if that changes nothing.
        written: the stages of each of them whose graph planning has not rewritten, by its id.
    """

    one_by_one: Placed
    together: Placed
    written: dict[int, Stages] = field(default_factory=dict)

    @staticmethod
    def of(simplified: Simplified, chooser: Chooser, choice: Choice, given: Given) -> _Start:
        """Places a graph for one choice."""
        graph, layout = simplified.graph, simplified.layout
        if choice.keep:
            graph = simplify(hoist_casts(graph, stored_inputs(graph, layout)))
        usual = place(graph, layout, chooser, choice, given)
        return _Start(usual, choose_jointly(usual))

    def stages(self, simplified: Simplified, choice: Choice, given: Given) -> Stages:
        """Runs the stages up to the written program, for one choice."""
        if not choice.joint or self.together is self.one_by_one:
            return self._write(self.one_by_one, simplified, choice, given)

        def write(placed: Placed) -> Stages:
            return self._write(placed, simplified, choice, given)

        prices = self.one_by_one.chooser.mesh.prices
        return better_of(write, self.one_by_one, self.together, prices)

    def _write(
        self, placed: Placed, simplified: Simplified, choice: Choice, given: Given
    ) -> Stages:
        planned = plan(placed, simplified.layout, choice)
        # Choices differ in what planning rewrites. Where it rewrites nothing, they are the same.
        alike = planned.graph is placed.graph
        if alike and id(placed) in self.written:
            return self.written[id(placed)]
        reduced = reduce(planned, simplified.layout, choice)
        written = _write(reduced, simplified, given, phased=not choice.keep)
        stages = Stages(simplified, placed, planned, reduced, written, written.program)
        if alike:
            self.written[id(placed)] = stages
        return stages


def _write(reduced: Reduced, simplified: Simplified, given: Given, phased: bool) -> Written:
    """Writes the program of one device."""
    graph, layout = reduced.planned.graph, simplified.layout
    hardware = reduced.planned.chooser.hardware
    input_layouts = _boundary_layouts(graph.inputs, graph.input_paths, layout, given.inputs)
    output_layouts = _boundary_layouts(graph.outputs, graph.output_paths, layout, given.outputs)
    scope = Scope(reduced, phased=phased)
    inputs = []
    for tensor, where in zip(graph.inputs, input_layouts, strict=True):
        value = scope.builder.value(tensor.shape, tensor.dtype, where)
        scope.define(tensor, value)
        inputs.append(value)
    scope.run(graph.operations)
    outputs = []
    for tensor, where in zip(graph.outputs, output_layouts, strict=True):
        scope.builder.source = tensor.source
        outputs.append(scope.get(tensor, where))
    outputs = without_pads(scope.builder, inputs, outputs)
    program = SpmdProgram(
        graph.name,
        simplified.mesh,
        layout,
        scope.builder.finish(inputs, outputs),
        graph.input_paths,
        graph.output_paths,
        scopes=tuple(paths_of(graph)),
        unused=tuple(reduced.planned.unused),
        notes=(*graph.notes, *lookalikes(graph, layout)),
        tile=None if hardware is None else hardware.tile,
    )
    return Written(program)


def _boundary_layouts(
    tensors: Sequence[Tensor],
    paths: Sequence[str],
    layout: Layout,
    given: Mapping[int, TensorLayout],
) -> list[TensorLayout]:
    """Returns the layouts of inputs or outputs; dims that do not divide are stored with pads."""
    rows = enumerate(zip(tensors, paths, strict=True))
    return [given.get(i) or layout.assign(tensor.shape, path) for i, (tensor, path) in rows]


def tensors_of(graph: Graph) -> Iterable[tuple[Tensor, Operation | None]]:
    """Yields every tensor of a graph and its bodies, with the operation that makes it, if any."""
    for tensor in graph.inputs:
        yield tensor, None
    for op in graph.operations:
        for body in op.bodies:
            yield from tensors_of(body)
        for tensor in op.outputs:
            yield tensor, op


def validate(graph: Graph, mesh: Mesh, layout: Layout, mesh_given: bool = True) -> None:
    """Raises ValueError with all problems unless a layout fits a graph on a mesh.

    Args:
        mesh_given: whether the user has given the mesh, for the error.
    """
    shapes = {tensor.shape for tensor, _ in tensors_of(graph)}
    names = {name for shape in shapes for name in shape.names}
    # A program that creates a state has only some of the dims that the layout of the job names.
    creating = creates_state(graph)

    def check_with(tensors: Iterable[LabelledTensor], function: Callable, **more: bool) -> Any:
        return function(
            layout, mesh, tensors, known_dims=names, allow_unknown_dims=creating, **more
        )

    # A tensor without a path is where its dims say, so one stands for all that have them. Names in
    # the source are slow to look up, so only errors have them.
    unlike = [("", shape, "", UNKNOWN) for shape in shapes]
    unlike += [("", t.shape, path, t.source) for t, path in tensors_with_paths(graph)]
    if check_with(unlike, problems):
        check_with(_labelled(graph), check, mesh_given=mesh_given)
    if not creating:
        warn_of_layout(graph, layout)


def _labelled(graph: Graph) -> list[LabelledTensor]:
    """Returns every tensor with its name in the source, in the order in which errors name them.

    Results of the forward pass come first, since their lines are the user's. Then come tensors with
    paths, then gradients and updates.
    """
    made = [
        (statement_at(op.source).names[0], t.shape, "", op.source)
        for t, op in tensors_of(graph)
        if op is not None
    ]
    with_paths = [
        (path or "result", t.shape, path, t.source) for t, path in tensors_with_paths(graph)
    ]
    forward = next((i for i, row in enumerate(made) if row[3].backward), len(made))
    return [*made[:forward], *with_paths, *made[forward:]]
