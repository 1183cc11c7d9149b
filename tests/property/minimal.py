"""Shrinks a failing case to a minimal program, and prints that as Python to paste.

A program shrinks by cutting operations off (their results become inputs, with the values they had),
by dropping outputs, layout rules and mesh axes, as long as it keeps failing.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import numpy as np

import meshdsl as md
import meshdsl.ops
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.validate import LayoutError
from meshdsl.lowering.backends import load
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.lower import lower, tensors_of
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, Primitive, TensorNames
from meshdsl.tracing.trace import Trace, bind, tracing
from tests.property.pads import poisoned

TOLERANCE = 1e-9


@dataclass(frozen=True)
class Failure:
    """A graph whose outputs on a mesh differ from what they are on one device."""

    graph: Graph
    values: dict[Tensor, np.ndarray]
    mesh: md.Mesh
    layout: Layout
    backend: str
    options: Options = DEFAULT

    def run(self, mesh: md.Mesh, layout: Layout, backend: str) -> list[np.ndarray]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of what a layout asks for in vain
            program = lower(self.graph, mesh, layout, self.options)
        executable = load(backend).Executable(program)
        found = executable.call_flat([self.values[t] for t in self.graph.inputs])
        rows = zip(found, self.graph.outputs, executable.cuts, strict=True)
        return [np.asarray(md.NamedArray(array, t.shape, cuts)) for array, t, cuts in rows]

    def holds(self) -> bool:
        """Whether it still fails: other numbers, or an exception that one device does not raise."""
        try:
            expected = self.run(md.Mesh(), Layout(), "numpy")
        except Exception:
            return False
        try:
            with poisoned():
                found = self.run(self.mesh, self.layout, self.backend)
        except LayoutError:  # rules for dims that are gone: another failure than the one looked for
            return False
        except Exception:
            return True
        return not all(map(_equal, found, expected))

    def outputs(self) -> Iterator[Failure]:
        """Yields this failure with single tensors for outputs, in the order they are made.

        Those that are outputs already come first, with their paths.
        """
        if len(self.graph.outputs) > 1:
            for tensor, path in zip(self.graph.outputs, self.graph.output_paths, strict=True):
                yield self._with(replace(self.graph, outputs=(tensor,), output_paths=(path,)))
        for tensor in (t for op in self.graph.operations for t in op.outputs):
            if len(self.graph.outputs) == 1 and tensor is self.graph.outputs[0]:
                return
            yield self._with(replace(self.graph, outputs=(tensor,), output_paths=("",)))

    def without(self, operations: Sequence[Operation]) -> Failure:
        """Makes inputs of what some operations compute."""
        tensors = tuple(t for op in operations for t in op.outputs)
        graph = replace(
            self.graph,
            operations=tuple(op for op in self.graph.operations if op not in operations),
            inputs=(*self.graph.inputs, *tensors),
            input_paths=(*self.graph.input_paths, *("",) * len(tensors)),
        )
        return self._with(graph)

    def inside(self) -> Iterator[Failure]:
        """Yields the bodies of loops as programs of their own, run once, on the first slices."""
        for op in self.graph.operations:
            if op.name != "scan":
                continue
            body, dim = op.params["body"], op.params["dim"]
            stacked = op.params["consts"] + op.params["carries"]
            paths = dict(zip(self.graph.inputs, self.graph.input_paths, strict=True))
            values = {}
            for number, (outer, inner) in enumerate(zip(op.inputs, body.inputs, strict=True)):
                value = self.values[outer]
                if number >= stacked:
                    at = outer.shape.position(dim.name)
                    value = np.take(value, -1 if op.params["reverse"] else 0, at)
                values[inner] = value
            graph = replace(
                body,
                input_paths=tuple(paths.get(t, "") for t in op.inputs),
                output_paths=("",) * len(body.outputs),
            )
            yield replace(self, graph=graph, values=_filled(graph, values))._with(graph)

    def plainer(self) -> Iterator[Failure]:
        """Yields this failure with fewer layout rules, plainer options, and smaller meshes."""
        for field in fields(Options):
            if getattr(self.options, field.name) != field.default:
                options = replace(self.options, **{field.name: field.default})
                yield replace(self, options=options)
        for rule in self.layout.rules:
            yield replace(self, layout=Layout(tuple(r for r in self.layout.rules if r != rule)))
        for name, size in self.mesh.axes:
            if size > 1:
                axes = tuple((n, 1 if n == name else s) for n, s in self.mesh.axes)
                yield replace(self, mesh=md.Mesh(axes, self.mesh.slow))
            if name in self.mesh.slow:
                yield replace(self, mesh=md.Mesh(self.mesh.axes, self.mesh.slow - {name}))
            if not any(name in rule.axes for rule in self.layout.rules):
                axes = tuple(a for a in self.mesh.axes if a[0] != name)
                yield replace(self, mesh=md.Mesh(axes, self.mesh.slow - {name}))

    def _with(self, graph: Graph) -> Failure:
        """Returns this failure with another graph, without what is unused in it."""
        graph = graph.prune()
        read = {t for op in graph.operations for t in op.inputs} | set(graph.outputs)
        used = [i for i, tensor in enumerate(graph.inputs) if tensor in read]
        inputs = tuple(graph.inputs[i] for i in used)
        paths = tuple(graph.input_paths[i] for i in used)
        graph = replace(graph, inputs=inputs, input_paths=paths)
        names = {name for tensor, _ in tensors_of(simplify(graph)) for name in tensor.shape.names}
        rules = tuple(rule for rule in self.layout.rules if rule.dim in names)
        return replace(self, graph=graph, layout=Layout(rules))


def failure(case: Any, backend: str, options: Options = DEFAULT) -> Failure:
    """Returns the failure of a case, with what every tensor of it is on one device."""
    leaves = jax.tree.leaves(case.inputs, is_leaf=lambda leaf: isinstance(leaf, md.NamedArray))
    graph = simplify(case.graph)
    given = dict(zip(graph.inputs, [np.asarray(leaf.data) for leaf in leaves], strict=True))
    values = _filled(graph, given)
    return Failure(graph, values, case.mesh, case.layout, backend, options)


def _filled(graph: Graph, given: dict[Tensor, np.ndarray]) -> dict[Tensor, np.ndarray]:
    """Returns what every tensor of a graph is on one device, given its inputs."""
    tensors = [t for op in graph.operations for t in op.outputs]
    everything = replace(graph, outputs=tuple(tensors), output_paths=("",) * len(tensors))
    whole = Failure(everything, given, md.Mesh(), Layout(), "numpy")
    found = whole.run(md.Mesh(), Layout(), "numpy")
    return given | dict(zip(tensors, found, strict=True))


def minimise(found: Failure) -> Failure:
    """Returns the smallest failure that single steps lead to."""
    while True:
        before = found
        found = next((f for f in found.outputs() if f.holds()), found)
        count = len(found.graph.operations) // 2
        while count:
            for start in range(0, len(found.graph.operations), count):
                cut = found.graph.operations[start : start + count]
                smaller = found.without(cut)
                if cut and smaller.holds():
                    found = smaller
            count //= 2
        found = next((f for f in found.inside() if f.holds()), found)
        found = next((f for f in found.plainer() if f.holds()), found)
        if found is before:
            return found


def _equal(found: np.ndarray, expected: np.ndarray) -> bool:
    if expected.dtype.kind not in "fc":
        return np.array_equal(found, expected)
    scale = max(1.0, np.abs(expected).max(initial=0.0, where=np.isfinite(expected)))
    return np.allclose(found, expected, rtol=0, atol=TOLERANCE * scale, equal_nan=True)


# Printing, and what the printed program needs.


def op(name: str, *inputs: Tensor, **params: Any) -> Any:
    """Binds a primitive by name; returns its only output, or all of them."""
    outputs = bind(_primitives()[name], inputs, params).outputs
    return outputs[0] if len(outputs) == 1 else outputs


def body(function: Callable, *specs: md.NamedArray) -> Graph:
    """Returns the graph of an operation's body."""
    trace = Trace()
    with tracing(trace):
        outputs = function(*[trace.input(s.dims, s.dtype) for s in specs])
        return trace.finish(outputs)[0]


def _primitives() -> dict[str, Primitive]:
    found: dict[str, Primitive] = {}
    for module in pkgutil.walk_packages(meshdsl.ops.__path__, "meshdsl.ops."):
        values = list(vars(importlib.import_module(module.name)).values())
        values += itertools.chain(*(v.values() for v in values if isinstance(v, dict)))
        found.update({v.name: v for v in values if isinstance(v, Primitive)})
    return found


def check(
    program: Callable,
    inputs: dict[str, md.NamedArray],
    outputs: Sequence[str],
    *where: Any,
    options: Options = DEFAULT,
) -> None:
    """Raises AssertionError unless a program gives the same numbers on a mesh as on one device.

    Args:
        inputs: by their paths; a number before a path keeps equal paths apart: `"0 params/w"`.
        outputs: the paths of the results.
        where: mesh, layout and backend, as texts.
    """
    mesh, layout, backend = where
    graph = replace(
        body(program, *[md.spec(array.dims, array.dtype) for array in inputs.values()]),
        input_paths=tuple(key.partition(" ")[2] for key in inputs),
        output_paths=tuple(outputs),
    )
    values = dict(zip(graph.inputs, [np.asarray(a) for a in inputs.values()], strict=True))
    found = Failure(graph, values, md.Mesh.parse(mesh), Layout.parse(layout), backend, options)
    expected = found.run(md.Mesh(), Layout(), "numpy")
    with poisoned():
        results = found.run(found.mesh, found.layout, backend)
    for result, want in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, want, atol=1e-9)


def as_python(found: Failure) -> str:
    """Returns the failure as a script that raises AssertionError."""
    names, lines = TensorNames(), ["import numpy as np", "import meshdsl as md"]
    lines += ["from meshdsl.lowering.options import Options"]
    lines += ["from meshdsl.tensors.slide import Slide"]
    lines += ["from tests.property.minimal import body, check, op", "", ""]
    lines += _function("program", found.graph, names, "")
    lines += ["", "inputs = {"]
    for number, (tensor, path) in enumerate(
        zip(found.graph.inputs, found.graph.input_paths, strict=True)
    ):
        array = f"md.named({_literal(found.values[tensor])}, {_literal(tensor.shape)})"
        lines.append(f'    "{number} {path}": {array},')
    where = f'"{found.mesh}", "{found.layout}", "{found.backend}"'
    lines += ["}", f"outputs = {list(found.graph.output_paths)}"]
    lines.append(f"check(program, inputs, outputs, {where}, options={found.options})")
    return "\n".join(lines)


def _function(name: str, graph: Graph, names: TensorNames, indent: str) -> list[str]:
    arguments = ", ".join(names.name(t) for t in graph.inputs)
    lines = [f"{indent}def {name}({arguments}):"]
    inside = indent + "    "
    for operation in graph.operations:
        outputs = ", ".join(names.name(t) for t in operation.outputs)
        given = [f'"{operation.name}"', *(names.name(t) for t in operation.inputs)]
        for key, value in operation.params.items():
            if isinstance(value, Graph):
                inner = f"{key}_{names.name(operation.outputs[0])}"
                lines += _function(inner, value, names, inside)
                specs = [f'md.spec({_literal(t.shape)}, "{t.dtype.name}")' for t in value.inputs]
                given.append(f"{key}=body({', '.join([inner, *specs])})")
            else:
                given.append(f"{key}={_literal(value)}")
        lines.append(f"{inside}{outputs} = op({', '.join(given)})  # {operation.outputs[0]}")
        for tensor in operation.outputs:
            if (path := graph.names.get(tensor)) is not None:
                lines.append(
                    f'{inside}{names.name(tensor)} = md.name({names.name(tensor)}, "{path}")'
                )
    lines.append(f"{inside}return [{', '.join(names.name(t) for t in graph.outputs)}]")
    return lines


def _literal(value: Any) -> str:
    if isinstance(value, md.Shape):
        return f"md.Shape([{', '.join(map(_literal, value))}])"
    if isinstance(value, md.Dimension):
        return f'md.Dimension("{value.name}", {value.size})'
    if isinstance(value, np.dtype):
        return f'np.dtype("{value.name}")'
    if isinstance(value, np.ndarray):
        return f'np.array({value.tolist()}, "{value.dtype.name}")'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple | list):
        inner = ", ".join(map(_literal, value))
        if isinstance(value, list):
            return f"[{inner}]"
        return f"({inner},)" if value else "()"
    return repr(value)
