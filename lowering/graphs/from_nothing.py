"""Tensors made of nothing: constants, index ramps, and what is elementwise of them.

They cost no data, so they are never moved, kept for a backward pass or hidden behind a barrier:
whoever reads one has it made, in the layout it wants.
"""

from __future__ import annotations

from collections.abc import Container

from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation

# A device that makes a part of the result needs the same part of each operand.
_LOCAL = (Form.ELEMENTWISE, Form.RENAMED, Form.ARRANGED)


def from_nothing(op: Operation, known: Container[Tensor]) -> bool:
    """Whether an operation's result is made of nothing, given which tensors are."""
    form = op.primitive.form
    return form is Form.GENERATED or (form in _LOCAL and all(t in known for t in op.inputs))


def constants(graph: Graph) -> set[Tensor]:
    """Returns the tensors of a graph and its bodies that are made of nothing.

    `constants(graph)`; what a body captures counts as data inside.
    """
    found: set[Tensor] = set()
    for op in graph.operations:
        if op.bodies:
            found.update(*map(constants, op.bodies))
        elif from_nothing(op, found):
            found.update(op.outputs)
    return found
