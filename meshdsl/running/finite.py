"""Finding NaN and infinities: graphs that also count them, and the search by these counts.

A *watched* graph has one more output: how many NaN and infinities some of its tensors have, in
every step of its scans too. Normally few tensors are counted, which shows that something is wrong.
To learn what, the same inputs run through the graph with every tensor counted. A search goes
through its operations in order: the first one that made a NaN or an infinity of finite operands is
to blame for all that follow from it. Values that are dropped again, as by `md.where`, do not count.
Of several bad results the message names the one whose origin comes first in the program: if the
forward pass and the backward pass each make such values, that is the forward pass.
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

    def search(self, tally: np.ndarray) -> str:
        """Returns the message about the first bad value; every tensor of the graph is watched.

        Args:
            tally: the graph's last output.
        """
        search = _Search()
        paths = self.level.graph.input_paths
        env: dict[Tensor, _Maker | None] = {}
        for tensor, path in zip(self.level.graph.inputs, paths, strict=True):
            bad = self.level.count(tally, tensor)
            env[tensor] = search.made(None, tensor, bad, (), path) if any(bad) else None
        try:
            search.run(self.level, tally, env, ())
        except _NotFinite as point:
            return str(point)
        results = zip(self.level.graph.outputs, self.level.graph.output_paths, strict=True)
        origins = [
            (maker, tensor, path)
            for tensor, path in results
            if (maker := env[tensor]) is not None and is_differentiable(tensor.dtype)
        ]
        if not origins:
            return "a result is not finite, but was when every operation was checked"
        maker, tensor, path = min(origins, key=lambda origin: origin[0].number)
        return f"the result {f'{path}: ' if path else ''}{tensor} is not finite\n{maker}"


def watched(graph: Graph, *, outputs: bool, everything: bool = False) -> Watched | None:
    """Returns a graph that counts NaN and infinities; None where there is nothing to count.

    Args:
        outputs: whether the graph's outputs are counted, besides operands of `md.check_finite`.
        everything: whether every tensor is counted.
    """
    counted_outputs = set(graph.outputs) if outputs else set()

    def chosen(op: Operation | None, tensor: Tensor) -> bool:
        if not is_differentiable(tensor.dtype):
            return False
        if op is not None and op.name == "check_finite":
            return True
        if everything:
            return op is None or not _moves(op)
        return tensor in counted_outputs

    if everything:
        graph = _without_prints(graph)
    changed, level = _watch(graph, chosen, of_inputs=True)
    return Watched(changed, level) if level.size else None


def _moves(op: Operation) -> bool:
    """Whether result i has exactly the elements of operand i, for all i."""
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

    def count(self, tally: np.ndarray, tensor: Tensor) -> tuple[int, int]:
        """Returns how many NaN and how many infinities a counted tensor has."""
        at = 2 * self.counted[tensor] if tensor in self.counted else None
        return (0, 0) if at is None else (int(tally[at]), int(tally[at + 1]))


class _Beside(Trace):
    """Operations to insert between those of a graph; they read its tensors directly."""

    def own(self, tensor: Tensor) -> Tensor:
        return tensor

    def take(self) -> list[Operation]:
        operations, self.operations = self.operations, []
        return operations


def _watch(graph: Graph, chosen: _Chosen, of_inputs: bool = False) -> tuple[Graph, _Level]:
    """Returns a graph with the counts as one more output, if it has any."""
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
        checks = [concat(vectors, _CHECKS)] if len(vectors) > 1 else vectors
        operations.extend(beside.take())
    offsets = itertools.accumulate((sizes.get(op, 0) for op in levels), initial=start)
    inside = {op: (at, bodies) for (op, bodies), at in zip(levels.items(), offsets, strict=False)}
    level = _Level(graph, counted, inside, checks[0].shape.volume if checks else 0)
    outputs = (*graph.outputs, *checks)
    paths = (*graph.output_paths, *("checks" for _ in checks)) if graph.output_paths else ()
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
    outputs = graph.outputs[: len(graph.outputs) - len(own)]
    return replace(
        graph, operations=(*graph.operations, *beside.take()), outputs=(*outputs, vector)
    )


def _parts(
    levels: Mapping[str, _Level], names: Sequence[str], at: int, own: Sequence[Tensor]
) -> list[Tensor]:
    parts: list[Tensor] = []
    for number, name in enumerate(names):
        if levels[name].size:
            blank = [zeros([Dimension(_CHECKS, levels[name].size)], "int32")]
            parts += own if number == at else blank
    return parts


def _carrying(body: Graph, shape: Shape) -> tuple[Graph, Tensor]:
    """Returns a loop's body that carries its counts: those of the first step that has any."""
    carry = TracedTensor(shape, _INT32)
    beside = _Beside()
    with tracing(beside):
        first = where(total(carry) > 0, carry, body.outputs[-1])
    changed = replace(
        body,
        inputs=(*body.inputs, carry),
        operations=(*body.operations, *beside.take()),
        outputs=(*body.outputs[:-1], first),
    )
    return changed, carry


# Searching by the counts.

_Steps = tuple[tuple[Dimension, int], ...]


@dataclass(frozen=True)
class _Maker:
    """The origin of a bad value: an operation with finite operands, an input or a constant.

    Attributes:
        number: how many origins come before it in the program.
    """

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


class _NotFinite(Exception):
    """A value that `md.check_finite` was given is not finite."""

    def __init__(self, op: Operation, steps: _Steps, maker: _Maker) -> None:
        where = f"{op.source}  {op.source.code}".rstrip()
        super().__init__(
            f"check_finite: {op.inputs[0]} is not finite{_show_steps(steps)}\n  at {where}\n{maker}"
        )


class _Search:
    """Goes through a watched graph with its counts; an environment maps tensors to makers."""

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
        self, level: _Level, tally: np.ndarray, env: dict[Tensor, _Maker | None], steps: _Steps
    ) -> None:
        for op in level.graph.operations:
            first = _first(env[t] for t in op.inputs)
            blamed = [first] * len(op.outputs)
            if op in level.inside:
                at, levels = level.inside[op]
                blamed = self._inside(op, levels, tally[at:], env, steps)
            elif _is_bad_constant(op):
                blamed = [self.made(op, op.outputs[0], (0, 0), steps)]
            for tensor, maker in zip(op.outputs, blamed, strict=True):
                env[tensor] = maker
                if tensor in level.counted:
                    count = level.count(tally, tensor)
                    bad = maker or first or self.made(op, tensor, count, steps)
                    env[tensor] = bad if any(count) else None
            maker = env[op.outputs[0]] if op.name == "check_finite" else None
            if maker is not None:
                raise _NotFinite(op, steps, maker)

    def _inside(
        self,
        op: Operation,
        levels: Mapping[str, _Level],
        tally: np.ndarray,
        env: Mapping[Tensor, _Maker | None],
        steps: _Steps,
    ) -> list[_Maker | None]:
        """Returns the makers of bad values in the results of an operation with bodies."""
        makers = [env[t] for t in op.inputs]
        if op.name == "scan":
            return self._scan(op, levels["body"], tally, makers, steps)
        if op.name == "cond":
            del makers[0]
        results = []
        for level in levels.values():
            inner = dict(zip(level.graph.inputs, makers, strict=True))
            self.run(level, tally, inner, steps)
            results.append([inner[t] for t in level.graph.outputs])
            tally = tally[level.size :]
        return [_first(both) for both in zip(*results, strict=True)]

    def _scan(
        self,
        op: Operation,
        level: _Level,
        tally: np.ndarray,
        makers: Sequence[_Maker | None],
        steps: _Steps,
    ) -> list[_Maker | None]:
        dim, consts, carries = op.params["dim"], op.params["consts"], op.params["carries"]
        carry, stacked = list(makers[consts : consts + carries]), []
        order = range(dim.size)
        for step in reversed(order) if op.params["reverse"] else order:
            values = [*makers[:consts], *carry, *makers[consts + carries :]]
            inner = dict(zip(level.graph.inputs, values, strict=True))
            self.run(level, tally[step * level.size :], inner, (*steps, (dim, step)))
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
