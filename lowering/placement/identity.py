"""Identity: names for the tensors of a graph, which do not depend on line numbers.

* The name of an input is its path. The name of a tensor that `md.name` names is that path.
* The name of an operation's result consists of the function, the name that the statement assigns
  to, and the operation: `Attention/query.einsum`. In the backward pass it is
  `Attention/query.grad.einsum`.
* Names of tensors in a body begin with the name of the operation that runs it:
  `states/h.scan/Attention/query.einsum`. If there are several bodies, the name of the body comes
  next. The inputs of a body are numbered: `states/h.scan/in2`. Carries of a while loop have names
  in its body, not in its condition.
* The second of several results is `top_k.top_k:1`. The second tensor with a name has `#2` appended.

The names are those of the simplified graph. Lowering may rewrite that graph; the tensors that it
adds have no names, so a `Placement` does not decide about them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.graphs.from_nothing import constants
from meshdsl.lowering.program import SpmdProgram
from meshdsl.lowering.stages import Given, Reduced, Simplified
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.statements import statement_at


def names_of(graph: Graph) -> dict[Tensor, str]:
    """Returns the name of every tensor of a graph and its bodies, in order; names are unique."""
    times: Counter[str] = Counter()
    names: dict[Tensor, str] = {}
    for tensor, name in _named(graph, ""):
        times[name] += 1
        names[tensor] = name if times[name] == 1 else f"{name}#{times[name]}"
    return names


def _named(graph: Graph, prefix: str) -> Iterator[tuple[Tensor, str]]:
    for number, tensor in enumerate(graph.inputs):
        path = graph.input_paths[number] if graph.input_paths else ""
        yield tensor, path or f"{prefix}in{number}"
    for op in graph.operations:
        base = prefix + _base_name(op)
        for number, tensor in enumerate(op.outputs):
            name = graph.names.get(tensor, base)
            yield tensor, name if number == 0 or tensor in graph.names else f"{base}:{number}"
        bodies = {key: body for key, body in op.params.items() if isinstance(body, Graph)}
        for key, body in bodies.items():
            inner = _named(body, f"{base}/" if len(bodies) == 1 else f"{base}/{key}/")
            # The condition of a while loop reads the carries where the body has them.
            carried = {*body.inputs[op.params["consts"] :]} if key == "condition" else set()
            yield from (row for row in inner if row[0] not in carried)


def _base_name(op: Operation) -> str:
    """Returns `Attention/query.einsum`: the function, the statement's name, the operation."""
    name = statement_at(op.source).names[0] + (".grad" if op.source.backward else "")
    layer = op.source.layer
    return f"{layer}/{name}.{op.name}" if layer else f"{name}.{op.name}"


def given_by(placement: Placement | None, simplified: Simplified) -> Given:
    """Returns the layouts that a placement gives to the tensors of a graph.

    Raises:
        ValueError: tensors are not in the graph, or cannot have their layouts; all are listed.
    """
    if placement is None:
        return Given()
    graph, mesh = simplified.graph, simplified.mesh
    unsplit = [axis for axis, size in mesh.axes if size == 1]
    by_name = {name: tensor for tensor, name in names_of(graph).items()}
    problems = [*_problems("tensor", placement.tensors, by_name, mesh)]
    boundary_layouts = []
    for role, where, paths, tensors in (
        ("input", placement.inputs, graph.input_paths, graph.inputs),
        ("output", placement.outputs, _output_names(graph.output_paths), graph.outputs),
    ):
        problems += _problems(role, where, dict(zip(paths, tensors, strict=True)), mesh)
        rows = [(i, path) for i, path in enumerate(paths) if path in where]
        boundary_layouts.append({i: where[path].drop(unsplit) for i, path in rows})
    constant = constants(graph)
    problems += [
        f"tensor `{name}` is a constant, which every reader computes for itself: leave it out"
        for name in placement.tensors
        if by_name.get(name) in constant
    ]
    for name, axes in placement.partial.items():
        if name not in placement.tensors:
            problems.append(
                f"tensor `{name}` stays partial, and has no layout for when it is reduced"
            )
        problems += [_no_axis(name, axis, mesh) for axis in sorted(axes - {*mesh.names})]
    if problems:
        raise ValueError("\n  ".join([_UNFIT, *problems]))
    return Given(
        {by_name[name]: name for name in placement.tensors},
        {by_name[name]: where.drop(unsplit) for name, where in placement.tensors.items()},
        {by_name[name]: axes.difference(unsplit) for name, axes in placement.partial.items()},
        *boundary_layouts,
    )


_UNFIT = "the placement does not fit the program; f.stages(...).placement has all names"


def _problems(
    role: str, layouts: Mapping[str, TensorLayout], tensors: Mapping[str, Tensor], mesh: Mesh
) -> Iterator[str]:
    """Yields the problems with the layouts of some tensors."""
    for name, layout in layouts.items():
        if name not in tensors:
            yield f"there is no {role} `{name}`{_nearest(name, tensors)}"
            continue
        tensor = tensors[name]
        for dim, _ in layout.splits:
            if tensor.shape.find(dim) is None:
                hint = did_you_mean(dim, tensor.shape.names)
                yield f"{role} `{name}` {tensor} ({tensor.source}) has no dim `{dim}`{hint}"
        for axis in sorted(layout.split_axes - {*mesh.names}):
            yield _no_axis(name, axis, mesh)


def _nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint at tensors of a statement that assigns to `name`, or at similar names."""
    same = [other for other in names if other.split("/")[-1].split(".")[0] == name]
    if same:
        return f"; `{name}` is assigned from " + ", ".join(f"`{other}`" for other in same[:4])
    return did_you_mean(name, list(names))


def _no_axis(name: str, axis: str, mesh: Mesh) -> str:
    if not mesh.axes:
        return f"`{name}`: there is no axis `{axis}`, since there is no mesh: give a mesh"
    return f"`{name}`: no axis `{axis}` in mesh `{mesh}`{did_you_mean(axis, mesh.names)}"


def _output_names(paths: Sequence[str]) -> list[str]:
    """Returns the names of outputs; the only result of a function has no path."""
    return [path or "result" for path in paths]


def placement_of(graph: Graph, reduced: Reduced, program: SpmdProgram) -> Placement:
    """Returns the layouts of a simplified graph's tensors in the program that is written for it.

    Constants, and tensors that lowering has removed from the graph, are left out.
    """
    planned = reduced.planned
    names = {
        name: tensor
        for tensor, name in names_of(graph).items()
        if tensor in planned.layouts and tensor not in planned.constant
    }
    block = program.block
    inputs = zip(program.input_paths, block.inputs, strict=True)
    outputs = zip(_output_names(program.output_paths), block.outputs, strict=True)
    return Placement(
        {path: value.layout for path, value in inputs},
        {path: value.layout for path, value in outputs},
        {name: planned.layouts[tensor] for name, tensor in names.items()},
        {name: reduced.partial[t] for name, t in names.items() if reduced.partial.get(t)},
    )
