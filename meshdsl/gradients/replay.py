"""Replay: a graph's operations emitted again, ready to be walked backwards.

This is reverse-mode differentiation on static single assignment. Each operation pulls the
cotangents of its outputs back to its inputs. Contributions to one tensor are added. Operations with
bodies are replayed by `Primitive.replay`, each in a differentiable form of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshdsl.tensors.dtypes import is_differentiable
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.trace import bind, current, located

Cotangents = list[Tensor | None]


def passes(op: Operation) -> bool:
    """Whether gradients can pass through an operation at all."""
    return op.name != "stop_gradient" and not op.primitive.flat


class Replay:
    """A graph's operations, emitted again into the current trace, ready to be walked backwards.

    Attributes:
        outputs: the graph's outputs in the current trace.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], active: Sequence[bool]) -> None:
        trace = current()
        self.inputs = [trace.own(t) for t in inputs]
        self.values: dict[Tensor, Tensor] = dict(zip(graph.inputs, self.inputs, strict=True))
        self.active = [bool(a) for a in active]
        depends = {t for t, a in zip(graph.inputs, active, strict=True) if a}
        self._steps: list[_Step] = []
        for op in graph.prune().operations:
            arguments = [self.values[t] for t in op.inputs]
            wanted = [t in depends for t in op.inputs]
            with located(op.source):
                if any(wanted) and op.primitive.replay is not None:
                    outputs, pullback = op.primitive.replay(op, arguments, wanted)
                else:
                    emitted = bind(op.primitive, arguments, op.params)
                    outputs = emitted.outputs
                    pullback = functools.partial(pull_back, emitted)
            self.values.update(zip(op.outputs, outputs, strict=True))
            if any(wanted) and passes(op):
                depends.update(t for t in op.outputs if is_differentiable(t.dtype))
                self._steps.append(_Step(op, wanted, pullback))
        self.outputs = [self.values[t] for t in graph.outputs]
        self.active_outputs = [t in depends for t in graph.outputs]
        self._graph = graph

    def backward(self, cotangents: Cotangents) -> Cotangents:
        """Emits the backward pass and returns one cotangent (or None) per input of the graph."""
        totals: dict[Tensor, Tensor] = {}
        self._accumulate(totals, self._graph.outputs, cotangents)
        for step in reversed(self._steps):
            arriving = [totals.pop(t, None) for t in step.operation.outputs]
            if all(c is None for c in arriving):
                continue
            with located(step.operation.source.as_backward()):
                gradients = step.pullback(arriving, step.wanted)
                wanted = [c if w else None for c, w in zip(gradients, step.wanted, strict=True)]
                self._accumulate(totals, step.operation.inputs, wanted)
        return [
            totals.get(t) if active else None
            for t, active in zip(self._graph.inputs, self.active, strict=True)
        ]

    def _accumulate(
        self, totals: dict[Tensor, Tensor], tensors: Sequence[Tensor], cotangents: Cotangents
    ) -> None:
        for tensor, cotangent in zip(tensors, cotangents, strict=True):
            if cotangent is not None:
                assert set(cotangent.shape) == set(tensor.shape), (cotangent, tensor)
                before = totals.get(tensor)
                totals[tensor] = cotangent if before is None else before + cotangent


@dataclass(frozen=True, slots=True)
class _Step:
    """One replayed operation and the function that pulls cotangents back through it."""

    operation: Operation
    wanted: Sequence[bool]
    pullback: Callable[[Cotangents, Sequence[bool]], Cotangents]


def pull_back(op: Operation, cotangents: Cotangents, wanted: Sequence[bool]) -> Cotangents:
    """Emits the gradient of one operation, by its rule.

    Raises:
        ValueError: it has none.
    """
    rule = op.primitive.gradient
    if rule is None:
        file = op.primitive.rule.__module__.replace(".", "/")
        raise ValueError(
            f"{op.name} has no gradient, but one is needed{op.source.at}; wrap its input in "
            "md.stop_gradient(...) if it is a constant there. To give it one, write gradient=... "
            f"of its Primitive in {file}.py"
        )
    return list(rule(op, cotangents, wanted))
