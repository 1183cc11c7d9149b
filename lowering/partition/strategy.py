"""Strategies: the ways in which one operation can be done on shards.

A partition rule reads an operation and the layouts of its operands and results. It returns every
`Strategy`: the layouts that the operation needs of its operands, the layouts of its results (which
may be partial), and the instructions. A rule with one strategy returns it. A rule with several
returns `Strategies`, with the bytes that each sends and the flops that each computes.
`placement.choosing` takes one of them, so no rule weighs bytes against arithmetic. The lowering
moves operands to the layouts that a strategy needs, and results to the layouts that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.slots import setters
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Operation

Emit = Callable[[BlockBuilder, Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True, slots=True, init=False)
class Case:
    """One operation with the layouts of its tensors.

    Attributes:
        options: the user's choices where there is more than one strategy.
        readers: how many operations of its kind in the block read the same operands, itself
            included. They share the moves of these operands.
    """

    operation: Operation
    operands: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]
    mesh: Mesh
    options: Options
    readers: int

    def __init__(
        self,
        operation: Operation,
        operands: tuple[TensorLayout, ...],
        results: tuple[TensorLayout, ...],
        mesh: Mesh,
        options: Options = DEFAULT,
        readers: int = 1,
    ) -> None:
        _set_operation(self, operation)
        _set_operands(self, operands)
        _set_results(self, results)
        _set_mesh(self, mesh)
        _set_options(self, options)
        _set_readers(self, readers)


_set_operation, _set_operands, _set_results, _set_mesh, _set_options, _set_readers = setters(Case)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way of doing an operation on shards.

    Attributes:
        operands, results: the layouts that it needs and produces; results may be partial.
        emit: writes the instructions.
        linear: the operands in which it is linear. Such an operand may be a partial sum over an
            axis that the strategy does not use. The results are then partial sums over it too.
        additive: linear in all of `linear` at once (a sum), not in one at a time (a product).
        fixed: axes over which partial sums cannot pass, because the strategy uses them.
    """

    operands: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]
    emit: Emit
    linear: tuple[int, ...] = ()
    additive: bool = False
    fixed: frozenset[str] = frozenset()


class Work(NamedTuple):
    """What one device sends and computes in a strategy.

    Attributes:
        sends: bytes on the wire: to move operands, during the operation, and to move results to
            their layouts. Bytes over slow axes are weighed as `reshard_cost` weighs them.
        flops: multiplications and additions.
        favour: the strategy is preferred while it costs at most this many times another.
    """

    sends: float
    flops: float = 0.0
    favour: float = 1.0


@dataclass(frozen=True)
class Strategies:
    """The strategies that a rule offers. Among those of equal cost the first is chosen.

    Attributes:
        work: what each of them sends and computes; not empty.
        strategy: makes the strategy of a number. Only the chosen one is made.
    """

    work: Sequence[Work]
    strategy: Callable[[int], Strategy]


Rule = Callable[[Case], Strategy | Strategies]
_Way = TypeVar("_Way")


def offer(
    ways: Sequence[_Way], work: Callable[[_Way], Work], strategy: Callable[[_Way], Strategy]
) -> Strategy | Strategies:
    """Returns a strategy for each way of doing an operation; one way needs no work computed."""
    if len(ways) == 1:
        return strategy(ways[0])
    return Strategies([work(way) for way in ways], lambda number: strategy(ways[number]))


def whole_along(shape: Shape, layout: TensorLayout, dim: str, mesh: Mesh) -> list[TensorLayout]:
    """Returns the candidate layouts of an operation that needs one dim unsplit.

    The first leaves the dim's axes idle. The others give them to another dim that is long enough,
    so that one all_to_all moves the tensor. The list is empty if the dim is unsplit already.
    """
    axes = layout.axes(dim)
    if not axes:
        return []
    idle = layout.split(dim, ())
    local = idle.local(shape, mesh)
    takers = [d.name for d in local if d.name != dim and d.size >= mesh.extent(axes)]
    return [idle, *(idle.split(name, idle.axes(name) + axes) for name in takers)]


def bytes_moved(moves: Iterable[tuple[Tensor, TensorLayout, TensorLayout]], mesh: Mesh) -> float:
    """Returns the bytes that a device sends to move tensors from one layout to another."""
    return sum(reshard_cost(t.shape, t.dtype.itemsize, a, b, mesh) for t, a, b in moves)
