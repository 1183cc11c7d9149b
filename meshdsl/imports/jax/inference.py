"""Inference: which positions of a jaxpr's arrays are one dim.

A walk over the equations gives each position a node and unifies what an equation pairs up. Bodies
of calls are walked anew at each call, so two calls of one function may have other dims.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.extend.core as jex
import numpy as np

from meshdsl.imports.jax.classes import Classes
from meshdsl.imports.jax.naming import Naming
from meshdsl.imports.jax.sources import source_of
from meshdsl.tracing.source import UNKNOWN, Source


class Dims(NamedTuple):
    """The positions of an array.

    Attributes:
        nodes: of the positions' classes.
        weak: whether all elements along a position are equal, as in what was broadcast.
    """

    nodes: tuple[int, ...]
    weak: tuple[bool, ...]

    def pick(self, places: Sequence[int]) -> Dims:
        """Returns some positions, in the order given."""
        return Dims(tuple(self.nodes[p] for p in places), tuple(self.weak[p] for p in places))


@dataclass
class Frame:
    """The dims in one call of a jaxpr.

    Attributes:
        bodies: by the number of the equation, a frame for each of its bodies in order.
        sources: the user's line of each equation.
    """

    jaxpr: Any
    consts: Sequence[Any]
    source: Source
    dims: dict[Any, Dims] = field(default_factory=dict)
    bodies: dict[int, list[Frame]] = field(default_factory=dict)
    sources: list[Source] = field(default_factory=list)

    def of(self, atom: Any) -> Dims:
        """Returns the dims of a variable; those of a literal are weak."""
        if isinstance(atom, jex.Literal):
            return Dims((), ())
        return self.dims[atom]


@dataclass(frozen=True)
class Site:
    """One equation, while its dims are inferred."""

    walk: Walk
    frame: Frame
    number: int
    equation: Any
    source: Source

    @property
    def params(self) -> Mapping[str, Any]:
        return self.equation.params

    @property
    def classes(self) -> Classes:
        return self.walk.classes

    @property
    def name(self) -> str:
        return self.equation.primitive.name

    def sizes(self, result: int = 0) -> tuple[int, ...]:
        """Returns the sizes of a result."""
        return tuple(self.equation.outvars[result].aval.shape)

    def operand_sizes(self, operand: int = 0) -> tuple[int, ...]:
        """Returns the sizes of an operand."""
        return tuple(self.equation.invars[operand].aval.shape)

    def new(self, size: int, like: int | None = None, hint: str = "") -> int:
        """Returns a node for a dim that begins here."""
        function = self.source.layer.rpartition(".")[2]
        return self.classes.new(size, hint or "_".join(filter(None, [function, self.name])), like)

    def fresh(self, sizes: Sequence[int], weak: bool = False) -> Dims:
        """Returns new positions."""
        return Dims(tuple(map(self.new, sizes)), (weak,) * len(sizes))

    def unify(self, one: int, other: int) -> None:
        self.classes.unify(one, other, self.source, self.name)

    def match(self, one: Dims, other: Dims) -> None:
        """Unifies two arrays, position by position."""
        for a, b, weak, also in zip(one.nodes, other.nodes, one.weak, other.weak, strict=True):
            if weak or also:
                self.classes.later(a, b)
            else:
                self.unify(a, b)

    def body(self, jaxpr: Any, operands: Sequence[Dims]) -> list[Dims]:
        """Returns the dims of the results of a body; bodies are numbered in the order of calls."""
        frame = self.walk.frame(jaxpr, operands, self.source)
        self.frame.bodies.setdefault(self.number, []).append(frame)
        return [frame.of(atom) for atom in frame.jaxpr.outvars]


Infer = Callable[[Site, list[Dims]], list[Dims]]


class Walk:
    """Infers the dims of a jaxpr.

    Args:
        rules: by primitive, from the dims of operands to those of results.
    """

    def __init__(self, classes: Classes, rules: Mapping[str, Infer]) -> None:
        self.classes = classes
        self._rules = rules

    def frame(self, jaxpr: Any, operands: Sequence[Dims], outer: Source) -> Frame:
        """Returns the dims in a jaxpr, closed or open, for those of its arguments."""
        closed = isinstance(jaxpr, jex.ClosedJaxpr)
        frame = Frame(jaxpr.jaxpr if closed else jaxpr, jaxpr.consts if closed else (), outer)
        for variable, value in zip(frame.jaxpr.constvars, frame.consts, strict=True):
            frame.dims[variable] = self._constant(value, variable.aval)
        for variable, dims in zip(frame.jaxpr.invars, operands, strict=True):
            frame.dims[variable] = self._sized(dims, variable.aval.shape)
        for number, equation in enumerate(frame.jaxpr.eqns):
            source = source_of(equation, outer)
            frame.sources.append(source)
            inputs = [frame.of(atom) for atom in equation.invars]
            for node in itertools.chain.from_iterable(dims.nodes for dims in inputs):
                self.classes.used.setdefault(node, source)
            site = Site(self, frame, number, equation, source)
            results = self._rules[equation.primitive.name](site, inputs)
            for variable, dims in zip(equation.outvars, results, strict=True):
                frame.dims[variable] = self._array(dims, variable.aval.shape)
        return frame

    def _sized(self, dims: Dims, sizes: Sequence[int]) -> Dims:
        """Returns dims for a variable; a literal of a scalar has none."""
        if len(dims.nodes) == len(sizes):
            return dims
        return Dims(tuple(self.classes.new(s) for s in sizes), (True,) * len(sizes))

    def _constant(self, value: Any, aval: Any) -> Dims:
        weak = is_uniform(value)
        nodes = tuple(self.classes.new(size, "constant") for size in aval.shape)
        return self._array(Dims(nodes, (weak,) * len(nodes)), aval.shape)

    def _array(self, dims: Dims, sizes: Sequence[int]) -> Dims:
        """Returns dims without one class at two positions."""
        assert len(dims.nodes) == len(sizes), (dims, sizes)
        nodes = list(dims.nodes)
        weak = tuple(w or size == 1 for w, size in zip(dims.weak, sizes, strict=True))
        roots = [self.classes.root(node) for node in nodes]
        for root in dict.fromkeys(roots):
            places = [p for p, r in enumerate(roots) if r == root]
            strong = [p for p in places if not weak[p]]
            if len(places) > 1 and len(strong) < 2:
                for p in places:
                    if p not in strong[:1]:
                        nodes[p] = self.classes.new(sizes[p])
            elif len(places) > 1:
                for p, node in zip(places, self.classes.copies(root, len(places)), strict=True):
                    nodes[p] = node
        self.classes.array(nodes)
        return Dims(tuple(nodes), weak)


def is_uniform(value: Any) -> bool:
    """Whether all elements of a constant are equal."""
    if not hasattr(value, "shape") or not np.issubdtype(getattr(value, "dtype", None), np.generic):
        return True
    array = np.asarray(value)
    return array.size <= 1 or not (array != array.flat[0]).any()


def check_known(jaxpr: Any, rules: Mapping[str, Any], outer: Source = UNKNOWN) -> list[str]:
    """Returns a line for each equation whose primitive has no rule."""
    problems: dict[str, None] = {}
    inner = jaxpr.jaxpr if isinstance(jaxpr, jex.ClosedJaxpr) else jaxpr
    for equation in inner.eqns:
        name, source = equation.primitive.name, source_of(equation, outer)
        if name not in rules:
            problems[f"`{name}`{source.at}"] = None
            continue
        for body in bodies(equation.params):
            problems.update(dict.fromkeys(check_known(body, rules, source)))
    return list(problems)


# Parameters with jaxprs that the rules do not read.
UNREAD = ("update_jaxpr", "reducer", "comparator", "jvp_jaxpr_fun", "select_jaxpr")


def bodies(params: Mapping[str, Any]) -> list[Any]:
    """Returns the jaxprs that an equation runs."""
    jaxprs = []
    for name, value in params.items():
        if name in UNREAD:
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, jex.ClosedJaxpr | jex.Jaxpr):
                jaxprs.append(each)
    return jaxprs


def labels(naming: Naming, frame: Frame, atom: Any) -> tuple[str, ...]:
    """Returns the names of the positions of a variable."""
    return naming.of(frame.of(atom).nodes)
