"""Random programs over named dims, on random meshes and layouts: the inputs of the property test.

A program is an expression of any operations with its gradient, or a step of training (`training`).
A case number decides everything. A program is drawn while it is traced: each step picks an
operation and operands among the tensors made so far, so tracing it twice gives the same graph.
Values stay tame (a bound on the magnitude is kept for every tensor), and nothing depends on a tie
that rounding could break: comparisons, roundings and maxima act on values shifted by random
amounts.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np

import meshdsl as md
from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.validate import problems
from meshdsl.lowering.graphs.simplify import simplify
from meshdsl.lowering.lower import tensors_of
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelining.rewriting import pipelined
from meshdsl.tensors.dtypes import as_dtype, is_float
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph
from tests.property import training
from tests.property.author import Author, some_dims
from tests.property.operations import step


@dataclass(frozen=True)
class Case:
    """A program with its arguments, a mesh, a layout, and several ways to lower it."""

    number: int
    function: Callable[..., Any]
    inputs: dict[str, Any]
    mesh: md.Mesh
    layout: Layout
    options: tuple[Options, ...]
    graph: Graph
    trains: bool  # a step of training, else an expression with its gradient
    differentiable: bool  # without stop_gradient, so that finite differences tell the gradient

    def __str__(self) -> str:
        ways = "".join(f"\noptions {options}" for options in self.options)
        return f"case {self.number}\nmesh   {self.mesh}\nlayout {self.layout}{ways}\n{self.graph}"


def make_case(number: int, dtype: str = "float64") -> Case:
    """Returns the case of a number; equal numbers give equal cases in every process.

    Args:
        dtype: that of the computation.
    """
    rng = np.random.default_rng([number, 1])
    mesh = _mesh(rng)
    sizes = _sizes(rng, mesh)
    trains = bool(rng.random() < 0.35)
    differentiable = bool(rng.random() < 0.6) and not trains
    make = training.program if trains else _expression
    function, inputs = make(number, rng, sizes, differentiable, dtype)
    graph = md.jit(function).trace(inputs)
    rng = np.random.default_rng([number, 3])
    layout = _layout(rng, graph, mesh, storage=trains)
    options = tuple(_options(rng) for _ in range(2 if rng.random() < 0.3 else 1))
    options = tuple(_possible(each, graph, mesh, layout) for each in options)
    return Case(number, function, inputs, mesh, layout, options, graph, trains, differentiable)


def make_pipeline(number: int) -> Case:
    """Returns a step of training whose layers are a pipeline; equal numbers give equal cases."""
    for attempt in itertools.count():
        rng = np.random.default_rng([number, 4, attempt])
        mesh, options = _mesh(rng), _options(rng)
        axes = tuple(str(a) for a in rng.permutation(mesh.names)[: rng.choice([1, 1, 1, 2])])
        if mesh.extent(axes) not in (2, 3, 4):
            continue
        function, inputs = training.program(
            number * 1000 + attempt, rng, _sizes(rng, mesh), False, "float64", pipeline=True
        )
        graph = md.jit(function).trace(inputs)
        rules = [Rule("", "layers", axes)]
        layout = _layout(rng, graph, mesh, storage=True, given=rules)
        options = _possible(options, graph, mesh, layout)
        if options.pipeline == "none":
            continue
        return Case(number, function, inputs, mesh, layout, (options,), graph, True, False)
    raise AssertionError


def _expression(
    number: int, rng: np.random.Generator, sizes: dict[str, int], differentiable: bool, dtype: str
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Returns a program of any operations, with the gradient of all that is smooth in it."""
    inputs = _inputs(rng, sizes, dtype)
    steps = int(rng.integers(10, 16))

    def function(inputs: dict[str, Tensor]) -> Any:
        drawn = np.random.default_rng([number, 2])
        trained = {name: t for name, t in inputs.items() if is_float(t.dtype)}

        def loss(trained: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            author = Author(drawn, sizes, differentiable, dtype=dtype)
            for name, tensor in {**inputs, **trained}.items():
                author.keep(tensor, 40.0 if name == "indices" else 1.0)
            for _ in range(steps):
                step(author)
            smooth = sum((0.01 * md.mean(md.sin(t)) for t in trained.values()), 0.0)
            return author.loss() + smooth, author.results()

        (value, results), gradients = md.value_and_grad(loss, has_aux=True)(trained)
        return {"loss": value, "gradients": gradients, "results": results}

    return function, inputs


def _mesh(rng: np.random.Generator) -> md.Mesh:
    while True:
        sizes = rng.choice([1, 2, 2, 2, 3, 4], size=rng.integers(1, 4))
        if 1 < math.prod(sizes) <= 8 or (math.prod(sizes) == 1 and rng.random() < 0.1):
            axes = tuple((f"m{i}", int(size)) for i, size in enumerate(sizes))
            return md.Mesh(axes, frozenset(name for name, _ in axes if rng.random() < 0.2))


def _options(rng: np.random.Generator) -> Options:
    """Draws the fields of `Options`, by their types; each is as by default half of the time.

    A compiler's flags are no matter of numbers.
    """
    kinds = typing.get_type_hints(Options)
    changes: dict[str, Any] = {}
    by_name = ("compiler_flags", "halves", "hardware", "pipeline", "pipeline_rounds")
    for field in fields(Options):
        kind = kinds[field.name]
        if field.name in by_name or rng.random() < 0.5:
            continue
        if kind is bool:
            changes[field.name] = bool(rng.random() < 0.7)
        elif typing.get_origin(kind) is Literal:
            changes[field.name] = str(rng.choice(typing.get_args(kind)))
        else:  # bytes: none at all, some, or more than there are
            changes[field.name] = int(rng.choice([0, 100, 1000, 10_000, 100_000]))
    apart = rng.spawn(1)[0]  # so that cases keep their numbers
    if apart.random() < 0.5:
        changes["hardware"] = str(apart.choice(["v4", "v5e", "v5p", "h100"]))
    changes["halves"] = str(apart.choice(["auto", "none"]))
    changes["pipeline"] = str(apart.choice(["auto", "gpipe", "1f1b", "interleaved", "zb-h1"]))
    changes["pipeline_rounds"] = int(apart.choice([1, 1, 2]))
    if apart.random() < 0.2:
        changes |= {"pipeline": "auto", "pipeline_rounds": None}
    return Options(**changes)


def _possible(options: Options, graph: Graph, mesh: md.Mesh, layout: Layout) -> Options:
    """Returns options by which a program can be lowered: without a pipeline where none can be.

    A random program often has fewer layers than stages, or no microbatches, or splits over an axis
    of the pipeline what is inside of the layers. A schedule of one round has no more of them.
    """
    plain = replace(options, pipeline="auto", pipeline_rounds=1)
    for each in (options, plain):
        try:
            made = pipelined(simplify(graph), layout, mesh, each)
        except ValueError:
            continue
        return plain if made is None else each
    return replace(options, pipeline="none", pipeline_rounds=1)


def _sizes(rng: np.random.Generator, mesh: md.Mesh) -> dict[str, int]:
    """Returns dims; some axes divide about two thirds of them, the others are of any size."""
    found = {}
    for name in "abcdef":
        if rng.random() < 0.35:
            found[name] = int(rng.integers(1, 12))
            continue
        while True:
            axes = [size for _, size in mesh.axes if rng.random() < 0.6]
            size = math.prod(axes) * int(rng.choice([1, 1, 1, 2, 3]))
            if size <= 12 and (size > 1 or rng.random() < 0.1):
                found[name] = size
                break
    return found


def _inputs(
    rng: np.random.Generator, sizes: dict[str, int], dtype: str
) -> dict[str, md.NamedArray]:
    found = {}
    for name in ("p", "q", "r"):
        dims = some_dims(rng, sizes, low=1, high=3)
        values = rng.uniform(-1, 1, [d.size for d in dims])
        found[name] = md.named(values.astype(as_dtype(dtype)), dims)
    dims = some_dims(rng, sizes, low=0, high=2)
    indices = rng.integers(-1, 8, [d.size for d in dims]).astype(np.int32)
    found["indices"] = md.named(indices, dims)
    return found


def _layout(
    rng: np.random.Generator,
    graph: Graph,
    mesh: md.Mesh,
    storage: bool,
    given: Sequence[Rule] = (),
) -> Layout:
    """Draws rules one by one and keeps those that fit the program so far.

    Args:
        storage: whether most rules are about what lives between two steps.
        given: the rules that it starts with; others without a scope have other axes.
    """
    simple = simplify(graph)
    paths = dict(zip(simple.inputs, simple.input_paths, strict=True))
    outputs = list(zip(simple.outputs, simple.output_paths, strict=True))
    tensors = [("", t.shape, paths.get(t, ""), t.source) for t, _ in tensors_of(simple)]
    there = {t for t, _ in tensors_of(simple)}  # what is not needed may still have a name
    ends = [(t, path) for t, path in (*outputs, *_named(simple)) if t in there]
    tensors += [("", t.shape, path, t.source) for t, path in ends]
    dims = sorted({name for _, shape, _, _ in tensors for name in shape.names})
    scopes = [p for p in (*simple.input_paths, *simple.output_paths) if "key" not in p]
    wanted = [("", str(name)) for name in rng.permutation(dims) if rng.random() < 0.8]
    if storage or rng.random() < 0.5:
        scopes += training.SCOPES * 3 if storage else ["inputs", "gradients", "results", "**/p"]
        kept = sorted({n for t, p in outputs if "params" in p for n in t.shape.names}) or dims
        for _ in range(rng.integers(1, 6 if storage else 5)):
            wanted.append((str(rng.choice(scopes)), str(rng.choice(kept if storage else dims))))
        if storage:  # storage takes the axes that it needs before most of the rest does
            wanted = [wanted[i] for i in rng.permutation(len(wanted))]
            wanted = [("", "rows")] * bool(rng.random() < 0.5) + wanted
    rules = list(given)
    taken = {axis for rule in given for axis in rule.axes}
    for scope, dim in wanted:
        count = rng.choice([0, 1, 2, 3], p=[0.05, 0.65, 0.22, 0.08])
        axes = tuple(str(a) for a in rng.permutation(mesh.names)[:count])
        optional = bool(axes) and bool(rng.random() < 0.3)
        for rule in (Rule(scope, dim, axes, optional), Rule(scope, dim, axes, bool(axes))):
            if any(rule.target == other.target for other in rules):
                break
            if not scope and not taken.isdisjoint(axes):
                break
            if not problems(Layout((*rules, rule)), mesh, tensors, known_dims=dims):
                rules.append(rule)
                break
    return Layout(tuple(rules))


def _named(graph: Graph) -> Iterator[tuple[Tensor, str]]:
    """Yields the tensors inside a program that scopes can describe."""
    yield from graph.names.items()
    for op in graph.operations:
        for body in op.bodies:
            yield from _named(body)
