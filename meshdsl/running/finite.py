"""Finding what is not finite: graphs that also count it, and what the counts tell.

A graph is *watched* by giving it one more output: how many NaN and infinities some of its tensors
have, those of every step of its scans included. Normally that is few tensors, to learn that
something is wrong. To learn what, the same inputs run through the graph with every tensor counted,
and its operations are gone through in order: the first that made something of finite operands is
to blame for all that comes of it. What is made and then dropped again, as behind `md.where`, does
not count.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshdsl.ops.control.debug import counts
from meshdsl.ops.creation import zeros
from meshdsl.ops.elementwise.arithmetic import where
from meshdsl.ops.reductions.reduction import sum as total
from meshdsl.ops.shapes.joining import concat, stack
from meshdsl.ops.shapes.shape import merge
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import is_differentiable
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, TracedTensor
from meshdsl.tracing.trace import Trace, located, tracing

_CHECKS = "_checks"
_INT32 = np.dtype("int32")
_Chosen = Callable[[Operation | None, Tensor], bool]


@dataclass(frozen=True)
class Watched:
    """A graph whose last output counts what is not finite: s32[_checks]."""

    graph: Graph
    level: _Level

    def search(self, found: np.ndarray) -> str:
        """Returns what the counts tell of a graph of which every tensor is watched."""
        search = _Search()
        paths = self.level.graph.input_paths
        env: dict[Tensor, _Maker | None] = {}
        for tensor, path in zip(self.level.graph.inputs, paths, strict=True):
            bad = self.level.count(found, tensor)
            env[tensor] = search.made(None, tensor, bad, (), path) if any(bad) else None
        try:
            search.run(self.level, found, env, ())
        except _Found as point:
            return str(point)
        ends = zip(self.level.graph.outputs, self.level.graph.output_paths, strict=True)
        for tensor, path in ends:
            maker = env[tensor]
            if maker is not None:
                return f"the result {f'{path}: ' if path else ''}{tensor} is not finite\n{maker}"
        return "a result is not finite, but was when every operation was checked"


def watched(graph: Graph, *, outputs: bool, everything: bool = False) -> Watched | None:
    """Returns a graph that counts what is not finite; None where nothing is to be counted.

    Args:
        outputs: whether the graph's outputs are counted, besides what `md.check_finite` is given.
        everything: whether every tensor is.
    """
    ends = set(graph.outputs) if outputs else set()

    def chosen(op: Operation | None, tensor: Tensor) -> bool:
        if not is_differentiable(tensor.dtype):
            return False
        if op is not None and op.name == "check_finite":
            return True
        if everything:
            return op is None or not _moves(op)
        return tensor in ends

    if everything:
        graph = _without_prints(graph)
    changed, level = _watch(graph, chosen, of_inputs=True)
    return Watched(changed, level) if level.size else None


def _moves(op: Operation) -> bool:
    """Whether each result has the elements of the operand of its number, and no others."""
    return op.primitive.form.moves and len(op.inputs) == len(op.outputs)


def _without_prints(graph: Graph) -> Graph:
    operations = []
    for op in graph.operations:
        if op.name != "print":
            params = {
                name: _without_prints(value) if isinstance(value, Graph) else value
                for name, value in op.params.items()
            }
            operations.append(replace(op, params=params) if op.bodies else op)
    return replace(graph, operations=tuple(operations))


# Watching.


@dataclass(frozen=True)
class _Level:
    """Where the counts of one graph are: two for each counted tensor, then those of its bodies.

    Attributes:
        graph: the graph, not watched.
        inside: the counts of operations with bodies: first index, and the level of each body.
    """

    graph: Graph
    counted: Mapping[Tensor, int]
    inside: Mapping[Operation, tuple[int, Mapping[str, _Level]]]
    size: int

    def count(self, found: np.ndarray, tensor: Tensor) -> tuple[int, int]:
        """Returns how many NaN and how many infinities a counted tensor has."""
        at = 2 * self.counted[tensor] if tensor in self.counted else None
        return (0, 0) if at is None else (int(found[at]), int(found[at + 1]))


class _Beside(Trace):
    """Operations that are put between those of a graph: they take its tensors as they are."""

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    def take(self) -> list[Operation]:
        found, self.operations = self.operations, []
        return found


def _watch(graph: Graph, chosen: _Chosen, of_inputs: bool = False) -> tuple[Graph, _Level]:
    """Returns a graph with one more output, where anything is counted."""
    beside = _Beside()
    operations: list[Operation] = []
    counted: dict[Tensor, int] = {}
    numbers: list[Tensor] = []
    vectors: list[Tensor] = []
    levels: dict[Operation, dict[str, _Level]] = {}
    sizes: dict[Operation, int] = {}

    def count(op: Operation | None, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if tensor not in counted and chosen(op, tensor):
                counted[tensor] = len(counted)
                with located(tensor.source):
                    numbers.extend(counts(tensor))
        operations.extend(beside.take())

    with tracing(beside):
        if of_inputs:
            count(None, graph.inputs)
        for op in graph.operations:
            changed, vector = op, None
            if op.primitive.result_graphs:
                with located(op.source):
                    changed, vector, levels[op] = _watch_inside(op, chosen, operations, beside)
            operations.append(changed)
            if vector is not None:
                with located(op.source):
                    vectors.append(_flat(vector))
                sizes[op] = vectors[-1].shape.volume
                operations.extend(beside.take())
            count(op, op.outputs)
        start = len(numbers)
        if numbers:
            vectors.insert(0, stack(numbers, Dimension(_CHECKS, start)))
        ends = [concat(vectors, _CHECKS)] if len(vectors) > 1 else vectors
        operations.extend(beside.take())
    offsets = itertools.accumulate((sizes.get(op, 0) for op in levels), initial=start)
    inside = {op: (at, found) for (op, found), at in zip(levels.items(), offsets, strict=False)}
    level = _Level(graph, counted, inside, ends[0].shape.volume if ends else 0)
    outputs = (*graph.outputs, *ends)
    paths = (*graph.output_paths, *("checks" for _ in ends)) if graph.output_paths else ()
    watching = replace(graph, operations=tuple(operations), outputs=outputs, output_paths=paths)
    return watching, level


def _flat(vector: Tensor) -> Tensor:
    return merge(vector, vector.shape.names, _CHECKS) if len(vector.shape) > 1 else vector


def _watch_inside(
    op: Operation, chosen: _Chosen, before: list[Operation], beside: _Beside
) -> tuple[Operation, Tensor | None, dict[str, _Level]]:
    """Returns an operation that also returns the counts of its bodies, and these counts."""
    params, levels = dict(op.params), {}
    for name in op.primitive.result_graphs:
        params[name], levels[name] = _watch(op.params[name], chosen)
    size = sum(level.size for level in levels.values())
    if not size:
        return op, None, levels
    dim, inputs = Dimension(_CHECKS, size), op.inputs
    shape = Shape([dim])
    if op.name == "scan":
        shape = Shape([op.params["dim"], dim])
    elif op.name == "cond":
        names = op.primitive.result_graphs
        for at, name in enumerate(names):
            params[name] = _padded(params[name], levels, names, at)
    elif op.name == "while_loop":
        start = zeros([dim], "int32")
        before.extend(beside.take())
        inputs = (*op.inputs, start)
        params["body"], carry = _carrying(params["body"], shape)
        condition: Graph = op.params["condition"]
        same = TracedTensor(carry.shape, carry.dtype, carry.source)
        params["condition"] = replace(condition, inputs=(*condition.inputs, same))
    vector = TracedTensor(shape, _INT32, op.source)
    return replace(op, inputs=inputs, outputs=(*op.outputs, vector), params=params), vector, levels


def _padded(graph: Graph, levels: Mapping[str, _Level], names: Sequence[str], at: int) -> Graph:
    """Returns a branch that has zeros for the counts of the others."""
    beside = _Beside()
    own = graph.outputs[-1:] if levels[names[at]].size else ()
    with tracing(beside):
        parts = _parts(levels, names, at, own)
        vector = concat(parts, _CHECKS) if len(parts) > 1 else parts[0]
    kept = graph.outputs[: len(graph.outputs) - len(own)]
    return replace(graph, operations=(*graph.operations, *beside.take()), outputs=(*kept, vector))


def _parts(
    levels: Mapping[str, _Level], names: Sequence[str], at: int, own: Sequence[Tensor]
) -> list[Tensor]:
    found: list[Tensor] = []
    for number, name in enumerate(names):
        if levels[name].size:
            blank = [zeros([Dimension(_CHECKS, levels[name].size)], "int32")]
            found += own if number == at else blank
    return found


def _carrying(body: Graph, shape: Shape) -> tuple[Graph, Tensor]:
    """Returns a loop's body that carries its counts: those of the first step that has any."""
    carry = TracedTensor(shape, _INT32)
    beside = _Beside()
    with tracing(beside):
        kept = where(total(carry) > 0, carry, body.outputs[-1])
    changed = replace(
        body,
        inputs=(*body.inputs, carry),
        operations=(*body.operations, *beside.take()),
        outputs=(*body.outputs[:-1], kept),
    )
    return changed, carry


# What the counts tell.

_Steps = tuple[tuple[Dimension, int], ...]


@dataclass(frozen=True)
class _Maker:
    """The operation that first made something of finite operands; or an input or a constant."""

    number: int
    operation: Operation | None
    tensor: Tensor
    count: tuple[int, int]
    steps: _Steps
    path: str

    def __str__(self) -> str:
        op, tensor = self.operation, self.tensor
        what = f"{_show_count(self.count, tensor)} in {tensor}{_show_steps(self.steps)}"
        if op is None:
            return f"  it comes from the input {self.path}: {what}"
        if not op.inputs:
            return f"  it comes from a constant: {op.name} at {op.source}  {op.source.code}"
        lines = [f"  first made by {op.name}, of finite operands: {what}"]
        lines.append(f"    at {op.source}  {op.source.code}".rstrip())
        for number, operand in enumerate(op.inputs, 1):
            lines.append(f"    operand {number}: {operand}  made at {operand.source}")
        return "\n".join(lines)


def _show_count(count: tuple[int, int], tensor: Tensor) -> str:
    nan, infinite = count
    words = [f"{nan} NaN"] if nan else []
    words += [f"{infinite} infinite"] if infinite else []
    return f"{' and '.join(words)} of {tensor.shape.volume} values"


def _show_steps(steps: _Steps) -> str:
    return "".join(f", step {at} of {dim.name} ({dim.size})" for dim, at in steps)


class _Found(Exception):
    """A value that `md.check_finite` was given is not finite."""

    def __init__(self, op: Operation, steps: _Steps, maker: _Maker) -> None:
        where = f"{op.source}  {op.source.code}".rstrip()
        super().__init__(
            f"check_finite: {op.inputs[0]} is not finite{_show_steps(steps)}\n  at {where}\n{maker}"
        )


class _Search:
    """Goes through a watched graph with its counts; an environment tells who is to blame."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def made(
        self,
        op: Operation | None,
        tensor: Tensor,
        count: tuple[int, int],
        steps: _Steps,
        path: str = "",
    ) -> _Maker:
        return _Maker(next(self.numbers), op, tensor, count, steps, path)

    def run(
        self, level: _Level, found: np.ndarray, env: dict[Tensor, _Maker | None], steps: _Steps
    ) -> None:
        for op in level.graph.operations:
            first = _first(env[t] for t in op.inputs)
            blamed = [first] * len(op.outputs)
            if op in level.inside:
                at, levels = level.inside[op]
                blamed = self._inside(op, levels, found[at:], env, steps)
            elif _is_bad_constant(op):
                blamed = [self.made(op, op.outputs[0], (0, 0), steps)]
            for tensor, maker in zip(op.outputs, blamed, strict=True):
                env[tensor] = maker
                if tensor in level.counted:
                    count = level.count(found, tensor)
                    bad = maker or first or self.made(op, tensor, count, steps)
                    env[tensor] = bad if any(count) else None
            maker = env[op.outputs[0]] if op.name == "check_finite" else None
            if maker is not None:
                raise _Found(op, steps, maker)

    def _inside(
        self,
        op: Operation,
        levels: Mapping[str, _Level],
        found: np.ndarray,
        env: Mapping[Tensor, _Maker | None],
        steps: _Steps,
    ) -> list[_Maker | None]:
        """Returns who is to blame for the results of an operation with bodies."""
        given = [env[t] for t in op.inputs]
        if op.name == "scan":
            return self._scan(op, levels["body"], found, given, steps)
        if op.name == "cond":
            del given[0]
        results = []
        for level in levels.values():
            inner = dict(zip(level.graph.inputs, given, strict=True))
            self.run(level, found, inner, steps)
            results.append([inner[t] for t in level.graph.outputs])
            found = found[level.size :]
        return [_first(both) for both in zip(*results, strict=True)]

    def _scan(
        self,
        op: Operation,
        level: _Level,
        found: np.ndarray,
        given: Sequence[_Maker | None],
        steps: _Steps,
    ) -> list[_Maker | None]:
        dim, consts, carries = op.params["dim"], op.params["consts"], op.params["carries"]
        carry, stacked = list(given[consts : consts + carries]), []
        order = range(dim.size)
        for step in reversed(order) if op.params["reverse"] else order:
            values = [*given[:consts], *carry, *given[consts + carries :]]
            inner = dict(zip(level.graph.inputs, values, strict=True))
            self.run(level, found[step * level.size :], inner, (*steps, (dim, step)))
            results = [inner[t] for t in level.graph.outputs]
            carry = results[:carries]
            stacked.append(results[carries:])
        return [*carry, *(_first(column) for column in zip(*stacked, strict=True))]


def _first(makers: Any) -> _Maker | None:
    return min((m for m in makers if m is not None), key=lambda m: m.number, default=None)


def _is_bad_constant(op: Operation) -> bool:
    if op.name == "full":
        value = op.params["value"]
        return isinstance(value, float) and not math.isfinite(value)
    if op.name == "literal":
        data = op.params["data"]
        return is_differentiable(data.dtype) and not np.isfinite(data).all()
    return False
