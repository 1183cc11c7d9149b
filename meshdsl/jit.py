"""jit: trace, lower, compile, run.

`md.jit(f, mesh, layout)` is called with trees of NamedArrays and returns trees of NamedArrays. Its
stages can be had one by one, as with `jax.jit`: `.trace(*args)` gives the `Graph`, `.lower(*args)`
the `SpmdProgram`, and `.lower(*args).compile()` the executable. Each signature (tree, dims, dtypes)
is compiled once.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from meshdsl.array import NamedArray, Spec
from meshdsl.dims import Shape, did_you_mean
from meshdsl.dtypes import as_dtype, short
from meshdsl.graph import Graph, Tensor
from meshdsl.mesh import Mesh
from meshdsl.module import path_of
from meshdsl.ops.body import leaves_of
from meshdsl.source import UNKNOWN, Source
from meshdsl.trace import Trace, is_tracing, tracing

if TYPE_CHECKING:
    from meshdsl.layouts.layout import Layout
    from meshdsl.lowering.program import SpmdProgram


def jit(
    function: Callable,
    mesh: Mesh | str | None = None,
    layout: Layout | str | None = None,
    backend: str = "jax",
    donate: str | Sequence[str] = (),
) -> Jitted:
    """Compiles a function of named tensors for a mesh.

    Args:
        function: takes and returns trees whose leaves are tensors.
        mesh: the mesh, or its text (`"data:2,model:4"`); None runs on one device.
        layout: the layout, or its text (`"batch:data; d_ff:model"`).
        backend: "jax" or "numpy" (simulates every device; the reference).
        donate: names of parameters whose buffers the caller gives up.

    Raises:
        ValueError: malformed mesh or layout, unknown backend, unknown parameter in `donate`.
    """
    return Jitted(function, mesh, layout, backend, donate)


@dataclass(frozen=True)
class Compiled:
    """An executable program, called like the function it came from."""

    jitted: Jitted
    signature: Signature
    program: SpmdProgram
    executable: Any

    def __call__(self, *args: Any) -> Any:
        leaves, signature = self.jitted.flatten(args)
        self.signature.check(signature)
        return self.run(leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs on flat array leaves."""
        results = self.executable.call_flat(leaves)
        arrays = [
            NamedArray(data, value.shape)
            for data, value in zip(results, self.program.block.outputs, strict=True)
        ]
        return jax.tree.unflatten(self.program.details["output_tree"], arrays)

    def as_text(self) -> str:
        """Returns the backend's optimised program; HLO for JAX."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        """Returns the backend's account of the memory of one device."""
        return self.executable.memory_analysis()


@dataclass(frozen=True)
class Signature:
    """What a call looks like: the tree, and dims, dtype and path of every leaf."""

    tree: Any
    avals: tuple[tuple[Shape, np.dtype], ...]

    def check(self, given: Signature) -> None:
        """Raises ValueError, telling every leaf that differs, unless `given` is the same."""
        if given == self:
            return
        if given.tree != self.tree:
            raise ValueError(
                "the arguments have another structure than the traced ones:\n"
                f"  traced  {self.tree}\n  given   {given.tree}"
            )
        paths = _paths(self.tree)
        problems = [
            f"  {path}: traced as {short(d)}{s}, given {short(e)}{t}"
            for path, (s, d), (t, e) in zip(paths, self.avals, given.avals, strict=True)
            if (s, d) != (t, e)
        ]
        raise ValueError("\n".join(["arguments differ from the traced ones:", *problems]))


def _paths(tree: Any) -> list[str]:
    numbered = jax.tree.unflatten(tree, range(tree.num_leaves))
    return [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]


class Jitted:
    """A function with its mesh and layout; see `jit`."""

    def __init__(
        self,
        function: Callable,
        mesh: Mesh | str | None,
        layout: Layout | str | None,
        backend: str,
        donate: str | Sequence[str],
    ) -> None:
        from meshdsl.layouts.layout import Layout
        from meshdsl.lowering import backends

        self.function = function
        self.mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh or Mesh()
        parsed = Layout.parse(layout) if isinstance(layout, str) else layout or Layout()
        self.layout = parsed if mesh is not None else Layout()
        self.backend = backend
        self._backend = backends.load(backend)
        self.name = getattr(function, "__name__", type(function).__name__)
        self._parameters = inspect.signature(function)
        self.donate = (donate,) if isinstance(donate, str) else tuple(donate)
        names = list(self._parameters.parameters)
        for name in self.donate:
            if name not in names:
                hint = did_you_mean(name, names)
                raise ValueError(
                    f"donate={name!r} is no parameter of {self.name}({', '.join(names)}){hint}"
                )
        self._compiled: dict[Signature, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_tracing():  # inside another function's trace it is an ordinary function
            return self.function(*args, **kwargs)
        leaves, signature = self.flatten(args, kwargs)
        compiled = self._compiled.get(signature)
        if compiled is None:
            compiled = self._compile(signature)
        return compiled.run(leaves)

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """Returns the graph for arguments like these (`md.spec` leaves will do)."""
        return self._trace(self.flatten(args, kwargs)[1])[0]

    def lower(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """Returns the program for arguments like these (`md.spec` leaves will do)."""
        return self._lower(self.flatten(args, kwargs)[1])

    def as_jax(self, *args: Any, **kwargs: Any) -> Callable:
        """Returns the program as a plain, jittable JAX function of the leaves.

        It takes and returns global arrays, in the order of the trees' leaves.
        """
        from meshdsl.lowering.backends import load

        return load("jax").function(self.lower(*args, **kwargs))

    def flatten(self, args: Sequence[Any], kwargs: Any = None) -> tuple[list[Any], Signature]:
        """Returns the array leaves of the arguments and their signature."""
        bound = self._parameters.bind(*args, **(kwargs or {}))
        found, tree = jax.tree.flatten(OrderedDict(bound.arguments), is_leaf=_is_leaf)
        try:
            avals = tuple([(leaf.dims, leaf.dtype) for leaf in found])
        except AttributeError:
            found = self._name_scalars(found, tree)
            avals = tuple([(leaf.dims, leaf.dtype) for leaf in found])
        leaves = [getattr(leaf, "data", leaf) for leaf in found]
        return leaves, Signature(tree, avals)

    def _name_scalars(self, found: list[Any], tree: Any) -> list[Any]:
        """Lets plain numbers stand for tensors without dims; tells every other nameless leaf."""
        result, problems = [], []
        for leaf, path in zip(found, _paths(tree), strict=True):
            if _is_leaf(leaf):
                result.append(leaf)
            elif isinstance(leaf, bool | int | float | np.generic):
                kind = {bool: "bool", int: "int32", float: "float32"}.get(type(leaf))
                data = np.asarray(leaf, kind and as_dtype(kind))
                result.append(NamedArray(data, Shape()))
            else:
                what = f"{type(leaf).__name__}{list(getattr(leaf, 'shape', []))}"
                problems.append(f"  {path}: {what} has no dim names; use md.named(array, dims)")
        if problems:
            raise ValueError("\n".join([f"{self.name}: arguments without names:", *problems]))
        return result

    def _trace(self, signature: Signature) -> tuple[Graph, Any]:
        trace = Trace()
        with tracing(trace):
            source = _definition(self.function)
            inputs = [trace.input(shape, dtype, source) for shape, dtype in signature.avals]
            arguments = jax.tree.unflatten(signature.tree, inputs)
            call = self._parameters.bind_partial()
            call.arguments.update(arguments)
            result = self.function(*call.args, **call.kwargs)
            outputs, tree = leaves_of(result)
            graph, captured = trace.finish(outputs)
        assert not captured
        keyed = jax.tree_util.tree_flatten_with_path(result, is_leaf=_is_leaf)[0]
        graph = Graph(
            graph.inputs,
            graph.operations,
            graph.outputs,
            self.name,
            tuple(_paths(signature.tree)),
            tuple(path_of(keys) for keys, _ in keyed),
        )
        return graph, tree

    def _lower(self, signature: Signature) -> SpmdProgram:
        from dataclasses import replace

        from meshdsl.lowering.lower import lower

        graph, tree = self._trace(signature)
        program = lower(graph, self.mesh, self.layout)
        details = {
            "output_tree": tree,
            "donated": [p.split("/")[0] in self.donate for p in graph.input_paths],
            "compile": lambda program: self._finish(signature, program),
        }
        return replace(program, details=details)

    def _compile(self, signature: Signature) -> Compiled:
        return self._finish(signature, self._lower(signature))

    def _finish(self, signature: Signature, program: SpmdProgram) -> Compiled:
        executable = self._backend.Executable(program, program.details["donated"])
        compiled = Compiled(self, signature, program, executable)
        self._compiled[signature] = compiled
        return compiled


def _definition(function: Callable) -> Source:
    """Returns the line at which a function is defined; its arguments are told with it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Source(code.co_filename, code.co_firstlineno, code.co_name) if code else UNKNOWN


def _is_leaf(value: Any) -> bool:
    return isinstance(value, NamedArray | Spec | Tensor)
