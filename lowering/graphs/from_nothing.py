"""Constants: tensors that depend on no input: literals, index ramps, elementwise results of these.

They are never moved, kept for a backward pass or put behind a barrier: each reader computes them
again, in the layout that it needs.
"""

from __future__ import annotations

from collections.abc import Container

from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation

# A device that makes a part of the result needs the same part of each operand.
_LOCAL = (Form.ELEMENTWISE, Form.RENAMED, Form.ARRANGED)


def from_nothing(op: Operation, known: Container[Tensor]) -> bool:
    """Whether an operation's result is a constant, if `known` are the constants so far."""
    form = op.primitive.form
    if form is Form.GENERATED:
        return True
    return form in _LOCAL and all(map(known.__contains__, op.inputs))


def constants(graph: Graph) -> set[Tensor]:
    """Returns the constants of a graph and its bodies.

    `constants(graph)`; tensors that a body captures count as data inside.
    """
    constant: set[Tensor] = set()
    for op in graph.operations:
        if op.bodies:
            constant.update(*map(constants, op.bodies))
        elif from_nothing(op, constant):
            constant.update(op.outputs)
    return constant
