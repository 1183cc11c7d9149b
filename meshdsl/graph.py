"""The traced program: tensors, operations and graphs over global named tensors.

A graph knows nothing of devices. It is static single assignment: an `Operation` makes its output
tensors once, from tensors made before it. Tensors are compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.dims import Shape
from meshdsl.dtypes import short
from meshdsl.operators import NamedOperators
from meshdsl.source import UNKNOWN, Source

if TYPE_CHECKING:
    from meshdsl.trace import Trace

Aval = tuple[Shape, np.dtype]


class Tensor(NamedOperators):
    """A named tensor of a traced program; it has dims and a dtype, never data."""

    __slots__ = ("dtype", "shape", "source", "trace")

    def __init__(
        self, shape: Shape, dtype: np.dtype, source: Source = UNKNOWN, trace: Trace | None = None
    ):
        self.shape = shape
        self.dtype = dtype
        self.source = source
        self.trace = trace

    @property
    def dims(self) -> Shape:
        return self.shape

    @property
    def bytes(self) -> int:
        return self.shape.volume * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short(self.dtype)}{self.shape}"

    def __repr__(self) -> str:
        return f"Tensor({self})"

    def __bool__(self) -> bool:
        raise ValueError(
            f"the value of {self} is not known while tracing, so Python's `if`, `and`, `or` and "
            "`not` cannot use it; write md.where(...), `&`, `|` or `~`"
        )

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Primitive:
    """A kind of operation: its shape rule and its gradient rule.

    Attributes:
        name: as printed, and as partition rules are registered by.
        rule: (inputs, params) -> one (shape, dtype) per output; raises ValueError with the reason.
        gradient: (operation, cotangents, wanted) -> one cotangent or None per input. `cotangents`
            has None for outputs that do not matter, `wanted` a bool per input.
        replay: for operations with bodies: re-emits the operation in a differentiable form and
            returns its outputs with the function that plays the part of `gradient`.
    """

    name: str
    rule: Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Aval]]
    gradient: Callable[[Operation, Sequence, Sequence[bool]], Sequence] | None = None
    replay: Callable[..., tuple[Sequence[Tensor], Callable]] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False, slots=True)
class Operation:
    """One application of a primitive."""

    primitive: Primitive
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    source: Source = UNKNOWN

    @property
    def name(self) -> str:
        return self.primitive.name


@dataclass(frozen=True, eq=False)
class Graph:
    """Operations in order, from inputs to outputs.

    Attributes:
        input_paths: one per input, starting with the traced function's parameter name; empty for
            the bodies of operations.
        output_paths: one per output, from the returned tree.
    """

    inputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Tensor, ...]
    name: str = ""
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()

    def prune(self) -> Graph:
        """Returns this graph without the operations that no output needs."""
        needed = set(self.outputs)
        kept = []
        for operation in reversed(self.operations):
            if any(output in needed for output in operation.outputs):
                needed.update(operation.inputs)
                kept.append(operation)
        return Graph(
            self.inputs,
            tuple(reversed(kept)),
            self.outputs,
            self.name,
            self.input_paths,
            self.output_paths,
        )

    def __str__(self) -> str:
        return GraphPrinter().show(self)


class GraphPrinter:
    """Prints a graph one operation a line; tensors are numbered in order of appearance."""

    def __init__(self) -> None:
        self.names: dict[Tensor, str] = {}

    def name(self, tensor: Tensor) -> str:
        return self.names.setdefault(tensor, f"t{len(self.names)}")

    def show(self, graph: Graph, indent: str = "") -> str:
        lines = []
        paths = graph.input_paths or ("",) * len(graph.inputs)
        for tensor, path in zip(graph.inputs, paths, strict=True):
            lines.append(f"{indent}input  {self.name(tensor)}: {tensor}  {path}".rstrip())
        for operation in graph.operations:
            outputs = ", ".join(f"{self.name(t)}: {t}" for t in operation.outputs)
            plain = {k: v for k, v in operation.params.items() if not isinstance(v, Graph)}
            arguments = [self.name(t) for t in operation.inputs]
            arguments += [f"{k}={v}" for k, v in plain.items() if not isinstance(v, np.ndarray)]
            lines.append(
                f"{indent}{outputs} = {operation.name}({', '.join(arguments)})"
                f"    {operation.source}"
            )
            for body in operation.params.values():
                if isinstance(body, Graph):
                    lines.append(self.show(body, indent + "    "))
        lines.append(f"{indent}output {', '.join(self.name(t) for t in graph.outputs)}")
        return "\n".join(lines)
