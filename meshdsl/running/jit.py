"""jit: trace, lower, compile, run.

`md.jit(f, mesh, layout)` is called with trees of NamedArrays and returns trees of NamedArrays. Each
stage can be called by itself, as with `jax.jit`: `.trace(*args)` returns the `Graph`,
`.lower(*args)` the `SpmdProgram`, and `.lower(*args).compile()` the executable. Each signature
(tree, dims, dtypes) is compiled once. Type checkers see the parameters and the result of `f`.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypeVar,
    overload,
)

import jax

from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.ops.control.body import results_of
from meshdsl.running.automatic import opened
from meshdsl.running.callers import MISS, REFUSED
from meshdsl.running.calling import Direct, Order
from meshdsl.running.garbage import paused
from meshdsl.running.runnable import (
    Runnable,
    arguments_of,
    bare,
    devices_of,
    hardware_on,
    is_leaf,
    leaves_with_paths,
    lowered,
    lowering_of,
    need_numbers,
    with_numbers,
)
from meshdsl.tensors import mirrors
from meshdsl.tensors.dims import STEPS, Dimension, did_you_mean
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.idioms import answered
from meshdsl.tensors.named_array import NamedArray, need_every_dim
from meshdsl.tensors.product_precision import product_precision
from meshdsl.tensors.signature import Signature, paths_of, taking_leaves
from meshdsl.tracing.graph import Graph
from meshdsl.tracing.source import definition
from meshdsl.tracing.trace import Trace, is_tracing, open_traces, tracing

if TYPE_CHECKING:
    from meshdsl.layouts.layout import LayoutLike
    from meshdsl.layouts.placement import PlacementLike
    from meshdsl.lowering.lower import Stages
    from meshdsl.lowering.options import Options as Options
    from meshdsl.lowering.program import SpmdProgram


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")  # an object whose method is compiled
Q = ParamSpec("Q")  # the rest of that method's parameters
_XLA_DECIDES = "XLA decides where tensors are; use backend='jax'"


@overload
def jit(
    function: Callable[P, R],
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    backend: str = "jax",
    donate: str | Sequence[str] = (),
    check_finite: bool = False,
    options: Options | None = None,
    steps_per_call: int = 1,
    placement: PlacementLike | None = None,
) -> Jitted[P, R]: ...


@overload
def jit(
    function: None = None,
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    backend: str = "jax",
    donate: str | Sequence[str] = (),
    check_finite: bool = False,
    options: Options | None = None,
    steps_per_call: int = 1,
    placement: PlacementLike | None = None,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    function: Callable | None = None,
    mesh: MeshLike | None = None,
    layout: LayoutLike | None = None,
    backend: str = "jax",
    donate: str | Sequence[str] = (),
    check_finite: bool = False,
    options: Options | None = None,
    steps_per_call: int = 1,
    placement: PlacementLike | None = None,
) -> Any:
    """Compiles a function of named tensors for a mesh.

    `step = md.jit(train_step, mesh="data:2,model:4", layout="batch:data; d_ff:model")`.

    It is a decorator, too: `@md.jit`, or `@md.jit(mesh="data:2", layout="batch:data")`. On a method
    of a `md.Module`, the module is the first argument, and its leaves have paths `self/...`.

    Layout rules name an argument's leaf by the parameter's name and the keys in its tree,
    `params/mlp/w_in`. They name a result's leaf by the keys in the returned tree. Two trees that
    mirror one another follow the same rules:

    * A returned tree with the structure, dims and dtypes of one argument has its paths: after
      `return loss, params`, results `params/...` lie where the arguments do. Names above it come
      first: `return {"new": params}` gives `new/params/...`.
    * A tree with the structure and dims of the tree `params` has that name in its paths, so that
      rules for parameters hold for it too: `optimizer/m/w` becomes `optimizer/m/params/w`. None may
      stand for a leaf. Where several arguments are alike (`params` and a momentum), so are results:
      `return loss, params, momentum` gives `1/params/...` and `2/params/...`.

    `print(f.lower(...))` and `explain` report trees that look alike but follow other rules.
    `meshdsl.tensors.mirrors` has the rules in full.

    Args:
        function: takes and returns trees whose leaves are tensors. Without it, `jit` returns the
            decorator.
        mesh: the mesh, its text (`"data:2,model:4"`), its sizes (`{"data": 2}`), or one of JAX's,
            whose devices are used, and whose kind lowering then knows; None runs on one device.
        layout: the layout, its text (`"batch:data; d_ff:model"`), or its axes by dim (`{"batch":
            "data"}`). Its dims are checked without a mesh, too. With `"auto"`, or `"batch:data;
            auto"`, a search completes it for the first arguments, on the mesh, or on one of all
            devices if there is none (`meshdsl.search`).
        backend: "jax"; "jax_auto" (global tensors, which XLA splits by the layout and moves as it
            sees fit); "tf" (TensorFlow's collectives, on TPUs and hosts); or "numpy" (simulates
            every device; the reference).
        donate: names of parameters whose buffers the caller gives up.
        check_finite: whether a call whose results have a NaN or an infinity raises a
            FloatingPointError. The error names the operation that made the first one, forward or
            backward, with its line and the steps of the loops around it. See `md.check_finite` for
            the cost. Nothing is donated then.
        options: what lowering may trade, such as bytes on the wire for memory.
        steps_per_call: how often a call runs the function, without the host in between. Donated
            values go from one run to the next, by their paths in arguments and results. Other
            arguments have a first dim `steps`, and each run takes a slice of it. Other results get
            such a dim.
        placement: layouts of single tensors, or of all, instead of those that follow from `layout`:
            `f.stages(x).placement`, its text, or a part of it. It applies to all signatures of `f`.

    Raises:
        ValueError: `function` is no function, the mesh or layout is malformed, the backend or a
            parameter in `donate` is unknown, `steps_per_call` is less than 1, or it is more than 1
            with `check_finite`.

    Examples:
        >>> mesh, layout = "data:2,model:2", "batch:data; d_ff:model"
        >>> product = md.jit(lambda x, w: md.einsum(x, w, over="embed"), mesh, layout)
        >>> y = product(md.ones(md.dims(batch=8, embed=4)), md.ones(md.dims(embed=4, d_ff=6)))
        >>> print(y.dims, y.layout)
        [batch=8, d_ff=6] batch:data; d_ff:model
    """
    rest = mesh, layout, backend, donate, check_finite, options, steps_per_call, placement

    def decorate(function: Callable[P, R]) -> Jitted[P, R]:
        return Jitted(function, *rest)

    return decorate if function is None else decorate(function)


@dataclass(frozen=True)
class Compiled:
    """An executable program, called like the function it came from."""

    jitted: Jitted
    signature: Signature
    program: SpmdProgram
    executable: Any
    direct: Direct = field(default_factory=Direct, repr=False, compare=False)

    def __call__(self, *args: Any) -> Any:
        result = self.direct.call(args)
        if result is not MISS:
            return result
        leaves, signature = self.jitted.flatten(args)
        self.signature.check(signature)
        need_numbers(self.jitted.name, leaves, signature)
        self.direct.note(self, leaves, args)
        return self.run(leaves)

    def run(self, leaves: Sequence[Any]) -> Any:
        """Runs on flat array leaves."""
        arrays = Runnable(self.program, self.executable)(leaves)
        return jax.tree.unflatten(self.program.origin.results, arrays)

    def as_text(self) -> str:
        """Returns the backend's optimised program; HLO for JAX."""
        return self.executable.as_text()

    def memory_analysis(self) -> Any:
        """Returns the backend's account of the memory of one device."""
        return self.executable.memory_analysis()


class Jitted(Generic[P, R]):
    """A function with its mesh and layout; see `jit`.

    It has the name, the docstring and the signature of the function.

    Examples:
        >>> tanh = md.jit(md.tanh, mesh="data:2", layout="batch:data")
        >>> y = tanh(md.zeros(md.dims(batch=4)))
        >>> tanh
        <md.jit of tanh(x): mesh='data:2', layout='batch:data', backend='jax', 1 program compiled>
    """

    __name__: str

    def __init__(
        self,
        function: Callable[P, R],
        mesh: MeshLike | None,
        layout: LayoutLike | None,
        backend: str,
        donate: str | Sequence[str],
        check_finite: bool = False,
        options: Options | None = None,
        steps_per_call: int = 1,
        placement: PlacementLike | None = None,
    ) -> None:
        from meshdsl.layouts.layout import Layout
        from meshdsl.layouts.placement import Placement
        from meshdsl.lowering import backends
        from meshdsl.lowering.options import Options

        if not callable(function):
            raise ValueError(
                f"jit compiles a function, not {function!r}: write md.jit(f, mesh, layout), or "
                "name the rest in a decorator, as in @md.jit(mesh=..., layout=...)"
            )
        update_wrapper(self, function, updated=())  # the fields of a callable module are its own
        self.function = function
        self._open = opened(mesh, layout, backend)
        if self._open is not None:
            mesh, layout = (None if self._open.mesh is None else mesh), self._open.rules
        self.mesh = Mesh.of(mesh)
        self._devices = devices_of(mesh) if backend in backends.ON_JAX else None
        parsed = Layout.of(layout)
        self.layout = parsed if mesh is not None else Layout()
        # Without a mesh it is only checked.
        self._unused = parsed if mesh is None and self._open is None else Layout()
        self.backend = backend
        self._backend = backends.load(backend)
        self.name = getattr(function, "__name__", type(function).__name__)
        self.parameters = inspect.signature(function)
        self.check_finite = check_finite
        Options.of(options)  # raises if it is of another type
        self.options = options
        self.steps_per_call = steps_per_call
        self.placement = None if placement is None else Placement.of(placement)
        if placement is not None and backend == "jax_auto":
            raise ValueError(f"backend 'jax_auto' takes no placement: {_XLA_DECIDES}")
        if steps_per_call < 1:
            raise ValueError(f"steps_per_call must be at least 1, got {steps_per_call}")
        if check_finite and steps_per_call > 1:
            raise ValueError(
                "check_finite looks at the arguments of one run: leave out steps_per_call"
            )
        self.donate = (donate,) if isinstance(donate, str) else tuple(donate)
        names = list(self.parameters.parameters)
        for name in self.donate:
            if name not in names:
                hint = did_you_mean(name, names)
                raise ValueError(
                    f"donate={name!r} is no parameter of {self.name}({', '.join(names)}){hint}"
                )
        self._compiled: dict[tuple[Signature, str | None], Compiled] = {}
        self._direct = Direct()
        self._order = Order(self.parameters.parameters)
        self._traces: dict[Signature, tuple[Graph, Any]] | None = None  # see `on`

    @property
    def runtime(self) -> Any:
        """The backend's module `runtime`, which describes the processes and devices."""
        return self._backend.runtime

    def __repr__(self) -> str:
        parameters = ", ".join(self.parameters.parameters)
        where = f"mesh={str(self.mesh)!r}, layout={str(self.layout)!r}, backend={self.backend!r}"
        count = len(self._compiled)
        programs = f"{count} program{'s' * (count != 1)} compiled"
        return f"<md.jit of {self.name}({parameters}): {where}, {programs}>"

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(
        self: Jitted[Concatenate[S, Q], R], instance: S, owner: type
    ) -> JittedMethod[Q, R]: ...

    def __get__(self, instance: Any, owner: type) -> Any:
        """Returns the method of an object, as functions do."""
        return self if instance is None else JittedMethod(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if open_traces and is_tracing():  # inside another function's trace it is an ordinary one
            return self.function(*args, **kwargs)
        positional = self._order(args, kwargs) if kwargs else args
        function = self._direct.function
        if function is not None and positional is not None:
            try:  # as `Direct.call` does, which is slower
                result = function(*positional)
            except REFUSED:  # nothing has run: the slow path says what is wrong
                result = MISS
            if result is not MISS:
                return result
            self._direct.miss()
        leaves, signature = self.flatten(args, kwargs)
        data = [leaf.data if type(leaf) is NamedArray else leaf for leaf in leaves]
        if any(isinstance(each, jax.core.Tracer) for each in data):
            return self._inside_jax(leaves, signature)
        need_numbers(self.name, leaves, signature)
        compiled = self._compiled.get((signature, product_precision()))
        if compiled is None:
            compiled = self._compile(signature)
        self._direct.note(compiled, leaves, positional)
        return compiled.run(leaves)

    def _inside_jax(self, leaves: Sequence[Any], signature: Signature) -> Any:
        """Runs while JAX traces (`jax.jit`, `jax.grad`): the program becomes part of JAX's trace.

        Raises:
            ValueError: the backend is not JAX's, or the arrays lack a dim, as under `jax.vmap`.
        """
        from meshdsl.lowering.backends import ON_JAX, load_on_jax

        if self.backend not in ON_JAX:
            raise ValueError(
                f"{self.name} is compiled for backend {self.backend!r}, which cannot run inside of "
                "what JAX traces: call it outside, or use backend='jax'"
            )
        arrays = [
            leaf if isinstance(leaf, NamedArray) else NamedArray(leaf, shape)
            for leaf, (shape, _) in zip(leaves, signature.avals, strict=True)
        ]
        for array in arrays:
            need_every_dim(array)
        program = self._lower(signature)
        run = load_on_jax(self.backend).function(program, self._devices)
        results = run(*[array.unpadded() for array in arrays])
        tree = program.origin.results
        pairs = zip(results[: tree.num_leaves], program.block.outputs, strict=False)
        return tree.unflatten([NamedArray(data, value.shape) for data, value in pairs])

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """Returns the graph for arguments like these (`md.spec` leaves will do)."""
        return self._trace(self._of_one_run(self.flatten(args, kwargs)[1]))[0]

    def lower(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """Returns the program for arguments like these (`md.spec` leaves will do)."""
        return self._lower(self.flatten(args, kwargs)[1])

    def stages(self, *args: Any, **kwargs: Any) -> Stages:
        """Returns the lowering for arguments like these, stage by stage.

        `f.stages(x).placement` gives the layout of every tensor. The loop of `steps_per_call` and
        the checks of `check_finite` are added outside of the stages.

        Raises:
            ValueError: as `lower`, or the backend leaves lowering to XLA.
        """
        from meshdsl.lowering.lower import lower_in_stages

        if self.backend == "jax_auto":
            raise ValueError(f"backend 'jax_auto' has no stages of lowering: {_XLA_DECIDES}")
        graph, _ = self._traced(self._of_one_run(self.flatten(args, kwargs)[1]))
        return lower_in_stages(
            graph,
            self.mesh,
            self.layout,
            self.options,
            self._donated(graph),
            hardware=hardware_on(self._devices),
            placement=self.placement,
        )

    def on(
        self, mesh: MeshLike | None, layout: LayoutLike | None, options: Options | None = None
    ) -> Jitted[P, R]:
        """Returns the same function for another mesh and layout, `f.on("data:8", "batch:data")`.

        The results share their traces: each signature is traced once. A placement is for one mesh:
        the other function has none. The options stay, unless others are given.
        """
        if self._traces is None:
            self._traces = {}
        options = self.options if options is None else options
        rest = self.donate, self.check_finite, options, self.steps_per_call
        other: Jitted[P, R] = Jitted(self.function, mesh, layout, self.backend, *rest)
        other._traces = self._traces
        return other

    def as_jax(self, *args: Any, **kwargs: Any) -> Callable:
        """Returns the program as a plain, jittable JAX function of the leaves.

        It takes and returns global arrays without pads (`x.unpadded()`), in the order of the
        trees' leaves. It ignores `md.check_finite`. It accepts only the dims and dtypes of `args`;
        for other arrays it raises a ValueError that names the arguments and dims.

        Raises:
            ValueError: the function runs several times in a call.
        """
        if self.steps_per_call > 1:
            raise ValueError("as_jax gives one run of the function: leave out steps_per_call")
        from meshdsl.lowering.backends import ON_JAX, load_on_jax

        graph, _ = self._traced(self._of_one_run(self.flatten(args, kwargs)[1]))
        name = self.backend if self.backend in ON_JAX else "jax"
        lower = lowering_of(name, self._devices, self.placement)
        program = lower(graph, self.mesh, self.layout, self.options)
        avals = [(tensor.shape, tensor.dtype) for tensor in graph.inputs]
        run = load_on_jax(name).function(program, self._devices)
        return taking_leaves(run, self.name, graph.input_paths, avals)

    def flatten(self, args: Sequence[Any], kwargs: Any = None) -> tuple[list[Any], Signature]:
        """Returns the array leaves of the arguments (see `bare`) and their signature."""
        args, kwargs = arguments_of(self.function, args, kwargs or {})
        bound = self.parameters.bind(*args, **kwargs)
        leaves, tree = jax.tree.flatten(OrderedDict(bound.arguments), is_leaf=is_leaf)
        try:
            avals = tuple([(leaf.dims, leaf.dtype) for leaf in leaves])
        except AttributeError:
            leaves = with_numbers(self.name, leaves, tree)
            avals = tuple([(leaf.dims, leaf.dtype) for leaf in leaves])
        return bare(leaves), Signature(tree, avals)

    @paused()
    def _trace(self, signature: Signature) -> tuple[Graph, Any]:
        trace = Trace()
        with tracing(trace):
            source = definition(self.function)
            inputs = [trace.input(shape, dtype, source) for shape, dtype in signature.avals]
            arguments = jax.tree.unflatten(signature.tree, inputs)
            call = self.parameters.bind_partial()
            call.arguments.update(arguments)
            with answered():
                result = self.function(*call.args, **call.kwargs)
            outputs, tree = results_of(result, source)
            graph, captured = trace.finish(outputs)
        assert not captured
        passed = leaves_with_paths(arguments, [(tensor.shape, tensor.dtype) for tensor in inputs])
        returned = leaves_with_paths(result, [(tensor.shape, tensor.dtype) for tensor in outputs])
        names = {op.outputs[0]: op.params["name"] for op in graph.operations if op.name == "name"}
        places = (path for path, aval in returned if aval is not None)
        called = {p: names[t] for p, t in zip(places, outputs, strict=True) if t in names}
        input_paths, output_paths = mirrors.paths(passed, returned, called)
        graph = replace(graph, name=self.name, input_paths=input_paths, output_paths=output_paths)
        return graph, tree

    def _traced(self, signature: Signature) -> tuple[Graph, Any]:
        traced = None if self._traces is None else self._traces.get(signature)
        if traced is None:
            traced = self._trace(signature)
            if self._traces is not None:
                self._traces[signature] = traced
        if self._open is not None:  # the first signature decides for all
            graph, left = traced[0], self._open
            self.mesh, self.layout = left.completed(graph, self._donated(graph), self.options)
            self._open = None
        return traced

    @paused()
    def _lower(self, signature: Signature) -> SpmdProgram:
        graph, tree = self._traced(self._of_one_run(signature))
        if self._unused.rules:
            from meshdsl.lowering.lower import validate

            axes = dict.fromkeys(axis for rule in self._unused.rules for axis in rule.axes)
            ones = Mesh(tuple((axis, 1) for axis in axes))
            validate(graph, ones, self._unused, mesh_given=False)
        program = lowered(
            graph,
            self.mesh,
            self.layout,
            self.backend,
            self._devices,
            check_finite=self.check_finite,
            options=self.options,
            donated=self._donated(graph),
            placement=self.placement,
        )
        if self.steps_per_call > 1:
            from meshdsl.lowering.writing.repeat import repeated

            rows = zip(program.input_paths, program.donated, strict=True)
            carried = [path for path, given_up in rows if given_up]
            program = repeated(program, self.steps_per_call, carried)
        origin = replace(
            program.origin, results=tree, compile=lambda program: self._finish(signature, program)
        )
        flags = self.options.compiler_flags if self.options else ()
        return replace(program, compiler_flags=flags, origin=origin)

    def _donated(self, graph: Graph) -> list[bool]:
        """Returns, per input of a graph, whether the caller gives up its buffer."""
        given_up = () if self.check_finite else self.donate
        return [path.split("/")[0] in given_up for path in graph.input_paths]

    def _of_one_run(self, signature: Signature) -> Signature:
        """Returns the signature of one run: slices of all arguments that are not donated.

        Raises:
            ValueError: arguments have not as many slices as there are runs; all are listed.
        """
        if self.steps_per_call == 1:
            return signature
        avals, problems = [], []
        for path, (shape, dtype) in zip(paths_of(signature.tree), signature.avals, strict=True):
            if path.split("/")[0] in self.donate:
                avals.append((shape, dtype))
                continue
            avals.append((shape.without([STEPS]), dtype))
            if not shape or shape[0] != Dimension(STEPS, self.steps_per_call):
                problems.append(f"  {path}: {short(dtype)}{shape}")
        if problems:
            first = (
                f"{self.name} runs {self.steps_per_call} times in a call, so its arguments need "
                f"a first dim `{STEPS}` of that size, unless they are donated:"
            )
            raise ValueError("\n".join([first, *problems]))
        return Signature(signature.tree, tuple(avals))

    def _compile(self, signature: Signature) -> Compiled:
        return self._finish(signature, self._lower(signature))

    def _finish(self, signature: Signature, program: SpmdProgram) -> Compiled:
        from meshdsl.lowering import backends

        executable = backends.executable(self._backend, program, program.donated, self._devices)
        compiled = Compiled(self, signature, program, executable)
        self._compiled[signature, product_precision()] = compiled
        return compiled


class JittedMethod(Generic[P, R]):
    """A compiled method of one object, `model.step(batch)`: the object is its first argument."""

    def __init__(self, jitted: Jitted[..., R], instance: Any) -> None:
        update_wrapper(self, jitted, updated=())
        self.__func__ = jitted
        self.__self__ = instance

    def __repr__(self) -> str:
        return f"<{self.__func__!r} of {type(self.__self__).__name__}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__func__(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Graph:
        """Returns the graph for arguments like these; see `Jitted.trace`."""
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> SpmdProgram:
        """Returns the program for arguments like these; see `Jitted.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def stages(self, *args: Any, **kwargs: Any) -> Stages:
        """Returns the lowering for arguments like these; see `Jitted.stages`."""
        return self.__func__.stages(self.__self__, *args, **kwargs)

    def as_jax(self, *args: Any, **kwargs: Any) -> Callable:
        """Returns the program as a function of JAX, the object's leaves first."""
        return self.__func__.as_jax(self.__self__, *args, **kwargs)

    def on(self, mesh: MeshLike | None, layout: LayoutLike | None) -> JittedMethod[P, R]:
        """Returns the same method for another mesh and layout; see `Jitted.on`."""
        return JittedMethod(self.__func__.on(mesh, layout), self.__self__)
