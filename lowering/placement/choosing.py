"""Choosing: the choice among the strategies that a partition rule offers.

There is one cost function: bytes on the wire, plus local flops divided by the flops that the
hardware computes in the time of one byte. Among strategies of equal cost the first is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.partition import Case, Strategies, Strategy, Work, rule_of
from meshdsl.lowering.partition.strategy import bytes_moved
from meshdsl.tensors.dtypes import BFLOAT16
from meshdsl.tracing.graph import Operation

# Local flops that take the time of one byte on the wire, if the hardware is not known.
FLOPS_PER_WIRE_BYTE = 2000.0


@dataclass(frozen=True)
class Chooser:
    """Chooses the cheapest of the strategies that rules offer.

    Attributes:
        hardware: the hardware that the program is for; None if it is not known.
    """

    mesh: Mesh
    options: Options = DEFAULT
    hardware: Hardware | None = None

    @cached_property
    def flops_per_wire_byte(self) -> float:
        """Local flops, in products of bfloat16, that take the time of one byte on one link."""
        if self.hardware is None:
            return FLOPS_PER_WIRE_BYTE
        return self.hardware.peak(BFLOAT16) / self.hardware.link_bandwidth

    def cost(self, work: Work) -> float:
        """Returns the cost of a strategy, in bytes that one device sends."""
        return (work.sends + work.flops / self.flops_per_wire_byte) / work.favour

    def cheapest(self, works: Sequence[Work]) -> int:
        """Returns the number of the cheapest strategy, the first among equals."""
        if len(works) == 1:
            return 0
        costs = [self.cost(work) for work in works]
        return costs.index(min(costs))

    def offered(
        self,
        op: Operation,
        operands: Sequence[TensorLayout],
        results: Sequence[TensorLayout],
        readers: int = 1,
    ) -> Strategy | Strategies:
        """Returns the strategies that the rule of an operation offers for these layouts.

        Args:
            readers: the number of operations that read the same moved operands.
        """
        case = Case(op, tuple(operands), tuple(results), self.mesh, self.options, readers)
        return rule_of(op)(case)

    def sends(
        self, op: Operation, operands: Sequence[TensorLayout], results: Sequence[TensorLayout]
    ) -> float:
        """Returns the bytes that one device sends for an operation with the cheapest strategy."""
        offered = self.offered(op, operands, results)
        if isinstance(offered, Strategies):
            return offered.work[self.cheapest(offered.work)].sends
        moves = [
            *zip(op.inputs, operands, offered.operands, strict=True),
            *zip(op.outputs, offered.results, results, strict=True),
        ]
        return bytes_moved(moves, self.mesh)

    def strategy(
        self,
        op: Operation,
        operands: Sequence[TensorLayout],
        results: Sequence[TensorLayout],
        readers: int = 1,
    ) -> Strategy:
        """Returns the cheapest strategy of an operation whose tensors have these layouts."""
        offered = self.offered(op, operands, results, readers)
        if isinstance(offered, Strategy):
            return offered
        return offered.strategy(self.cheapest(offered.work))
