"""Reads: the tensors that operations read in another layout than their own.

The cut that decides where partial sums are reduced needs their costs. If a partial sum over an axis
passes through an operation, the operation may need its other operands gathered over that axis; if
not, it may need its operand moved. One move serves all readers, so a read is identified by its
tensor and its layout. Costs are in bytes on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.partition import Strategy
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

if TYPE_CHECKING:
    from meshdsl.lowering.stages import Planned

# The cost of starting one collective, in bytes on the wire; it favours few and large collectives.
START = 1024.0


class Read(NamedTuple):
    """A tensor that is read in another layout than its own.

    Attributes:
        layout: the layout in which it is read.
        again: whether the backward pass gathers it again.
    """

    tensor: Tensor
    layout: TensorLayout
    again: bool


class Reads:
    """The reads of a planned graph, its bodies included.

    Attributes:
        outer: for a tensor that a body captures, the tensor outside, which is moved before the body
            runs.
        times: for a captured tensor, how often its graph runs.
    """

    def __init__(self, planned: Planned) -> None:
        self.planned = planned
        self.outer: dict[Tensor, Tensor] = {}
        self.times: dict[Tensor, int] = {}
        self._survey(planned.graph, 1)

    def _survey(self, graph: Graph, times: int) -> None:
        for op in graph.operations:
            for body in op.bodies:
                inputs = op.inputs[1:] if op.name == "cond" else op.inputs
                captured = op.params.get("consts", len(inputs))
                for inner, outer in zip(body.inputs[:captured], inputs[:captured], strict=True):
                    if inner not in self.planned.stored:  # stored tensors are moved in the body
                        self.outer[inner] = outer
                        self.times[outer] = times
                self._survey(body, times * (op.params["dim"].size if op.name == "scan" else 1))

    @cached_property
    def usual(self) -> dict[Operation, frozenset[Read]]:
        """The reads of operations if no partial sum passes through them."""
        reads_of = {op: self.of(op, strategy) for op, strategy in self.planned.strategies.items()}
        return {op: reads for op, reads in reads_of.items() if reads}

    def of(
        self, op: Operation, strategy: Strategy, partial_operands: Iterable[Tensor] = ()
    ) -> frozenset[Read]:
        """Returns the reads of an operation with a strategy, without those of partial operands."""
        layouts = self.planned.layouts
        rows = zip(op.inputs, strategy.operands, strict=True)
        moved = [(tensor, layout) for tensor, layout in rows if layout != layouts[tensor]]
        if not moved:  # most operations
            return frozenset()
        partial = set(partial_operands)
        return frozenset(self.read(op, *row) for row in moved if row[0] not in partial)

    def read(self, op: Operation, tensor: Tensor, layout: TensorLayout) -> Read:
        """Returns the read of a tensor in a layout by an operation."""
        again = tensor in self.planned.stored and op.source.backward
        while tensor in self.outer:
            tensor = self.outer[tensor]
        return Read(tensor, layout, again)

    def cost(self, read: Read, times: int) -> float:
        """Returns the bytes that a read sends if its reader runs `times` times."""
        if read.tensor in self.planned.constant:
            return 0.0
        sent = self.bytes_between(read.tensor, self.planned.layouts[read.tensor], read.layout)
        return self.times.get(read.tensor, times) * (sent + START) if sent else 0.0

    def bytes_between(self, tensor: Tensor, before: TensorLayout, after: TensorLayout) -> float:
        """Returns the bytes that moving a tensor from one layout to another sends."""
        return reshard_cost(tensor.shape, tensor.dtype.itemsize, before, after, self.planned.mesh)

    def through(self, op: Operation, axis: str) -> Strategy:
        """Returns the strategy of an operation through which a partial sum over `axis` passes."""
        return self.planned.strategy_without(op, frozenset([axis]))
