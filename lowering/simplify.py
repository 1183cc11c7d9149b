"""Simplification of a graph before it is lowered.

`simplify` returns an equal graph in which `checkpoint` bodies are inlined, equal operations occur
once, nothing is computed that no output needs (down to single carries and stacked outputs of
scans), and no two operations share a body. Barriers keep what is computed again apart from the
original.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.graph import Graph, Operation, Tensor
from meshdsl.lowering.from_nothing import from_nothing


def simplify(graph: Graph) -> Graph:
    """Returns an equal graph that does the same work once, and only what is needed."""
    return _prune(_rebuild(graph))


def _rebuild(graph: Graph, made: Sequence[bool] = ()) -> Graph:
    """Returns an equal graph of its own; `made` tells which first inputs are made of nothing."""
    inputs = tuple(Tensor(t.shape, t.dtype, t.source) for t in graph.inputs)
    rebuilder = _Rebuilder({t for t, on in zip(inputs, made, strict=False) if on})
    outputs = rebuilder.run(graph, inputs)
    return Graph(
        inputs,
        tuple(rebuilder.operations),
        outputs,
        graph.name,
        graph.input_paths,
        graph.output_paths,
    )


class _Rebuilder:
    def __init__(self, made: set[Tensor]) -> None:
        self.made = made  # of nothing
        self.operations: list[Operation] = []
        self.known: dict[Hashable, tuple[Tensor, ...]] = {}

    def run(self, graph: Graph, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = dict(zip(graph.inputs, inputs, strict=True))
        for op in graph.operations:
            arguments = tuple(values[t] for t in op.inputs)
            if op.name == "checkpoint":
                outputs = self.run(op.params["body"], arguments)
            elif op.name == "barrier":
                outputs = self.barrier(op, arguments)
            else:
                outputs = self.emit(op, arguments)
            values.update(zip(op.outputs, outputs, strict=True))
        return tuple(values[t] for t in graph.outputs)

    def barrier(self, op: Operation, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Puts a barrier before what has data; the rest may as well be made again."""
        kept = tuple(t for t in arguments if t not in self.made)
        behind = {t: Tensor(t.shape, t.dtype, op.source) for t in kept}
        outputs = tuple(behind.values())
        self.operations.append(Operation(op.primitive, tuple(behind), outputs, {}, op.source))
        return tuple(behind.get(t, t) for t in arguments)

    def emit(self, op: Operation, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        key = _key(op, arguments)
        if key is not None and key in self.known:
            return self.known[key]
        params, sources = op.params, [op.source] * len(op.outputs)
        if "body" in params:  # what a loop returns is told with the line inside it
            made = [t in self.made for t in arguments[: params["consts"]]]
            params = {**params, "body": _rebuild(params["body"], made)}
            sources = [t.source for t in params["body"].outputs]
        outputs = tuple(
            Tensor(t.shape, t.dtype, source) for t, source in zip(op.outputs, sources, strict=True)
        )
        emitted = Operation(op.primitive, arguments, outputs, params, op.source)
        self.operations.append(emitted)
        if from_nothing(emitted, self.made):
            self.made.update(outputs)
        if key is not None:
            self.known[key] = outputs
        return outputs


def _key(op: Operation, arguments: Sequence[Tensor]) -> Hashable | None:
    items = []
    for name in sorted(op.params):
        value = op.params[name]
        if isinstance(value, Graph | np.ndarray):
            return None
        items.append((name, type(value), _hashable(value)))
    return op.name, tuple(map(id, arguments)), tuple(items)


def _hashable(value: Any) -> Hashable:
    if isinstance(value, float):
        return value.hex()  # 0.0 and -0.0 are equal, but not the same
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def _prune(graph: Graph) -> Graph:
    needed = set(graph.outputs)
    kept: list[Operation] = []
    for op in reversed(graph.operations):
        used = [t in needed for t in op.outputs]
        if not any(used):
            continue
        if op.name == "scan":
            op = _narrow(op, used)
        elif op.name == "barrier":
            op = _narrow_barrier(op, used)
        needed.update(op.inputs)
        kept.append(op)
    return Graph(
        graph.inputs,
        tuple(reversed(kept)),
        graph.outputs,
        graph.name,
        graph.input_paths,
        graph.output_paths,
    )


def _narrow_barrier(op: Operation, used: Sequence[bool]) -> Operation:
    inputs = tuple(t for t, on in zip(op.inputs, used, strict=True) if on)
    outputs = tuple(t for t, on in zip(op.outputs, used, strict=True) if on)
    return Operation(op.primitive, inputs, outputs, op.params, op.source)


def _narrow(op: Operation, used: Sequence[bool]) -> Operation:
    """Drops the carries, stacked outputs and inputs of a scan that nothing needs."""
    body: Graph = op.params["body"]
    consts, carries = op.params["consts"], op.params["carries"]
    keep = list(used)
    while True:
        outputs = [t for t, on in zip(body.outputs, keep, strict=True) if on]
        pruned = _prune(Graph(body.inputs, body.operations, tuple(outputs)))
        read = {t for inner in pruned.operations for t in inner.inputs} | set(outputs)
        grown = [
            on or (i < carries and body.inputs[consts + i] in read) for i, on in enumerate(keep)
        ]
        if grown == keep:
            break
        keep = grown
    takes = [
        keep[i - consts] if consts <= i < consts + carries else t in read
        for i, t in enumerate(body.inputs)
    ]
    inputs = tuple(t for t, on in zip(body.inputs, takes, strict=True) if on)
    params = {
        **op.params,
        "body": Graph(inputs, pruned.operations, pruned.outputs),
        "consts": sum(takes[:consts]),
        "carries": sum(keep[:carries]),
    }
    return Operation(
        op.primitive,
        tuple(t for t, on in zip(op.inputs, takes, strict=True) if on),
        tuple(t for t, on in zip(op.outputs, keep, strict=True) if on),
        params,
        op.source,
    )
