"""Lowering: a graph, a mesh and a layout become an SpmdProgram.

Every tensor has one layout, given by the layout rules; what only operations see may stay split for
longer (see `postponed`); a partition rule plans each operation; a cut decides where partial sums
are reduced. What is left is written down here: each operand is fetched in the layout its operation
takes it in, and what has been moved there once is used again. Tensors made of nothing (constants,
index ramps and what is elementwise of them) are never moved: each reader gets them made in the
layout it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.layouts.validate import LabelledTensor, check, problems
from meshdsl.lowering.choices import USUAL, Choice, choose
from meshdsl.lowering.communication.reshard import reshard, reshard_cost
from meshdsl.lowering.graphs.from_nothing import constants
from meshdsl.lowering.graphs.group_sums import sum_groups
from meshdsl.lowering.graphs.hoist import hoist_casts
from meshdsl.lowering.graphs.lookalikes import lookalikes
from meshdsl.lowering.graphs.sharing import share
from meshdsl.lowering.graphs.simplify import prune, simplify
from meshdsl.lowering.graphs.wide_sums import widen
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.partition import RULES, Case, Plan
from meshdsl.lowering.partition.attention.rules import unused
from meshdsl.lowering.passes import run_passes
from meshdsl.lowering.placement.keeping import allowance, keep_gathered
from meshdsl.lowering.placement.partial_sums import Planned, partial_form, place_reductions
from meshdsl.lowering.placement.postponed import postponed
from meshdsl.lowering.placement.storage import named, stored
from meshdsl.lowering.program import SpmdProgram, Value
from meshdsl.lowering.unused import advise, paths_of, tell
from meshdsl.lowering.writing.bodies import BODIES
from meshdsl.lowering.writing.builder import INT32, BlockBuilder
from meshdsl.ops.random import KEY
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.statements import statement_at

BOOL = np.dtype("bool")
NOTHING: Mapping[Tensor, TensorLayout] = MappingProxyType({})


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
    return [t for t, path in rows if layout.assign(t.shape, path) != layout.assign(t.shape)]


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


def plan(
    graph: Graph,
    mesh: Mesh,
    layout: Layout,
    options: Options = DEFAULT,
    choice: Choice = USUAL,
    kept: Mapping[Tensor, TensorLayout] = NOTHING,
) -> Planned:
    """Gives every tensor its layout and every operation its plan.

    Args:
        kept: the layouts of what the forward pass keeps moved for the backward pass.
    """
    store = stored(graph, layout, mesh, choice.keep, choice.reduce_each)
    places = {**store, **kept}
    layouts: dict[Tensor, TensorLayout] = {}
    plans: dict[Operation, Plan] = {}
    cases: dict[Operation, Case] = {}

    def visit(graph: Graph, visit: Callable) -> None:
        for tensor in graph.inputs:
            layouts[tensor] = places.get(tensor) or layout.assign(tensor.shape)
        for op in graph.operations:
            for tensor in op.outputs:
                layouts[tensor] = places.get(tensor) or layout.assign(tensor.shape)
            for body in op.bodies:
                visit(body, visit)
            if op.name not in BODIES:
                operands = tuple([layouts[tensor] for tensor in op.inputs])
                results = tuple([layouts[tensor] for tensor in op.outputs])
                cases[op] = Case(op, operands, results, mesh, options, graph)
                plans[op] = RULES[op.name](cases[op])

    visit(graph, visit)  # given itself: a function that knows itself is garbage in a cycle
    constant = constants(graph)
    late = postponed(graph, layouts, plans, mesh, places, constant)
    layouts.update(late)
    for op, case in cases.items() if late else ():
        if any(t in late for t in (*op.inputs, *op.outputs)):
            moved = _case(op, layouts, mesh)
            cases[op] = replace(case, operands=moved.operands, results=moved.results)
            plans[op] = RULES[op.name](cases[op])
    # Unused options are reported only if the user set them; here lowering tries a ring by itself.
    idle = () if choice.ring else tuple(unused([*cases.values()]))
    return Planned(graph, plans, layouts, mesh, constant, frozenset(store), kept, idle)


def _case(op: Operation, layouts: dict, mesh: Mesh, without: frozenset[str] = frozenset()) -> Case:
    def of(tensors: Sequence[Tensor]) -> tuple[TensorLayout, ...]:
        return tuple(layouts[t].drop(without) if without else layouts[t] for t in tensors)

    return Case(op, of(op.inputs), of(op.outputs), mesh)


@dataclass
class Scope:
    """The lowering of one block.

    Attributes:
        versions: where each tensor is to be had, by layout.
        outer: for the consts of a body, the tensor that the parent scope knows.
        consts: values of the parent that the body uses, and what they are inside.
        masked: whole tensors as summands: one device has them, the others have zeros.
        phased: whether a backward pass may follow a forward pass here, for which weights are
            gathered again.
        again: stored tensors behind a barrier that waits for the backward pass, so that no compiler
            finds what is gathered again to be the same.
    """

    planned: Planned
    keep: dict[Tensor, frozenset[str]]
    parent: Scope | None = None
    versions: dict[Tensor, dict[TensorLayout, Value]] = field(default_factory=dict)
    outer: dict[Tensor, Tensor] = field(default_factory=dict)
    consts: dict[Value, Value] = field(default_factory=dict)
    masked: dict[tuple[Tensor, TensorLayout], Value] = field(default_factory=dict)
    from_nothing: dict[Tensor, Operation] = field(default_factory=dict)
    phased: bool = False
    again: dict[Tensor, Value] = field(default_factory=dict)
    builder: BlockBuilder = field(init=False)

    def __post_init__(self) -> None:
        self.builder = BlockBuilder(self.planned.mesh)

    def define(self, tensor: Tensor, value: Value) -> None:
        self.versions.setdefault(tensor, {})[value.layout] = value

    def run(self, operations: Sequence[Operation]) -> None:
        for op in operations:
            if self.phased and op.source.backward:
                self._turn(op)
            if op.name in BODIES:
                BODIES[op.name](self, op)
            elif op.outputs and op.outputs[0] in self.planned.constant:
                self.from_nothing[op.outputs[0]] = op
            else:
                self._operation(op)

    def _turn(self, op: Operation) -> None:
        """Forgets, before the backward pass, where stored tensors have been moved."""
        self.phased = False
        if not self.builder.instructions:
            return
        late = self.builder.instructions[-1].outputs[0]
        for tensor in [t for t in self.versions if t in self.planned.stored]:
            home = self.planned.layouts[tensor]
            versions = self.versions[tensor]
            if len(versions) > 1 and home in versions:
                value = versions[home]
                results = [(v.shape, v.dtype, v.layout) for v in (value, late)]
                self.builder.source = op.source
                params = {"stored": True}
                behind = self.builder.add("barrier", (value, late), results, params)
                self.again[tensor] = behind[0]
                self.versions[tensor] = {home: value}

    def _operation(self, op: Operation) -> None:
        through = self.keep.get(op.outputs[0], frozenset())
        plan = self.planned.plans[op]
        if through:
            plan = RULES[op.name](_case(op, self.planned.layouts, self.planned.mesh, through))  # type: ignore[arg-type]
        taken = list(plan.operands)
        for axis in sorted(through):
            for position in self._summands(op, plan, axis):
                taken[position] = taken[position].add_partial([axis])
        self.builder.source = op.source
        inputs = [self.get(t, where) for t, where in zip(op.inputs, taken, strict=True)]
        self.builder.source = op.source
        for tensor, value in zip(op.outputs, plan.emit(self.builder, inputs), strict=True):
            self.define(tensor, value)

    def _summands(self, op: Operation, plan: Plan, axis: str) -> Sequence[int]:
        """Returns the operands that are taken as partial sums over `axis`."""
        if plan.additive:
            return plan.linear
        return [i for i in plan.linear if self._is_partial(op.inputs[i], axis)][:1]

    def _is_partial(self, tensor: Tensor, axis: str) -> bool:
        if tensor in self.outer:
            assert self.parent is not None
            return self.parent._is_partial(self.outer[tensor], axis)
        held = self.versions.get(tensor, {})
        return any((axis, "sum") in layout.partial for layout in held)

    def get(self, tensor: Tensor, where: TensorLayout) -> Value:
        """Returns a tensor in a layout, moving it there if it has not been moved before."""
        held = self.versions.setdefault(tensor, {})
        if where in held:
            return held[where]
        if tensor in self.outer and not self._gathers(tensor, where):
            value = self._capture(tensor, where)
        elif where.partial and not self._can_leave(tensor, where):
            if (tensor, where) not in self.masked:  # no version: the tensor is not partial itself
                self.masked[tensor, where] = self._masked(tensor, where)
            return self.masked[tensor, where]
        elif tensor in self.from_nothing:
            value = self._make(tensor, where)
        else:
            value = self._move(tensor, where)
        held[where] = value
        return value

    def _capture(self, tensor: Tensor, where: TensorLayout) -> Value:
        assert self.parent is not None
        outside = self.parent.get(self.outer[tensor], where)
        if outside not in self.consts:
            self.consts[outside] = self.builder.value(tensor.shape, tensor.dtype, where)
        return self.consts[outside]

    def _gathers(self, tensor: Tensor, where: TensorLayout) -> bool:
        """Whether a stored tensor of the parent's is moved here, where it is used."""
        home = self.planned.layouts[tensor]
        if tensor not in self.planned.stored or where.partial or where == home:
            return False
        self.get(tensor, home)
        return True

    def _can_leave(self, tensor: Tensor, where: TensorLayout) -> bool:
        return all(self._is_partial(tensor, axis) for axis in where.partial_axes)

    def _masked(self, tensor: Tensor, where: TensorLayout) -> Value:
        """Makes a whole value a summand: the first device along the axes has it, others zero."""
        axes = [a for a in where.partial_axes if not self._is_partial(tensor, a)]
        shape, dtype = tensor.shape, tensor.dtype
        op = self.from_nothing.get(tensor)
        if op is not None and op.name == "full" and op.params["value"] == 0:
            return self.builder.one("full", (), shape, dtype, where, value=0)
        value = self.get(tensor, where.drop(axes))
        index = self.builder.device_index(axes)
        zero = self.builder.number(0, INT32)
        first = self.builder.one("equal", (index, zero), index.shape, BOOL, index.layout)
        blank = self.builder.number(0, dtype)
        return self.builder.one("select", (first, value, blank), shape, dtype, where)

    def _make(self, tensor: Tensor, where: TensorLayout) -> Value:
        op = self.from_nothing[tensor]
        case = Case(op, (), (where,), self.planned.mesh)
        if op.name == "rename":
            before = where.rename({v: k for k, v in op.params["names"].items()})
            case = Case(op, (before,), (where,), self.planned.mesh)
        plan = RULES[op.name](case)
        inputs = [self.get(t, at) for t, at in zip(op.inputs, plan.operands, strict=True)]
        reader, self.builder.source = self.builder.source, op.source
        (value,) = plan.emit(self.builder, inputs)
        self.builder.source = reader
        return value

    def _move(self, tensor: Tensor, where: TensorLayout) -> Value:
        held = self.versions[tensor]
        home = partial_form(self.planned.layouts[tensor], frozenset(where.partial_axes))
        if where != home and not any(set(v.partial) == set(where.partial) for v in held):
            self.get(tensor, home)
        size, mesh = tensor.dtype.itemsize, self.planned.mesh
        starts = [v for v in held if set(where.partial) <= set(v.partial)]
        start = min(starts, key=lambda v: reshard_cost(tensor.shape, size, v, where, mesh))
        value, reader = held[start], self.builder.source
        if start == self.planned.layouts[tensor]:
            value = self.again.get(tensor, value)
        for move in reshard(tensor.shape, size, start, where, mesh):
            result = [(tensor.shape, tensor.dtype, move.result)]
            op, params = move.op, move.params
            if op in ("all_reduce", "reduce_scatter"):  # told with the line that left the sum
                self.builder.source = tensor.source
            if mesh.extent(params["axes"]) == 1:  # nothing moves between groups of one device
                op, params = "slice", {"axes": (), "dim": ""}
            value = self.builder.add(op, (value,), result, params)[0]
            self.builder.source = reader
            held.setdefault(move.result, value)
        return value

    # Bodies; see `lowering.writing.bodies`.

    def inside(self, op: Operation, inner: Sequence[Tensor], outer: Sequence[Tensor]) -> Scope:
        """Returns a scope for a body of `op`, whose tensors `inner` are this one's `outer`."""
        scope = Scope(self.planned, self.keep, self)
        scope.phased = self.phased and not op.source.backward
        scope.outer = dict(zip(inner, outer, strict=True))
        return scope

    def place(self, tensor: Tensor, kept: Tensor) -> TensorLayout:
        """Returns the layout of `tensor`, partial over the axes over which `kept` stays partial."""
        return partial_form(self.planned.layouts[tensor], self.keep.get(kept, frozenset()))
