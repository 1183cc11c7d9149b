"""Eager: operations on NamedArrays outside of a trace run at once.

Each call is a small program, which is traced, lowered and compiled like a function under `jit`. It
is cached: a later call like it goes straight to the executable. All else is as in `md.jit`, the
numbers included.

* **Where it runs.** Arrays on a mesh stay there: a dim is split in the result as it is in the
  operands. Where two operands disagree, the later one is moved: a dim is split as in the first
  operand that splits it, and an axis that two dims want belongs to the first. Data on no mesh
  (numpy's, or on one device) is laid out like the other operands. Renamed, split and merged dims
  keep their axes. Two meshes in one call are an error. Functions of trees (`of_trees`) say which
  argument a result lies like, so that each parameter keeps its own layout.
* **What is cached.** The key of a call is the operation, its operands' dims, dtypes and shardings,
  and its other arguments, of which some may be operations (`md.relu`). Operations that run a user's
  function (`md.grad(f)(x)`, `md.scan`) are traced at each call, since the function may read
  anything; equal graphs are compiled once. The numbers in `x * 0.1` and, along a replicated dim,
  `x["length", 3]` are operands: another number needs no other program.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.ops.control.body import leaves_of
from meshdsl.ops.indexing import TAKE
from meshdsl.ops.operation import is_operation, reported_as
from meshdsl.running.callers import REFUSED
from meshdsl.running.runnable import Runnable, arguments_of, bare, devices_of
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.idioms import answered
from meshdsl.tensors.named_array import NamedArray, need_every_dim
from meshdsl.tensors.product_precision import product_precision
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation, TracedTensor, Work
from meshdsl.tracing.trace import ArrayTrace, tracing

_LIMIT = 1024  # how many calls, and how many programs, are kept
_WIDE = frozenset(["float64", "int64", "uint64", "complex128"])
_PLAIN = frozenset([str, int, bool, type(None), Dimension, np.dtype, Shape])


class _Unkeyed(Exception):
    """A call has an argument that cannot be compared with that of another call."""


def _call_of(runnable: Runnable, inputs: Sequence[int | NamedArray], tree: Any) -> Callable:
    """Returns a function that runs a program on the arrays of a call like the one it is made for.

    Args:
        inputs: for each input of the program: the number of the call's array, or an array.
        tree: the structure of the result.
    """
    single = tree.num_nodes == tree.num_leaves == 1
    direct = runnable.direct
    operands = [i.data if isinstance(i, NamedArray) else i for i in inputs]
    outputs = getattr(runnable.executable, "outputs", ())
    forms = [(stored.dims, stored.cuts) for stored in outputs]

    def call(arrays: Sequence[NamedArray]) -> Any:
        nonlocal direct
        if direct is not None:
            try:
                data = direct(*[arrays[i].data if type(i) is int else i for i in operands])
            except REFUSED:  # nothing has run
                direct = runnable.direct
            else:
                rows = zip(data, forms, strict=True)
                results = [NamedArray(each, *form) for each, form in rows]
                return results[0] if single else tree.unflatten(results)
        results = runnable(bare([arrays[i] if type(i) is int else i for i in inputs]))
        return results[0] if single else tree.unflatten(results)

    if direct is None or not single or [type(i) for i in inputs] != [int]:
        return call
    ((dims, cuts),) = forms

    def call_of_one(arrays: Sequence[NamedArray]) -> Any:  # the same, for one array
        try:
            (data,) = direct(arrays[0].data)
        except REFUSED:
            return call(arrays)
        result = _new(NamedArray)
        result.data, result.dims, result.cuts = data, dims, cuts
        return result

    return call_of_one


_new = object.__new__
_calls: dict[Hashable, Callable] = {}
_programs: dict[Hashable, Runnable] = {}
_on_devices: set[type] = set()  # types of data on devices


def run(
    function: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    pure: bool,
    like: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None,
) -> Any:
    """Runs a function of the language on NamedArrays.

    Args:
        pure: whether the result depends on nothing but the arguments.
        like: (arguments, result) -> for each leaf of the result, the array that it lies like, or
            None.
    """
    if pure and len(args) == 1 and not kwargs:  # as in most calls: the general way costs a µs more
        (array,) = args
        data: Any = array.data if type(array) is NamedArray else None
        if type(data) in _on_devices:
            dims, cuts = array.dims, array.cuts
            usual = function, product_precision(), NamedArray, dims, cuts, data.dtype, data.sharding
            known = _calls.get(usual)
            if known is not None:
                return known(args)
    arrays: list[NamedArray] = []
    if not pure:
        args, kwargs = arguments_of(function, args, dict(kwargs))
    try:
        key: Hashable = None
        if pure:
            parts: list[Hashable] = [function, product_precision()]
            for value in args:
                data = value.data if type(value) is NamedArray and not arrays else None
                if type(data) in _on_devices:  # as `_key` does
                    arrays.append(value)
                    parts += NamedArray, value.dims, value.cuts, data.dtype, data.sharding
                else:
                    parts.append(_key(value, arrays))
            key = tuple(parts)
            if kwargs:  # a key that no arguments by position have
                key = (key, _key(kwargs, arrays))
        call = _calls.get(key)
    except (_Unkeyed, TypeError):
        key = call = None
    if call is None:
        call = _prepare(function, args, kwargs, arrays, like)
        if key is not None:
            _keep(_calls, key, call)
    return call(arrays)


def clear_cache() -> None:
    """Forgets every program compiled for operations outside of a trace."""
    _calls.clear()
    _programs.clear()


def _keep(cache: dict, key: Hashable, value: Any) -> None:
    if len(cache) >= _LIMIT:  # the older half goes
        for old in list(itertools.islice(cache, _LIMIT // 2)):
            cache.pop(old, None)
    cache[key] = value


def _key(value: Any, arrays: list[NamedArray]) -> Hashable:
    """Returns the key of an argument in the cache, and appends its arrays to `arrays`."""
    kind = type(value)
    if kind is NamedArray:
        if arrays:
            for number, array in enumerate(arrays):
                if array is value:
                    return NamedArray, number
        arrays.append(value)
        data = value.data
        where = type(data)
        if where not in _on_devices:
            if isinstance(data, jax.core.Tracer):
                raise _Unkeyed
            if not hasattr(data, "sharding"):
                return NamedArray, value.dims, value.cuts, data.dtype
            _on_devices.add(where)
        return NamedArray, value.dims, value.cuts, data.dtype, data.sharding
    if kind in _PLAIN:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)  # 0.0 and -0.0 are equal, but not the same
    if kind is tuple or kind is list:
        return kind, *[_key(item, arrays) for item in value]
    if kind is dict:
        return dict, *[(name, _key(item, arrays)) for name, item in value.items()]
    if kind is slice:
        return slice, _key((value.start, value.stop, value.step), arrays)
    if isinstance(value, np.generic):
        return kind, repr(value)
    if isinstance(value, type) or is_operation(value):
        return value
    raise _Unkeyed


def _prepare(
    function: Callable,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    arrays: Sequence[NamedArray],
    like: Callable[[Sequence[Any], Any], Sequence[Any]] | None = None,
) -> Callable:
    """Traces a call and finds or compiles its program."""
    for array in arrays:
        need_every_dim(array)
    trace = ArrayTrace()
    with tracing(trace):
        with answered():
            result = function(*args, **kwargs)
        with reported_as(getattr(function, "__name__", ""), (*args, *kwargs.values())):
            outputs, tree = leaves_of(result)
        graph, _ = trace.finish(outputs)
    results: Sequence[TensorLayout | None] = ()
    if like is not None:
        results = [getattr(example, "layout", None) for example in like(args, result)]
    graph = Graph(
        graph.inputs,
        graph.operations,
        graph.outputs,
        getattr(function, "__name__", ""),
        tuple(f"operand{i}" for i in range(len(graph.inputs))),
        tuple(f"result{i if results else ''}" for i in range(len(graph.outputs))),
    ).prune()
    operands = list(trace.arrays)
    graph, operands = _with_numbers(graph, operands)
    place = {id(array): number for number, array in enumerate(arrays)}
    places = [_place(array) for array in operands]
    with reported_as(graph.name, (*args, *kwargs.values())):
        devices = _devices(places)
        _need_width(operands)
    runnable = _program(graph, operands, places, devices, results)
    inputs = [place.get(id(array), array) for array in operands]
    for i in range(len(trace.arrays), len(operands)):  # numbers wait where the program takes them
        inputs[i] = NamedArray(runnable.put(operands[i].data, i), Shape())
    return _call_of(runnable, inputs, tree)


def _takes_numbers(op: Operation) -> bool:
    """Whether XLA computes an operation alike with a number as a constant and as an argument."""
    # Of a number alone XLA computes constants otherwise: sign(-0.0) is 0.0, of an argument -0.0.
    several = len(op.inputs) > 1
    return several and op.primitive.form is Form.ELEMENTWISE and op.primitive.work <= Work.STEP


def _with_numbers(graph: Graph, operands: Sequence[NamedArray]) -> tuple[Graph, list[NamedArray]]:
    """Turns the constant numbers of a graph of one operation into inputs.

    Returns:
        The graph, and its operands with arrays for these numbers.
    """
    *fulls, last = graph.operations or (None,)
    numbers: list[tuple[Tensor, Any]] = []
    if last is not None and _takes_numbers(last):
        if all(op.name == "full" and not op.params["shape"] for op in fulls):
            numbers = [(op.outputs[0], op.params["value"]) for op in fulls]
    elif last is not None and last.name == "index" and len(graph.operations) == 1 and operands:
        where, dim = operands[0].layout, last.params["dim"]
        if where is None or not where.axes(dim):  # else it would be a sum over devices
            at = TracedTensor(Shape(), np.dtype("int32"), last.source)
            numbers = [(at, last.params["at"])]
            last = Operation(TAKE, (*last.inputs, at), last.outputs, {"dim": dim}, last.source)
    if last is None or not numbers:
        return graph, list(operands)
    inputs = (*graph.inputs, *(tensor for tensor, _ in numbers))
    paths = tuple(f"operand{i}" for i in range(len(inputs)))
    changed = Graph(inputs, (last,), graph.outputs, graph.name, paths, graph.output_paths)
    made = [NamedArray(np.array(value, t.dtype), t.shape) for t, value in numbers]
    return changed, [*operands, *made]


def _program(
    graph: Graph,
    operands: Sequence[NamedArray],
    places: Sequence[Any],
    devices: jax.sharding.Mesh | None,
    results: Sequence[TensorLayout | None] = (),
) -> Runnable:
    """Returns a program for a graph: that of an equal graph, if one is cached."""
    if any(isinstance(array.data, jax.core.Tracer) for array in operands):
        return Runnable.inline(graph)  # JAX is tracing: the program becomes part of what it traces
    key = (fingerprint(graph), product_precision(), tuple(places), tuple(results))
    runnable = _programs.get(key)
    if runnable is None:
        mesh = Mesh(tuple(devices.shape.items())) if devices is not None else Mesh()
        layout = layout_of([array.layout for array in operands], graph, mesh, results)
        runnable = Runnable.of(graph, mesh, layout, "jax", devices)
        _keep(_programs, key, runnable)
    return runnable


def _place(array: NamedArray) -> Any:
    """Returns the sharding of data on a mesh or a device; None for other data."""
    data = array.data
    return None if isinstance(data, jax.core.Tracer) else getattr(data, "sharding", None)


def _need_width(operands: Sequence[NamedArray]) -> None:
    """Raises ValueError if JAX would cut the operands to 32 bits."""
    wide = sorted({a.dtype.name for a in operands if a.dtype.name in _WIDE})
    if wide and not jax.config.read("jax_enable_x64"):
        raise ValueError(
            f"JAX turns {', '.join(wide)} into 32 bits unless told otherwise: name arrays of 32 "
            "bits, as in md.named(x.astype(np.float32), dims), or call "
            "jax.config.update('jax_enable_x64', True) first"
        )


def _devices(places: Sequence[Any]) -> jax.sharding.Mesh | None:
    """Returns the mesh of the operands, or one of the first operand's device.

    Raises:
        ValueError: they are on several meshes.
    """
    own: list[Any] = [p.mesh for p in places if isinstance(p, NamedSharding)]
    meshes = map(devices_of, own)
    distinct = list(dict.fromkeys(m for m in meshes if m is not None and m.size > 1))
    if len(distinct) > 1:
        listed = " and ".join(_show(mesh) for mesh in distinct)
        raise ValueError(
            f"the operands are on different meshes: {listed}; move one with "
            "md.place(x, mesh, layout), or give it as np.asarray(x) with its dims"
        )
    if distinct:
        return distinct[0]
    single = [device for p in places if p is not None for device in p.device_set]
    return jax.make_mesh((), (), devices=single[:1]) if single else None


def _show(mesh: jax.sharding.Mesh) -> str:
    devices = ", ".join(str(device.id) for device in mesh.devices.flat)
    return f"{Mesh(tuple(mesh.shape.items()))} (devices {devices})"


def layout_of(
    operands: Sequence[TensorLayout | None],
    graph: Graph,
    mesh: Mesh,
    results: Sequence[TensorLayout | None] = (),
) -> Layout:
    """Returns one layout for all operands; see the module's docstring.

    Args:
        operands: per input of the graph, its layout, or None for one without a layout.
        results: per output, what it lies like, or None if the operands decide; none for all.
    """
    rules: dict[str, Rule] = {}
    claimed: set[str] = set()

    def give(dim: str, axes: Sequence[str], optional: bool) -> None:
        if dim not in rules and axes:
            rules[dim] = Rule("", dim, tuple(axes), optional or not claimed.isdisjoint(axes))
            claimed.update(axes)

    for where in operands:
        for dim, axes in where.splits if where is not None and mesh.size > 1 else ():
            give(dim, axes, False)
    for dim, axes in _inherited(graph, {name: rule.axes for name, rule in rules.items()}):
        give(dim, axes, True)
    layout = Layout(tuple(rules.values()))
    shapes = {tensor.shape for tensor in _tensors(graph)}
    layout = Layout(tuple(rule for rule in layout.rules if _acts(rule, layout, shapes)))
    scoped = []
    rows = [*zip(operands, graph.inputs, graph.input_paths, strict=True)]
    if results:
        rows += zip(results, graph.outputs, graph.output_paths, strict=True)
    for where, tensor, path in rows:
        if where is None or where.restrict(tensor.shape.names) == layout.assign(tensor.shape, path):
            continue
        # All dims: where one leaves an axis, no optional rule may give that axis to another dim.
        scoped += [Rule(path, dim, where.axes(dim)) for dim in tensor.shape.names]
    return Layout((*layout.rules, *scoped)) if mesh.size > 1 else Layout()


def _acts(rule: Rule, layout: Layout, shapes: Collection[Shape]) -> bool:
    """Whether a rule splits something; other dims may have all axes of an optional one."""
    return not rule.optional or any(
        layout.assign(shape).axes(rule.dim) for shape in shapes if shape.find(rule.dim)
    )


def _tensors(graph: Graph) -> Iterator[Tensor]:
    yield from graph.inputs
    for op in graph.operations:
        for body in op.bodies:
            yield from _tensors(body)
        yield from op.outputs


def _inherited(graph: Graph, known: dict[str, Sequence[str]]) -> Sequence[tuple[str, Any]]:
    """Returns dims that are made from other dims, with the axes of these."""
    inherited = []
    for op in graph.operations:
        for dim, sources in _made_dims(op):
            axes = [axis for source in sources for axis in known.get(source, ())]
            if axes and dim not in known:
                known[dim] = tuple(dict.fromkeys(axes))
                inherited.append((dim, known[dim]))
        for body in op.bodies:
            inherited += _inherited(body, known)
    return inherited


def _made_dims(op: Operation) -> Sequence[tuple[str, Sequence[str]]]:
    if op.name == "rename":
        return [(after, [before]) for before, after in op.params["names"].items()]
    if op.name in ("split", "merge"):
        before, after = op.inputs[0].shape, op.outputs[0].shape
        gone = [dim.name for dim in before if after.find(dim.name) is None]
        made = [dim.name for dim in after if before.find(dim.name) is None]
        return [(made[0], gone)] if made else []
    return []


# Equal graphs.


def fingerprint(graph: Graph) -> Hashable:
    """Returns a key that two graphs share if they are equal apart from source lines."""
    numbers: dict[Tensor, int] = {}

    def number(tensor: Tensor) -> int:
        return numbers.setdefault(tensor, len(numbers))

    def of(tensors: Sequence[Tensor]) -> Hashable:
        return tuple((number(t), t.shape, t.dtype) for t in tensors)

    inputs = of(graph.inputs)
    operations = tuple(
        (
            op.primitive,
            of(op.inputs),
            of(op.outputs),
            _frozen(op.params),
            op.source if op.effect else None,  # a report of one names its line
        )
        for op in graph.operations
    )
    return inputs, operations, of(graph.outputs)


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Graph):
        return fingerprint(value)
    if isinstance(value, Mapping):
        return tuple((name, _frozen(value[name])) for name in sorted(value, key=str))
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype, value.tobytes()
    if isinstance(value, float | complex | np.generic):
        return type(value), repr(value)
    if isinstance(value, list | tuple) and not isinstance(value, Shape):
        return type(value), tuple(_frozen(item) for item in value)
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


@dataclass(frozen=True, eq=False)
class _Same:
    """A key that compares an object by identity.

    The reference keeps the object alive, so that no other object gets its id.
    """

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value
