"""Lowering: a graph, a mesh and a layout become an SpmdProgram.

The stages stand in rooms of their own; here they follow each other. `plan` gives every tensor its
layout and every operation its plan; `place_reductions` decides where partial sums are reduced; a
`Scope` writes the program; `run_passes` improves it. `choose` does this in several ways where
memory is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.layouts.validate import LabelledTensor, check, problems
from meshdsl.lowering.choices import Choice, choose
from meshdsl.lowering.graphs.group_sums import sum_groups
from meshdsl.lowering.graphs.hoist import hoist_casts
from meshdsl.lowering.graphs.lookalikes import lookalikes
from meshdsl.lowering.graphs.sharing import share
from meshdsl.lowering.graphs.simplify import prune, simplify
from meshdsl.lowering.graphs.wide_sums import widen
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.passes import run_passes
from meshdsl.lowering.placement.keeping import allowance, keep_gathered
from meshdsl.lowering.placement.partial_sums import place_reductions
from meshdsl.lowering.placement.planning import plan
from meshdsl.lowering.placement.storage import named
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.unused import advise, paths_of, tell
from meshdsl.lowering.writing.scope import Scope
from meshdsl.ops.random import KEY
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.statements import statement_at


def lower(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options | None = None,
    donated: Sequence[bool] = (),
) -> SpmdProgram:
    """Lowers a traced graph.

    Args:
        donated: per input, whether an output may take its place.

    Raises:
        ValueError: the layout does not fit the program; every problem is told.
    """
    options = options or DEFAULT
    graph = simplify(graph)
    validate(graph, mesh, layout)

    def write(choice: Choice) -> SpmdProgram:
        chosen = replace(options, prefetch=choice.prefetch)
        if choice.ring:
            chosen = replace(chosen, context="ring")
        program = _write(graph, mesh, layout, chosen, choice)
        program = replace(program, donated=tuple(donated))
        if options.weights != "auto":
            return run_passes(program, chosen)
        kept = keep_gathered(program, options.memory)
        found = run_passes(kept, chosen)
        if kept is program or found.peak_bytes <= allowance(program, options.memory):
            return found
        usual = run_passes(program, chosen)  # passes have made more of what is kept than foreseen
        return found if found.peak_bytes <= usual.peak_bytes else usual

    program = choose(write, graph, layout, options)
    tell(program, options)
    return program


def _write(
    graph: Graph, mesh: Mesh, layout: Layout, options: Options, choice: Choice
) -> SpmdProgram:
    """Writes the program of a simplified graph, all choices made."""
    if choice.keep:
        graph = simplify(hoist_casts(graph, _weights(graph, layout)))
    planned = plan(graph, mesh, layout, options, choice)
    grouped = sum_groups(planned)
    if grouped is not graph:
        graph = simplify(grouped)
        planned = plan(graph, mesh, layout, options, choice)
    if choice.share:
        shared = share(planned)
        if shared.graph is not graph:
            graph = prune(shared.graph)
            planned = plan(graph, mesh, layout, options, choice, shared.places)
    keep = place_reductions(planned)
    wide = widen(planned, keep, options)
    if wide.graph is not planned.graph:
        graph = prune(wide.graph)
        planned = plan(graph, mesh, layout, options, choice, {**planned.kept, **wide.places})
        keep = place_reductions(planned)
    ins = _ends(graph.inputs, graph.input_paths, mesh, layout)
    outs = _ends(graph.outputs, graph.output_paths, mesh, layout)
    scope = Scope(planned, keep, phased=not choice.keep)
    inputs = []
    for tensor, where in zip(graph.inputs, ins, strict=True):
        value = scope.builder.value(tensor.shape, tensor.dtype, where)
        scope.define(tensor, value)
        inputs.append(value)
    scope.run(graph.operations)
    outputs = []
    for tensor, where in zip(graph.outputs, outs, strict=True):
        scope.builder.source = tensor.source
        outputs.append(scope.get(tensor, where))
    block = scope.builder.finish(inputs, outputs)
    ends = graph.input_paths, graph.output_paths
    return SpmdProgram(
        graph.name,
        mesh,
        layout,
        block,
        *ends,
        scopes=tuple(paths_of(graph)),
        unused=tuple(planned.unused),
        notes=(*graph.notes, *lookalikes(graph, layout)),
    )


def _weights(graph: Graph, layout: Layout) -> list[Tensor]:
    """Returns the inputs that are stored elsewhere than where they are used."""
    rows = zip(graph.inputs, graph.input_paths, strict=True)
    return [t for t, path in rows if layout.assign(t.shape, path) != layout.inside(t.shape)]


def _ends(
    tensors: Sequence[Tensor], paths: Sequence[str], mesh: Mesh, layout: Layout
) -> list[TensorLayout]:
    """Returns where inputs or outputs are; what does not divide is stored with pads."""
    rows = zip(tensors, paths, strict=True)
    return [layout.assign(tensor.shape, path) for tensor, path in rows]


def tensors_of(graph: Graph) -> Iterable[tuple[Tensor, Operation | None]]:
    """Yields every tensor of a graph and its bodies, with the operation that made it."""
    for tensor in graph.inputs:
        yield tensor, None
    for op in graph.operations:
        for body in op.bodies:
            yield from tensors_of(body)
        for tensor in op.outputs:
            yield tensor, op


def validate(graph: Graph, mesh: Mesh, layout: Layout, mesh_given: bool = True) -> None:
    """Raises ValueError, telling every problem, unless a layout fits a graph on a mesh.

    Args:
        mesh_given: whether the user has given the mesh, for the error.
    """
    names = {name for tensor, _ in tensors_of(graph) for name in tensor.shape.names}
    # A program that makes everything from keys creates a state; it has only some of the dims that
    # the layout of the whole job names.
    creates = all(t.shape.find(KEY.name) is not None for t in graph.inputs)

    def ask(function: Callable, label: Callable[[Operation], str], **more: bool) -> Any:
        tensors = _labelled(graph, label)
        return function(layout, mesh, tensors, known_dims=names, allow_unknown_dims=creates, **more)

    if ask(problems, lambda op: op.name):  # the names are looked up where they are shown
        ask(check, lambda op: statement_at(op.source).names[0], mesh_given=mesh_given)
    if not creates:
        advise(graph, layout)


def _labelled(graph: Graph, label: Callable[[Operation], str]) -> list[LabelledTensor]:
    """Returns every tensor with a label, those first whose lines tell most.

    These are what the forward pass makes, then what has a path, then gradients and updates.
    """
    made = [(label(op), t.shape, "", op.source) for t, op in tensors_of(graph) if op is not None]
    ends = [(path or "result", t.shape, path, t.source) for t, path in named(graph)]
    forward = next((i for i, row in enumerate(made) if row[3].backward), len(made))
    return [*made[:forward], *ends, *made[forward:]]
