"""Callers: the Python code that calls a program with one structure of arguments.

A direct call compares its arguments with those that the program was compiled for. Functions that
do so for any tree cost more than JAX's own call. So each program gets a function of its own, which
is written out as Python. It takes the arguments apart, compares what JAX does not know (structure,
dims, pads), calls the program with bare arrays, and puts the results into their tree:

    def call(a0, a1, /):
        if type(a0) is not dict or len(a0) != 1: return miss
        v0 = a0['weight']
        d0 = v0.data
        if type(d0) is not array and (type(d0) is not ndarray or d0.dtype is not c0): usable(d0)
        if v0.dims is not c1 and v0.dims != c1: return miss
        ...
        r0, = run(d0, d1)
        o0 = new(NamedArray); o0.data = r0; o0.dims = c2; o0.cuts = c3
        return o0

JAX compares shapes, dtypes and shardings. An argument of another kind raises one of `REFUSED`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from meshdsl.tensors.cuts import Cuts
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.module import Module
from meshdsl.tensors.named_array import NUMBERS, NamedArray
from meshdsl.tensors.tensor import Tensor

# A caller returns MISS, or raises one of REFUSED, for arguments that do not fit. Nothing has run.
MISS: Any = object()
REFUSED = (TypeError, ValueError, LookupError, AttributeError, OverflowError)

_WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))
_PLAIN = {dtype: kind for kind, dtype in NUMBERS.items()}


def caller(
    run: Callable,
    arguments: Sequence[Any],
    results: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    dtypes: Sequence[np.dtype],
    numbers: Collection[int] = (),
) -> Callable:
    """Returns a function of arguments by position, which returns a tree of results or `MISS`.

    Args:
        run: takes the data of each input and returns that of each output.
        arguments, results: the structures of each argument and of the results.
        inputs, outputs: have the `dims` and `cuts` of each.
        dtypes: those of the inputs.
        numbers: the leaves that may be plain numbers.
    """
    code = _Code()
    names = [f"a{i}" for i in range(len(arguments))]
    for name, tree in zip(names, arguments, strict=True):
        code.take_apart(tree, name)
    rows = zip(code.leaves, inputs, dtypes, strict=True)
    given = [
        code.number(leaf, stored.dims, dtype)
        if i in numbers
        else code.data(leaf, stored.dims, stored.cuts, dtype)
        for i, (leaf, stored, dtype) in enumerate(rows)
    ]
    made = [f"r{i}" for i in range(len(outputs))]
    taken = "".join(f"{name}, " for name in made)
    code.lines.append(f"{f'{taken}= ' if made else ''}run({', '.join(given)})")
    named = [code.named(name, out.dims, out.cuts) for name, out in zip(made, outputs, strict=True)]
    code.lines.append(f"return {code.put_together(results, named)}")
    head = f"def call({', '.join(names)}{', /' if names else ''}):"
    source = "\n    ".join([head, *code.lines])
    scope: dict[str, Any] = {**code.constants, "run": run}

    def usable(data: Any) -> None:
        if _is_usable(data) and isinstance(data, jax.Array):
            scope["array"] = type(data)  # the usual type is known once it is met

    scope["array"], scope["usable"] = None, usable
    exec(compile(source, "<a call of meshdsl>", "exec"), scope)
    return scope["call"]


def positional(tree: Any, parameters: inspect.Signature) -> list[Any] | None:
    """Returns the structure of each argument by position; None if one needs its keyword.

    Args:
        tree: the structure of the arguments, by parameter.
    """
    _, keys = tree.node_data()
    given = dict(zip(keys, tree.children(), strict=True))
    arguments: list[Any] = []
    for name, parameter in parameters.parameters.items():
        if name not in given:
            break
        one = given.pop(name)
        if parameter.kind is parameter.VAR_POSITIONAL:
            arguments += one.children()
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            arguments.append(one)
        else:
            return None
    return None if given else arguments


class _Code:
    """The lines of a caller, and the objects that they name."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.leaves: list[str] = []
        self.constants: dict[str, Any] = {
            "miss": MISS,
            "loose": _loose,
            "flatten": _flatten,
            "new": object.__new__,
            "ndarray": np.ndarray,
            "asarray": np.asarray,
            "NamedArray": NamedArray,
        }
        self._known: dict[Any, str] = {}
        self._count = 0

    def constant(self, value: Any) -> str:
        """Returns the name of an object in the code."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def equal(self, value: Shape | Cuts | np.dtype) -> str:
        """Returns the name of an object in the code; equal ones share it."""
        key = type(value), value
        if key not in self._known:
            self._known[key] = self.constant(value)
        return self._known[key]

    def _need(self, misfit: str) -> None:
        self.lines.append(f"if {misfit}: return miss")

    def _new(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _variable(self, value: str) -> str:
        if value.isidentifier():
            return value
        name = self._new("v")
        self.lines.append(f"{name} = {value}")
        return name

    def take_apart(self, tree: Any, value: str) -> None:
        """Writes how a tree is compared with its structure, and names its leaves."""
        node = tree.node_data()
        value = self._variable(value)
        if node is None:
            self.leaves.append(value)
            return
        kind, static = node
        children = tree.children()
        if kind is type(None):
            self._need(f"{value} is not None")
        elif kind in (tuple, list):
            self._need(f"type({value}) is not {kind.__name__} or len({value}) != {len(children)}")
            for i, child in enumerate(children):
                self.take_apart(child, f"{value}[{i}]")
        elif kind is dict:
            self._need(f"type({value}) is not dict or len({value}) != {len(children)}")
            for key, child in zip(static, children, strict=True):
                self.take_apart(child, f"{value}[{self.key(key)}]")
        elif issubclass(kind, Module):
            self._need(f"type({value}) is not {self.constant(kind)}")
            static = iter(static)
            following = iter(children)
            for field in dataclasses.fields(kind):
                each = f"{value}.{field.name}"
                if field.metadata.get("static"):
                    wanted = self.constant(next(static))
                    self._need(f"{each} is not {wanted} and {each} != {wanted}")
                else:
                    self.take_apart(next(following), each)
        else:  # JAX takes other nodes apart
            parts, structure = self._new("v"), self._new("v")
            self.lines.append(f"{parts}, {structure} = flatten({value})")
            self._need(f"{structure} != {self.constant(tree)}")
            self.leaves += [self._variable(f"{parts}[{i}]") for i in range(tree.num_leaves)]

    def key(self, key: Any) -> str:
        """Returns a dict's key in the code."""
        return repr(key) if type(key) is str else self.constant(key)

    def data(self, leaf: str, dims: Shape, cuts: Cuts, dtype: np.dtype) -> str:
        """Writes how an array is compared with an input; returns the name of its data."""
        name, wanted = self._new("d"), self.equal(dims)
        self.lines.append(f"{name} = {leaf}.data")
        host = "" if dtype in _WIDE else f"(type({name}) is not ndarray or {name}.dtype is not "
        host = f" and {host}{self.equal(dtype)})" if host else ""
        self.lines.append(f"if type({name}) is not array{host}: usable({name})")
        # Data with pads are larger than their dims, which JAX sees where the program has none.
        padded = f" or {leaf}.cuts != {self.equal(cuts)}" if cuts else ""
        self._need(f"{leaf}.dims is not {wanted} and {leaf}.dims != {wanted}{padded}")
        return name

    def number(self, leaf: str, dims: Shape, dtype: np.dtype) -> str:
        """Writes how a leaf that may be a plain number becomes data; returns their name."""
        name = self._new("d")
        data = f"loose({leaf}, {self.equal(dims)}, {self.equal(dtype)})"
        if dtype in _PLAIN:
            kind = self.constant(_PLAIN[dtype])
            data = f"asarray({leaf}, {self.equal(dtype)}) if type({leaf}) is {kind} else {data}"
        self.lines.append(f"{name} = {data}")
        return name

    def named(self, data: str, dims: Shape, cuts: Cuts) -> str:
        """Writes how a result gets its names; returns the name of the NamedArray."""
        name = f"o{data[1:]}"
        self.lines.append(
            f"{name} = new(NamedArray); {name}.data = {data}; "
            f"{name}.dims = {self.equal(dims)}; {name}.cuts = {self.equal(cuts)}"
        )
        return name

    def put_together(self, tree: Any, leaves: list[str]) -> str:
        """Returns an expression for a tree of leaves."""
        node = tree.node_data()
        if node is None:
            return leaves[0]
        kind, static = node
        if kind not in (type(None), tuple, list, dict):  # JAX puts other nodes together
            return f"{self.constant(tree.unflatten)}([{', '.join(leaves)}])"
        parts, start = [], 0
        for child in tree.children():
            end = start + child.num_leaves
            parts.append(self.put_together(child, leaves[start:end]))
            start = end
        if kind is dict:
            rows = zip(static, parts, strict=True)
            return "{" + ", ".join(f"{self.key(key)}: {part}" for key, part in rows) + "}"
        if kind is list:
            return f"[{', '.join(parts)}]"
        return "(" + "".join(f"{part}, " for part in parts) + ")" if kind is tuple else "None"


def _flatten(tree: Any) -> Any:
    return jax.tree.flatten(tree, is_leaf=is_leaf)


def is_leaf(value: Any) -> bool:
    """Whether a value is a leaf of arguments: JAX would look into a NamedArray."""
    return isinstance(value, Tensor)


def _is_usable(data: Any) -> bool:
    """Returns True; raises TypeError for data that a direct call cannot use.

    Outside of its 64-bit mode JAX would cut wide numbers of the host to 32 bits. A program that
    JAX traces is part of what it traces.
    """
    if isinstance(data, np.ndarray):
        if data.itemsize < 8 or data.dtype not in _WIDE or jax.config.read("jax_enable_x64"):
            return True
    elif isinstance(data, jax.Array) and not isinstance(data, jax.core.Tracer):
        return True
    raise TypeError(f"a direct call does not take a {type(data).__name__}")


def _loose(leaf: Any, dims: Shape, dtype: np.dtype) -> Any:
    """Returns the data of a leaf that may be a number of numpy; numbers have no pads."""
    if type(leaf) is NamedArray and leaf.dims == dims and _is_usable(leaf.data):
        return leaf.data
    if isinstance(leaf, np.generic) and leaf.dtype == dtype:
        return leaf
    raise TypeError(f"a direct call does not take a {type(leaf).__name__}")


def route(path: Sequence[Any], read: str, routes: Mapping[Any, Callable]) -> Callable | None:
    """Returns a function that calls one of several functions, by one leaf of the arguments.

    It raises one of `REFUSED` if there is no such leaf, or no function for it.

    Args:
        path: the keys to the leaf; None is returned if a node has its own kind of keys.
        read: an expression of `{leaf}` for the key of `routes`; `form` gives dims and dtype.
    """
    code, leaf = _Code(), "args"
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            leaf += f".{key.name}"
        elif isinstance(key, jax.tree_util.SequenceKey):
            leaf += f"[{key.idx}]"
        elif isinstance(key, jax.tree_util.DictKey):
            leaf += f"[{code.key(key.key)}]"
        else:
            return None
    source = f"lambda *args: routes[{read.format(leaf=leaf)}](*args)"
    return eval(source, {**code.constants, "routes": routes, "form": _form})


def _form(leaf: Any) -> tuple[Any, np.dtype]:
    """Returns the dims and the dtype of an array, or of a plain number."""
    if type(leaf) is NamedArray:
        return leaf.dims, leaf.dtype
    return _NO_DIMS, NUMBERS.get(type(leaf)) or np.dtype(leaf.dtype)


_NO_DIMS = Shape()
