"""Strategies: the ways in which one operation can be done on shards.

A partition rule looks at an operation and at the layouts that its operands and results have. It
answers with every `Strategy` there is: the layouts in which the operation takes its operands, the
layouts in which it leaves its results (which may be partial), and the instructions between them. A
rule with one strategy returns it. A rule with several returns `Strategies`, with what each of them
sends and computes; `placement.choosing` takes one, so no rule weighs bytes against arithmetic.
Moving operands there and results on from there is the lowering's work, not the rule's.
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
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Operation

Emit = Callable[[BlockBuilder, Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True)
class Case:
    """One operation with the layouts of its tensors.

    Attributes:
        options: what may be traded, where there is more than one strategy.
        readers: how many operations of its kind in the block read the same operands, itself
            included; what they all move is moved once.
    """

    operation: Operation
    operands: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]
    mesh: Mesh
    options: Options = DEFAULT
    readers: int = 1


@dataclass(frozen=True)
class Strategy:
    """One way of doing an operation on shards.

    Attributes:
        operands, results: the layouts it takes and leaves; results may be partial.
        emit: writes the instructions.
        linear: the operands in which it is linear. Over an axis that the strategy does not use,
            such an operand may be a partial sum, and the results are then partial sums too.
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
    """What one device does by a strategy.

    Attributes:
        sends: bytes on the wire, to move operands there, within, and to move results to their
            layouts. Bytes over slow axes are weighed as `reshard_cost` weighs them.
        flops: multiplications and additions.
        favour: how many times as much it may cost as another and is still taken.
    """

    sends: float
    flops: float = 0.0
    favour: float = 1.0


@dataclass(frozen=True)
class Strategies:
    """The strategies that a rule offers; of those that cost the same, the first is taken.

    Attributes:
        work: what each of them sends and computes, at least one.
        strategy: makes the one of a number. Most are never asked for.
    """

    work: Sequence[Work]
    strategy: Callable[[int], Strategy]


Rule = Callable[[Case], Strategy | Strategies]
_Way = TypeVar("_Way")


def offer(
    ways: Sequence[_Way], work: Callable[[_Way], Work], strategy: Callable[[_Way], Strategy]
) -> Strategy | Strategies:
    """Returns a strategy for each way of doing an operation; the work of one alone is not asked."""
    if len(ways) == 1:
        return strategy(ways[0])
    return Strategies([work(way) for way in ways], lambda number: strategy(ways[number]))


def whole_along(shape: Shape, layout: TensorLayout, dim: str, mesh: Mesh) -> list[TensorLayout]:
    """Returns the layouts to choose from where an operation needs one dim whole.

    The first leaves the dim's axes idle; the others hand them to another dim that is long
    enough, so that an all_to_all will do. None where the dim is whole already.
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
