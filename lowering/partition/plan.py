"""Plan: how one operation is done on shards.

A partition rule looks at an operation, the layouts its operands and results have by the layout
rules, and answers with a `Plan`: the layouts in which it takes the operands, the layouts in which
it leaves the results (which may be partial), and the instructions between them. Moving operands
there and results on from there is the lowering's work, not the rule's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.options import DEFAULT, Options
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Shape
from meshdsl.tracing.graph import Graph, Operation

Emit = Callable[[BlockBuilder, Sequence[Value]], Sequence[Value]]


@dataclass(frozen=True)
class Case:
    """One operation with the layouts that the layout rules give its tensors.

    Attributes:
        options: what may be traded, where there is more than one plan.
        block: the graph that the operation stands in, if that is known.
    """

    operation: Operation
    operands: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]
    mesh: Mesh
    options: Options = DEFAULT
    block: Graph | None = None


@dataclass(frozen=True)
class Plan:
    """How an operation is done on shards.

    Attributes:
        operands, results: the layouts it takes and leaves; results may be partial.
        emit: writes the instructions.
        linear: the operands in which it is linear. Over an axis that the plan does not use, such
            an operand may be a partial sum, and the results are then partial sums too.
        additive: linear in all of `linear` at once (a sum), not in one at a time (a product).
        fixed: axes over which partial sums cannot pass, because the plan uses them.
    """

    operands: tuple[TensorLayout, ...]
    results: tuple[TensorLayout, ...]
    emit: Emit
    linear: tuple[int, ...] = ()
    additive: bool = False
    fixed: frozenset[str] = frozenset()


Rule = Callable[[Case], Plan]


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
