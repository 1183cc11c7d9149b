"""Joint: a body together with its gradient, traced as one graph and divided in two.

Operations with bodies differentiate them in this way. The forward part also returns the values that
the backward part reads. Values that are cheap to recompute are not returned but recomputed, unless
the backward part compares them with their maximum.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from meshdsl.gradients.replay import Cotangents, Replay
from meshdsl.ops.creation import zeros
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, Work
from meshdsl.tracing.trace import Trace, current, tracing

R = TypeVar("R")


class Joint:
    """A body and its gradient in one trace.

    Attributes:
        inputs: the body's inputs, as this trace has them.
        results: the body's outputs.
        active_results: for each, whether it depends on an active input.
        seeds: per result, the cotangent that arrives for it, or None; known after `pull`.
    """

    def __init__(self, body: Graph, active: Sequence[bool]) -> None:
        self._trace = Trace(current())
        with tracing(self._trace):
            self.inputs = tuple(self.input(t) for t in body.inputs)
            self._replayed = Replay(body, self.inputs, active)
        self.results = tuple(self._replayed.outputs)
        self.active_results = self._replayed.active_outputs
        self.forward = tuple(self._trace.operations)
        self.backward: tuple[Operation, ...] = ()
        self.seeds: list[Tensor | None] = []

    def input(self, like: Tensor) -> Tensor:
        """Returns one more input of this trace."""
        return self._trace.input(like.shape, like.dtype, like.source)

    def pull(self, seeded: Sequence[bool]) -> Cotangents:
        """Traces the gradient; `seeded` says for which results cotangents arrive.

        Returns:
            One per input, with its dims in order, or None.
        """
        with tracing(self._trace):
            self.seeds = [
                self.input(t) if on else None for t, on in zip(self.results, seeded, strict=True)
            ]
            reaching = zip(self.seeds, self.active_results, strict=True)
            gradients = self._replayed.backward([seed if on else None for seed, on in reaching])
            gradients = [
                None if g is None else g.transpose(t.shape.names)
                for g, t in zip(gradients, self.inputs, strict=True)
            ]
        self._end_backward()
        return gradients

    def extend(self, function: Callable[[], R]) -> R:
        """Traces more of the backward part."""
        with tracing(self._trace):
            result = function()
        self._end_backward()
        return result

    def _end_backward(self) -> None:
        assert not self._trace.captured, "gradient rules use nothing but their operation's tensors"
        self.backward = tuple(self._trace.operations[len(self.forward) :])

    def forward_graph(self, extra: Sequence[Tensor] = ()) -> Graph:
        """Returns the forward part; it also returns `extra`, zeros for those of another trace."""
        blank = Trace()
        made = set(self.inputs).union(*(op.outputs for op in self.forward))
        with tracing(blank):
            outputs = [t if t in made else zeros(t.shape, t.dtype) for t in extra]
        operations = (*self.forward, *blank.operations)
        return Graph(self.inputs, operations, (*self.results, *outputs)).prune()

    def cut(
        self, outputs: Sequence[Tensor], at_hand: Collection[Tensor]
    ) -> tuple[list[Tensor], tuple[Operation, ...]]:
        """Decides what the backward part reads, and which forward operations it repeats.

        A tensor is recomputed where its operation is cheap and this reads fewer bytes: its operands
        are read anyway, are available (`at_hand`), are constants, or are smaller together than the
        tensor. So is a tensor behind several cheap operations, such as a weight that is cast and
        then quantized, if that reads fewer bytes of what is not available.

        If the backward part compares an operand with its maximum, it reads the operand and computes
        the maximum of that again. Otherwise no element might be the maximum: a compiler rounds an
        operand in several ways, with a multiply-add for one, and after a cancellation they differ
        by more than any tolerance.

        Args:
            outputs: what the backward part returns.

        Returns:
            The tensors to read, in order of definition, and the operations of the backward part.
        """
        maker = {t: op for op in self.forward for t in op.outputs}
        order = {t: i for i, t in enumerate([*self.inputs, *maker])}
        read = {t for op in self.backward for t in op.inputs} | set(outputs)
        read &= order.keys()
        free: set[Tensor] = set()  # constants that are cheap to make
        for op in self.forward:
            if _cheap(op) and all(t in free for t in op.inputs):
                free.update(op.outputs)
        needed: dict[Tensor, int] = {}  # the bytes that are not available behind cheap operations
        for tensor in order:
            if tensor in at_hand or tensor in free:
                needed[tensor] = 0
            elif tensor in maker and _cheap(maker[tensor]):
                operands = dict.fromkeys(maker[tensor].inputs)
                needed[tensor] = min(tensor.bytes, sum(needed[t] for t in operands))
            else:
                needed[tensor] = tensor.bytes
        again: set[Tensor] = set()
        compared: set[Tensor] = set()
        for op in reversed(self.forward):
            if op.primitive.combines in ("max", "min") and read.issuperset(op.inputs + op.outputs):
                compared.update(op.inputs)
                again.update(op.outputs)
                read.difference_update(op.outputs)
        for tensor in sorted(maker, key=lambda t: -order[t]):
            if tensor not in read or not _cheap(maker[tensor]):
                continue
            if tensor in compared and tensor not in free:
                if not maker[tensor].primitive.form.moves:
                    continue
                compared.update(maker[tensor].inputs)  # a rename, for one, rounds nothing
            missing = {
                t for t in maker[tensor].inputs if not (t in read or t in at_hand or t in free)
            }
            if sum(t.bytes for t in missing) < tensor.bytes or needed[tensor] < tensor.bytes:
                # The operation makes all of its results again, also those of no interest before.
                again.update(maker[tensor].outputs)
                read.difference_update(maker[tensor].outputs)
                read.update(maker[tensor].inputs)
        repeated = tuple(op for op in self.forward if op.outputs and op.outputs[0] in again)
        return sorted(read, key=lambda t: order[t]), (*repeated, *self.backward)


def _cheap(op: Operation) -> bool:
    """Whether an operation is cheap enough to be repeated in the backward part."""
    return op.primitive.work <= Work.DIVISION
