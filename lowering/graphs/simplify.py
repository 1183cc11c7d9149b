"""Simplification of a graph before it is lowered.

`simplify` returns an equal graph in which

- the bodies of `checkpoint` and `custom_gradient` are inlined, and `name` operations are removed;
- successive renames are one, and equal operations occur once;
- every operation is needed by an output, and so is every carry, result and stacked output of loops
  and conds;
- no two operations share a body.

Barriers separate recomputed tensors from the original ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from meshdsl.lowering.graphs.from_nothing import from_nothing
from meshdsl.lowering.program import exact_key
from meshdsl.ops.creation import FULL
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, TracedTensor


def simplify(graph: Graph) -> Graph:
    """Returns an equal graph without duplicate or unneeded operations: of one graph, the same."""
    # A search, a sweep and `decide` lower one graph many times. The graph itself keeps the result:
    # emitters may refer to the graph, and a table of the module would keep both forever.
    if "simplified" not in graph.derived:
        graph.derived["simplified"] = prune(_rebuild(graph))
    return graph.derived["simplified"]


def _rebuild(graph: Graph, made: Sequence[bool] = ()) -> Graph:
    """Returns a copy of a graph, simplified; `made` says which of the first inputs are constant."""
    inputs = tuple(TracedTensor(t.shape, t.dtype, t.source) for t in graph.inputs)
    rebuilder = _Rebuilder({t for t, on in zip(inputs, made, strict=False) if on})
    outputs = rebuilder.run(graph, inputs)
    return replace(
        graph,
        inputs=inputs,
        operations=tuple(rebuilder.operations),
        outputs=outputs,
        names=rebuilder.names,
    )


_INT32 = np.dtype("int32")


class _Rebuilder:
    def __init__(self, made: set[Tensor]) -> None:
        self.made = made  # the constants
        self.operations: list[Operation] = []
        self.known: dict[Hashable, tuple[Tensor, ...]] = {}
        self.names: dict[Tensor, str] = {}
        self.renamed: dict[Tensor, tuple[Tensor, dict[str, str]]] = {}  # of what, and how

    def run(self, graph: Graph, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        values = dict(zip(graph.inputs, inputs, strict=True))
        for op in graph.operations:
            arguments = tuple([values[t] for t in op.inputs])
            if op.primitive.inlined:
                outputs = self.run(op.params["body"], arguments)
            elif op.primitive.mark:
                outputs = arguments[-len(op.outputs) :]
                if op.name == "name":
                    self.names[outputs[0]] = op.params["name"]
            elif op.name == "barrier":
                outputs = self.barrier(op, arguments)
            elif op.name == "rename":
                outputs = (self.rename(op, arguments[0]),)
            else:
                outputs = self.emit(op if op.outputs else _with_result(op), arguments)
            values.update(zip(op.outputs, outputs, strict=False))  # `_with_result` has one more
        self.names.update({values[t]: name for t, name in graph.names.items() if t in values})
        return tuple(values[t] for t in graph.outputs)

    def barrier(self, op: Operation, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Writes a barrier of all arguments but constants, which are computed again anyway."""
        kept = tuple(t for t in arguments if t not in self.made)
        behind = {t: TracedTensor(t.shape, t.dtype, op.source) for t in kept}
        outputs = tuple(behind.values())
        barrier = Operation(op.primitive, tuple(behind), outputs, op.params, op.source)
        self.operations.append(barrier)
        return tuple(behind.get(t, t) for t in arguments)

    def rename(self, op: Operation, tensor: Tensor) -> Tensor:
        """Writes one rename for several in a row, so that no layout of a name between matters."""
        first, before = self.renamed.get(tensor, (tensor, {}))
        names = {d.name: before.get(d.name, d.name) for d in first.shape}
        names = {old: op.params["names"].get(new, new) for old, new in names.items()}
        names = {old: new for old, new in names.items() if old != new}
        if not names:
            return first
        (renamed,) = self.emit(replace(op, params={"names": names}), (first,))
        self.renamed[renamed] = first, names
        return renamed

    def emit(self, op: Operation, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        key = _key(op, arguments)
        if key is not None and key in self.known:
            return self.known[key]
        params, source = op.params, op.source
        if op.bodies:  # results are reported with their lines in the body
            captured = arguments[1:] if op.name == "cond" else arguments[: params["consts"]]
            made = [t in self.made for t in captured]
            params = {
                k: _rebuild(v, made) if isinstance(v, Graph) else v for k, v in params.items()
            }
            like: Graph = params["if_true" if op.name == "cond" else "body"]
            results = zip(op.outputs, like.outputs, strict=True)
            made_of = [TracedTensor(t.shape, t.dtype, inner.source) for t, inner in results]
        else:
            made_of = [TracedTensor(t.shape, t.dtype, source) for t in op.outputs]
        outputs: tuple[Tensor, ...] = tuple(made_of)
        emitted = Operation(op.primitive, arguments, outputs, params, source)
        self.operations.append(emitted)
        if from_nothing(emitted, self.made):
            self.made.update(outputs)
        if op.name == "scan":
            outputs = _without_copies(emitted)
        if key is not None:
            self.known[key] = outputs
        return outputs


def _without_copies(scan: Operation) -> tuple[Tensor, ...]:
    """Returns a scan's outputs; those that stack the same tensor of its body are one."""
    carries = scan.params["carries"]
    first: dict[Tensor, Tensor] = {}
    pairs = zip(scan.params["body"].outputs[carries:], scan.outputs[carries:], strict=True)
    return (*scan.outputs[:carries], *(first.setdefault(inner, outer) for inner, outer in pairs))


def _with_result(op: Operation) -> Operation:
    """Returns an operation that only has effects with a result, a zero, that keeps it alive."""
    zero, result = Shape(), Shape([op.params["dim"]] if op.name == "scan" else [])
    params = dict(op.params)
    for name, body in op.params.items():
        if isinstance(body, Graph):
            made = TracedTensor(zero, _INT32, op.source)
            full = {"value": 0, "shape": zero, "dtype": _INT32}
            operations = (*body.operations, Operation(FULL, (), (made,), full, op.source))
            params[name] = replace(body, operations=operations, outputs=(made,))
    result_of_effect = TracedTensor(result, _INT32, op.source)
    return Operation(op.primitive, op.inputs, (result_of_effect,), params, op.source)


def _key(op: Operation, arguments: Sequence[Tensor]) -> Hashable | None:
    items = []
    if op.primitive.effect:
        return None
    if not op.params:  # as of most operations
        return op.name, tuple(map(id, arguments))
    for name in sorted(op.params):
        value = op.params[name]
        if isinstance(value, Graph | np.ndarray):
            return None
        items.append((name, exact_key(value)))
    return op.name, tuple(map(id, arguments)), tuple(items)


def prune(graph: Graph) -> Graph:
    """Returns a graph without operations that no output needs, in loops and branches too."""
    needed = set(graph.outputs)
    remaining: list[Operation] = []
    for op in reversed(graph.operations):
        used = [t in needed for t in op.outputs]
        if not any(used):
            if not op.effect:
                continue
            used[0] = True  # one result must keep it alive
        if op.name in _NARROWED:
            op = _NARROWED[op.name](op, used)
        needed.update(op.inputs)
        remaining.append(op)
    return replace(graph, operations=tuple(reversed(remaining)))


def _narrow_barrier(op: Operation, used: Sequence[bool]) -> Operation:
    return _with(op, _chosen(op.inputs, used), used, op.params)


def _narrow_scan(op: Operation, used: Sequence[bool]) -> Operation:
    """Drops the carries, stacked outputs and inputs of a scan that nothing needs."""
    consts, carries = op.params["consts"], op.params["carries"]
    body, keep, read = _narrow_loop(op.params["body"], consts, carries, used, set())
    takes = [
        keep[i - consts] if consts <= i < consts + carries else t in read
        for i, t in enumerate(body.inputs)
    ]
    params = {
        **op.params,
        "body": _taking(body, takes),
        "consts": sum(takes[:consts]),
        "carries": sum(keep[:carries]),
    }
    return _with(op, _chosen(op.inputs, takes), keep, params)


def _narrow_while(op: Operation, used: Sequence[bool]) -> Operation:
    """Drops the carries of a while loop that neither the rest nor its condition needs."""
    consts, condition = op.params["consts"], prune(op.params["condition"])
    asked = _read(condition)
    deciding = {t for t, c in zip(op.params["body"].inputs, condition.inputs, strict=True)
                if c in asked}  # fmt: skip
    body, keep, read = _narrow_loop(op.params["body"], consts, len(used), used, deciding)
    takes = [t in read for t in body.inputs[:consts]] + keep
    params = {
        "condition": _taking(condition, takes),
        "body": _taking(body, takes),
        "consts": sum(takes[:consts]),
    }
    return _with(op, _chosen(op.inputs, takes), keep, params)


def _narrow_cond(op: Operation, used: Sequence[bool]) -> Operation:
    """Drops the results of a cond that nothing needs, and inputs that no branch reads."""
    branches = {
        name: prune(replace(body, outputs=_chosen(body.outputs, used)))
        for name, body in op.params.items()
    }
    reads = [_read(body) for body in branches.values()]
    inputs = zip(*(body.inputs for body in branches.values()), strict=True)
    takes = [any(t in read for t, read in zip(both, reads, strict=True)) for both in inputs]
    params = {name: _taking(body, takes) for name, body in branches.items()}
    return _with(op, _chosen(op.inputs, [True, *takes]), used, params)


def _narrow_parts(op: Operation, used: Sequence[bool]) -> Operation:
    parts = tuple(part for part, on in zip(op.params["parts"], used, strict=True) if on)
    return _with(op, op.inputs, used, {**op.params, "parts": parts})


_NARROWED = {
    "barrier": _narrow_barrier,
    "cond": _narrow_cond,
    "scan": _narrow_scan,
    "split_into": _narrow_parts,
    "while_loop": _narrow_while,
}


def _narrow_loop(
    body: Graph, consts: int, carries: int, used: Sequence[bool], deciding: set[Tensor]
) -> tuple[Graph, list[bool], set[Tensor]]:
    """Returns a loop's body with its needed outputs, flags of these, and the tensors it reads.

    Args:
        deciding: inputs that are needed in any case.
    """
    keep = list(used)
    while True:
        pruned = prune(replace(body, outputs=_chosen(body.outputs, keep)))
        read = _read(pruned) | deciding
        grown = [
            on or (i < carries and body.inputs[consts + i] in read) for i, on in enumerate(keep)
        ]
        if grown == keep:
            return pruned, keep, read
        keep = grown


def _read(graph: Graph) -> set[Tensor]:
    return {t for op in graph.operations for t in op.inputs}.union(graph.outputs)


def _chosen(tensors: Sequence[Tensor], keep: Sequence[bool]) -> tuple[Tensor, ...]:
    return tuple(t for t, on in zip(tensors, keep, strict=True) if on)


def _taking(graph: Graph, takes: Sequence[bool]) -> Graph:
    """Returns a graph with some of its inputs."""
    return replace(graph, inputs=_chosen(graph.inputs, takes))


def _with(
    op: Operation, inputs: tuple[Tensor, ...], keep: Sequence[bool], params: Mapping[str, Any]
) -> Operation:
    return Operation(op.primitive, inputs, _chosen(op.outputs, keep), params, op.source)
