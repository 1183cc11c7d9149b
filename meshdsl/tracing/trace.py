"""Tracing: how Python functions over tensors become graphs.

A `Trace` is a graph under construction. Traces nest (bodies of `scan` and `checkpoint`, functions
being differentiated); an operation always joins the innermost trace, and a tensor of an outer trace
that it uses is *captured*: it becomes one more input of the inner graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshdsl.tensors.dims import Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, Primitive, TracedTensor
from meshdsl.tracing.source import Source, caller


class Trace:
    """A graph under construction.

    Attributes:
        makers: the operation that makes each tensor; inputs have none.
        numbers: the constants of Python numbers, by type, number and dtype.
    """

    def __init__(self, parent: Trace | None = None) -> None:
        self.parent = parent
        self.inputs: list[Tensor] = []
        self.operations: list[Operation] = []
        self.makers: dict[Tensor, Operation] = {}
        self.captured: dict[Tensor, Tensor] = {}
        self.literals: dict[int, tuple[Any, Tensor]] = {}
        self.numbers: dict[tuple[type, float, np.dtype | None], Tensor] = {}
        self.notes: dict[str, None] = {}

    def note(self, text: str) -> None:
        """Adds a note for the reports of the program, once."""
        trace = self
        while trace.parent is not None:
            trace = trace.parent
        trace.notes[text] = None

    def input(self, shape: Shape, dtype: np.dtype, source: Source | None = None) -> Tensor:
        tensor = TracedTensor(shape, dtype, source or caller(), self)
        self.inputs.append(tensor)
        return tensor

    def own(self, tensor: Tensor) -> Tensor:
        """Returns `tensor` as this trace sees it, capturing it from an outer trace."""
        if not isinstance(tensor, TracedTensor):
            raise TypeError(f"a program is made of traced tensors, not of {tensor!r}")
        if tensor.trace is self:
            return tensor
        own_tensor = self.captured.get(tensor)
        if own_tensor is None:
            outer = self.parent
            while outer is not None and outer is not tensor.trace:
                outer = outer.parent
            if outer is None:
                raise ValueError(
                    f"a tensor {tensor} made at {tensor.source} is used outside of the function "
                    "that was traced with it; return it from that function instead"
                )
            own_tensor = self.captured[tensor] = TracedTensor(
                tensor.shape, tensor.dtype, tensor.source, self
            )
        return own_tensor

    def finish(self, outputs: Sequence[Tensor]) -> tuple[Graph, tuple[Tensor, ...]]:
        """Returns the graph, captured inputs first, and the captured tensors of the outer trace.

        The trace keeps none of them.
        """
        outputs = [self.own(tensor) for tensor in outputs]
        inner = (*self.captured.values(), *self.inputs)
        graph = Graph(inner, tuple(self.operations), tuple(outputs), notes=tuple(self.notes))
        captured = tuple(self.captured)
        # Tensors refer to their trace: without this cycle, reference counting frees the graph.
        made = self.operations, self.makers, self.numbers, self.literals
        for kept in (self.inputs, self.captured, *made):
            kept.clear()
        return graph, captured


class ArrayTrace(Trace):
    """A trace in which arrays with data are inputs, not literals: for operations that run at once.

    Attributes:
        arrays: the data of the inputs, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrays: list[Any] = []

    def array(self, array: Any) -> Tensor:
        """Returns the input for a NamedArray."""
        if id(array) not in self.literals:
            self.arrays.append(array)
            self.literals[id(array)] = array, self.input(array.dims, array.dtype)
        return self.literals[id(array)][1]


class _Active(threading.local):
    """The open traces, innermost last. Each thread has its own."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        self.sources: list[Source] = []


_active = _Active()
open_traces: list[None] = []  # one for each open trace of any thread: empty is quicker to see


def is_tracing() -> bool:
    """Whether a function is being traced in this thread."""
    return bool(_active.traces)


def current() -> Trace:
    """Returns the innermost trace.

    Raises:
        ValueError: nothing is being traced.
    """
    if not _active.traces:
        raise ValueError(
            "this runs inside a traced function only: wrap the function around it in md.jit(...) "
            "and call it with NamedArrays"
        )
    return _active.traces[-1]


@contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Makes `trace` the innermost one."""
    _active.traces.append(trace)
    open_traces.append(None)
    try:
        yield trace
    finally:
        open_traces.pop()
        _active.traces.pop()


@contextmanager
def located(source: Source) -> Iterator[None]:
    """Gives every operation made inside the source line `source`."""
    _active.sources.append(source)
    try:
        yield
    finally:
        _active.sources.pop()


def is_derived() -> bool:
    """Whether operations made here repeat or differentiate others, and have the others' lines."""
    return bool(_active.sources)


def here() -> Source:
    """Returns the source line that an operation made at this point belongs to."""
    return _active.sources[-1] if _active.sources else caller()


def bind(
    primitive: Primitive, inputs: Sequence[Tensor], params: Mapping[str, Any] | None = None
) -> Operation:
    """Adds an operation to the innermost trace.

    Raises:
        ValueError: the inputs do not fit the primitive's shape rule.
    """
    trace = current()
    params = params or {}
    # Most tensors are of this trace, so they take no call.
    owned = tuple(
        [
            tensor if type(tensor) is TracedTensor and tensor.trace is trace else trace.own(tensor)
            for tensor in inputs
        ]
    )
    source = here()
    outputs = tuple(
        [
            TracedTensor(shape, dtype, source, trace)
            for shape, dtype in primitive.rule(owned, params)
        ]
    )
    operation = Operation(primitive, owned, outputs, params, source)
    trace.operations.append(operation)
    for tensor in outputs:
        trace.makers[tensor] = operation
    return operation


def bind_one(
    primitive: Primitive, inputs: Sequence[Tensor], params: Mapping[str, Any] | None = None
) -> Tensor:
    """Adds an operation with a single output and returns that output."""
    return bind(primitive, inputs, params).outputs[0]
