"""Printing of traced programs: one line for what one source line computes, as a formula.

Names are those of the source. The last value of a statement has the name that it assigns to;
earlier values add their operation to it (`weights.max`). A value that is read once in the same
statement is written where it is read. Beside each formula are the dims of its result and the line.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.paths import path_names
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.formulas import ATOM, Formula, number, operate
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.statements import Statement, statement_at

_LONGEST = 40  # formulas that grow longer are broken
_FORMULA, _TYPE = 66, 44  # the widest that these columns get
Row = tuple[str, str, str]


def show(graph: Graph) -> str:
    """Returns a graph as text."""
    head = [f"{graph.name or 'graph'}: {operation_count(graph)} operations"]
    return "\n".join([*head, *_aligned(rows_of(graph))])


def rows_of(graph: Graph) -> list[Row]:
    """Returns the rows of a graph: a formula, the type of its result, and its line."""
    names = path_names(graph.input_paths) if graph.input_paths else []
    names += [f"x{number}" for number in range(len(names), len(graph.inputs))]
    scope = _Scope()
    rows = [
        (f"input {scope.define(tensor, name)}", str(tensor), path if path != name else "")
        for tensor, name, path in zip(graph.inputs, names, graph.input_paths or names, strict=True)
    ]
    rows += _Printer(graph, scope).rows("")
    paths = graph.output_paths or ("",) * len(graph.outputs)
    for tensor, path in zip(graph.outputs, paths, strict=True):
        rows.append((f"output {scope.text(tensor)}", str(tensor), path))
    return rows


def operation_count(graph: Graph) -> int:
    """Returns how many operations a graph has, those of bodies included."""
    inner = sum(operation_count(body) for op in graph.operations for body in op.bodies)
    return len(graph.operations) + inner


class _Scope:
    """The names in use in one graph."""

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}
        self.formulas: dict[Tensor, Formula] = {}  # of values without a line of their own
        self.used: set[str] = set()

    def define(self, tensor: Tensor, name: str) -> str:
        """Names a tensor; a name in use gets a number."""
        numbered = (f"{name}.{n}" for n in itertools.count(2))
        unique = next(one for one in itertools.chain([name], numbered) if one not in self.used)
        self.used.add(unique)
        self.names[tensor] = unique
        return unique

    def formula(self, tensor: Tensor) -> Formula:
        return self.formulas.get(tensor) or (self.names[tensor], ATOM)

    def text(self, tensor: Tensor) -> str:
        return self.formula(tensor)[0]


def _is_label(op: Operation) -> bool:
    """Whether an operation is the path that differentiation gives a gradient."""
    return op.name == "name" and op.params["name"].startswith("gradients/")


class _Printer:
    """Prints the operations of one graph."""

    def __init__(self, graph: Graph, scope: _Scope) -> None:
        self.graph = graph
        self.scope = scope
        self.outputs = frozenset(graph.outputs)
        self.readers: dict[Tensor, list[Operation]] = collections.defaultdict(list)
        for op in graph.operations:
            for tensor in op.inputs:
                self.readers[tensor].append(op)

    def rows(self, indent: str) -> Iterator[Row]:
        runs = itertools.groupby(self.graph.operations, lambda op: statement_at(op.source))
        for statement, run in runs:
            operations = list(run)
            for op in operations:
                if self._folds(op, statement):
                    self.scope.formulas[op.outputs[0]] = self._formula(op)
                else:
                    yield from self._line(op, statement, op is operations[-1], indent)

    def _folds(self, op: Operation, statement: Statement) -> bool:
        """Whether an operation is written where its result is read."""
        if op.bodies or len(op.outputs) != 1 or op.effect:
            return False
        (tensor,) = op.outputs
        if (op.name == "full" and not tensor.shape) or _is_label(op):
            return True
        readers = self.readers[tensor]
        if len(readers) != 1 or tensor in self.outputs:
            return False
        if readers[0].bodies or statement_at(readers[0].source) != statement:
            return False
        return len(self._formula(op)[0]) <= _LONGEST

    def _formula(self, op: Operation) -> Formula:
        inputs = [self.scope.formula(tensor) for tensor in op.inputs]
        if _is_label(op):
            return inputs[0]
        if op.primitive.symbol:
            return operate(op.primitive.symbol, inputs)
        if op.name == "full" and not op.outputs[0].shape:
            return number(op.params["value"]), ATOM
        called = op.params["definition"].name if op.name == "local" else op.primitive.word
        arguments = [text for text, _ in inputs] + _extras(op)
        return f"{called or op.name}({', '.join(arguments)})", ATOM

    def _line(self, op: Operation, statement: Statement, last: bool, indent: str) -> Iterator[Row]:
        if op.bodies:
            yield from self._bodies(op, statement, indent)
            return
        formula = self._formula(op)[0]
        if op.effect and not self.readers[op.outputs[0]] and op.outputs[0] not in self.outputs:
            yield f"{indent}{formula}", "", str(op.source)
            return
        self._define(op, statement, last)
        results = ", ".join(self.scope.names[tensor] for tensor in op.outputs)
        types = ", ".join(str(tensor) for tensor in op.outputs[:1])
        yield f"{indent}{results} = {formula}", types, str(op.source)

    def _define(self, op: Operation, statement: Statement, last: bool) -> None:
        names = list(statement.names)
        if len(names) != len(op.outputs):
            base = names[0] if last or op.bodies else f"{names[0]}.{op.name}"
            names = [base] * len(op.outputs)
        for tensor, name in zip(op.outputs, names, strict=True):
            self.scope.define(tensor, f"{name}_grad" if statement.backward else name)

    def _bodies(self, op: Operation, statement: Statement, indent: str) -> Iterator[Row]:
        bodies: list[Row] = []
        inner: list[str] = []
        for name, body in op.params.items():
            if not isinstance(body, Graph) or name == "backward":
                continue
            if len(op.bodies) > 1:
                bodies.append((f"{indent}  {_PARTS.get(name, name)}", "", ""))
            rows, inner = self._body(op, body, indent + "    ")
            bodies += rows
        names = list(statement.names)
        if op.name == "scan" and len(names) != len(op.outputs):
            dim, carries = op.params["dim"].name, op.params["carries"]
            names = [name if i < carries else f"{name}[{dim}]" for i, name in enumerate(inner)]
            for tensor, name in zip(op.outputs, names, strict=True):
                self.scope.define(tensor, name)
        else:
            self._define(op, statement, True)
        results = ", ".join(self.scope.names[tensor] for tensor in op.outputs)
        kind = ", ".join(map(str, op.outputs[:1])) + (", …" if len(op.outputs) > 1 else "")
        yield f"{indent}{f'{results} = ' if results else ''}{self._head(op)}", kind, str(op.source)
        yield from bodies

    def _body(self, op: Operation, body: Graph, indent: str) -> tuple[list[Row], list[str]]:
        """Returns the rows of a body, and the names of its outputs."""
        scope, rows = _Scope(), []
        skipped = len(op.inputs) - len(body.inputs)  # a cond's predicate
        for position, (outer, inner) in enumerate(
            zip(op.inputs[max(skipped, 0) :], body.inputs, strict=False)
        ):
            name, role = self.scope.text(outer), _role(op, position)
            stacked = f"[{op.params['dim'].name}]" if role == "over" else ""
            plain = name.removesuffix(stacked)
            if not plain.replace("_", "").replace(".", "").isalnum():
                plain = role or "value"
            scope.define(inner, plain)
            if role:
                start = "" if role == "over" and plain == name else f" = {name}"
                rows.append((f"{indent}{role} {scope.names[inner]}{start}", str(inner), ""))
        rows += _Printer(body, scope).rows(indent)
        returned = [scope.text(tensor) for tensor in body.outputs]
        if returned:
            rows.append((f"{indent}return {', '.join(returned)}", "", ""))
        return rows, returned

    def _head(self, op: Operation) -> str:
        params = op.params
        if op.name == "scan":
            order = ", last first" if params["reverse"] else ""
            return f"scan {params['dim']}{order}"
        if op.name == "cond":
            return f"cond if {self.scope.text(op.inputs[0])}"
        if op.name == "custom_gradient":
            return f"custom_gradient {params['function']}"
        return op.name


_PARTS = {"if_true": "if true", "if_false": "if false"}


def _role(op: Operation, position: int) -> str:
    """Returns the role of an input of a loop's body if it is more than read."""
    consts = op.params.get("consts", 0)
    if op.name == "scan":
        if position < consts:
            return ""
        return "carry" if position < consts + op.params["carries"] else "over"
    return "carry" if "condition" in op.params and position >= consts else ""


def _extras(op: Operation) -> list[str]:
    """Returns the texts after the operands: dims, dtypes, settings."""
    params, (out, *_) = op.params, op.outputs
    if op.name == "einsum":
        have = Shape({d.name: d for t in op.inputs for d in t.shape}.values())
        over = [name for name in have.names if out.shape.find(name) is None]
        return [f"over={'+'.join(over)}"] if over else []
    if op.name == "cast":
        return [short(out.dtype)]
    if op.name == "broadcast":
        return list(out.shape.without(op.inputs[0].shape.names).names)
    if op.name in ("arange", "full", "merge", "split", "transpose"):
        value = [number(params["value"])] if op.name == "full" else []
        return [*value, *out.shape.names]
    if op.name == "print":
        return [str(params["message"])]
    if op.name == "local":
        return [f"{name}={_setting(value)}" for name, value in params["params"]]
    if op.name == "literal":
        return []
    extras = []
    for name, value in params.items():
        text = _setting(value)
        if text and len(text) <= 24 and name not in ("shape", "dtype"):
            extras.append(text if _is_dims(value) else f"{name}={text}")
    return extras


def _is_dims(value: Any) -> bool:
    several = isinstance(value, tuple | list | Mapping)
    return isinstance(value, str | Dimension) or (several and bool(value))


def _setting(value: Any) -> str:
    """Returns a parameter as text; empty for None, False, graphs and arrays."""
    if value is None or value is False or isinstance(value, Graph | np.ndarray):
        return ""
    if isinstance(value, Dimension):
        return value.name
    if isinstance(value, Mapping):
        return ", ".join(f"{name} -> {_setting(one)}" for name, one in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(_setting(one) for one in value)
    return number(value)


def _aligned(rows: Iterable[Row]) -> Iterator[str]:
    """Yields rows of formula, type and place in columns."""
    cells: Sequence[Row] = list(rows)
    formula = min(_FORMULA, max((len(row[0]) for row in cells), default=0))
    kind = min(_TYPE, max((len(row[1]) for row in cells), default=0))
    for row in cells:  # a short type makes room for a long formula
        line = f"{row[0]:<{formula}}  {row[1]}"
        yield f"  {line:<{formula + kind + 2}}  {row[2]}".rstrip()
