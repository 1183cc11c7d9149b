"""Identity: names for the tensors of a graph that depend on the program alone, not on its lines.

* An input has its path; so has what `md.name` names.
* What an operation makes is called by its function, the name that its statement assigns to, and the
  operation: `Attention/query.einsum`. In the backward pass it is `Attention/query.grad.einsum`.
* What the body of an operation makes stands behind it: `states/h.scan/Attention/query.einsum`; of
  several bodies each has its name. The inputs of a body are numbered: `states/h.scan/in2`.
  What a while loop carries is named in its body, not in its condition.
* The second of several results is `top_k.top_k:1`; the second tensor of one name has `#2`.

The names are those of the simplified graph. Lowering may rewrite that graph further; tensors that
this adds have no names, and are placed by lowering alone.
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
    """Returns the name of every tensor of a graph and its bodies, in order; no two are the same."""
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
        base = prefix + _called(op)
        for number, tensor in enumerate(op.outputs):
            name = graph.names.get(tensor, base)
            yield tensor, name if number == 0 or tensor in graph.names else f"{base}:{number}"
        bodies = {key: body for key, body in op.params.items() if isinstance(body, Graph)}
        for key, body in bodies.items():
            named = _named(body, f"{base}/" if len(bodies) == 1 else f"{base}/{key}/")
            # The condition of a while loop reads the carries where the body has them.
            carried = {*body.inputs[op.params["consts"] :]} if key == "condition" else set()
            yield from (row for row in named if row[0] not in carried)


def _called(op: Operation) -> str:
    """Returns `Attention/query.einsum`: the function, the statement's name, the operation."""
    name = statement_at(op.source).names[0] + (".grad" if op.source.backward else "")
    layer = op.source.layer
    return f"{layer}/{name}.{op.name}" if layer else f"{name}.{op.name}"


def given_by(placement: Placement | None, simplified: Simplified) -> Given:
    """Returns what a placement decides about a graph.

    Raises:
        ValueError: a tensor is not in the graph, or cannot be where it is to be; all of them.
    """
    if placement is None:
        return Given()
    graph, mesh = simplified.graph, simplified.mesh
    by_name = {name: tensor for tensor, name in names_of(graph).items()}
    wrong = [*_problems("tensor", placement.tensors, by_name, mesh)]
    ends = []
    for role, where, paths, tensors in (
        ("input", placement.inputs, graph.input_paths, graph.inputs),
        ("output", placement.outputs, _outputs(graph.output_paths), graph.outputs),
    ):
        wrong += _problems(role, where, dict(zip(paths, tensors, strict=True)), mesh)
        ends.append({i: where[path] for i, path in enumerate(paths) if path in where})
    made_anywhere = constants(graph)
    wrong += [
        f"tensor `{name}` is made where it is read, from nothing but numbers: leave it out"
        for name in placement.tensors
        if by_name.get(name) in made_anywhere
    ]
    for name, axes in placement.partial.items():
        if name not in placement.tensors:
            wrong.append(f"tensor `{name}` stays partial, and has no layout for where it is whole")
        wrong += [_no_axis(name, axis, mesh) for axis in sorted(axes - {*mesh.names})]
    if wrong:
        raise ValueError("\n  ".join([_UNFIT, *wrong]))
    return Given(
        {by_name[name]: name for name in placement.tensors},
        {by_name[name]: where for name, where in placement.tensors.items()},
        {
            by_name[name]: frozenset(axis for axis in axes if mesh.sizes[axis] > 1)
            for name, axes in placement.partial.items()
        },
        *ends,
    )


_UNFIT = "the placement does not fit the program; f.stages(...).placement has all names"


def _problems(
    role: str, where: Mapping[str, TensorLayout], tensors: Mapping[str, Tensor], mesh: Mesh
) -> Iterator[str]:
    """Yields what is wrong with the layouts of some tensors."""
    for name, layout in where.items():
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
    """Returns a hint at tensors that the same statement makes, or at names that are near."""
    same = [other for other in names if other.split("/")[-1].split(".")[0] == name]
    if same:
        return f"; `{name}` is assigned from " + ", ".join(f"`{other}`" for other in same[:4])
    return did_you_mean(name, list(names))


def _no_axis(name: str, axis: str, mesh: Mesh) -> str:
    if not mesh.axes:
        return f"`{name}`: there is no axis `{axis}`, for there is no mesh: give one"
    return f"`{name}`: no axis `{axis}` in mesh `{mesh}`{did_you_mean(axis, mesh.names)}"


def _outputs(paths: Sequence[str]) -> list[str]:
    """Returns the names of outputs; one that is all that a function returns has no path."""
    return [path or "result" for path in paths]


def placement_of(graph: Graph, reduced: Reduced, program: SpmdProgram) -> Placement:
    """Returns where the tensors of a simplified graph are in the program that is written for it.

    Without what is made where it is read, and what lowering has taken out of the graph.
    """
    planned = reduced.planned
    names = {
        name: tensor
        for tensor, name in names_of(graph).items()
        if tensor in planned.layouts and tensor not in planned.constant
    }
    block = program.block
    inputs = zip(program.input_paths, block.inputs, strict=True)
    outputs = zip(_outputs(program.output_paths), block.outputs, strict=True)
    return Placement(
        {path: value.layout for path, value in inputs},
        {path: value.layout for path, value in outputs},
        {name: planned.layouts[tensor] for name, tensor in names.items()},
        {name: reduced.partial[t] for name, t in names.items() if reduced.partial.get(t)},
    )
