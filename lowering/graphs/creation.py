"""Creation: programs that make a state, and training steps, told by their graphs.

A job gives one layout to the programs that make its state, to its step and to its evaluation. Only
the step has every dim and path that the layout names.
"""

from __future__ import annotations

from meshdsl.ops.random import KEY
from meshdsl.tracing.graph import Graph

_COPIES = ("cast", "name")
_PARAMS = "params"  # as in `mirrors`


def creates_state(graph: Graph) -> bool:
    """Whether a simplified graph computes nothing from data, and makes some tensor.

    `init(key)` is one, and `optimizer.init(params)`: results are made of random keys or of nothing,
    or they are arguments, perhaps of another dtype.
    """
    data = {tensor for tensor in graph.inputs if tensor.shape.find(KEY.name) is None}
    if not data:
        return True
    for op in graph.operations:
        if not data.isdisjoint(op.inputs):
            if op.name not in _COPIES:
                return False
            data.update(op.outputs)
    return any(tensor not in data for tensor in graph.outputs)


def is_training_step(graph: Graph) -> bool:
    """Whether a graph has a backward pass, and returns parameters and other arguments anew.

    A program that returns gradients alone returns one tree like an argument; it is none.
    """
    if not any(op.source.backward for op in graph.operations):
        return False
    arguments, trees = set(graph.input_paths), set()
    for path in graph.output_paths:
        *before, _ = path.split("/")
        if _PARAMS in before:
            trees.add(tuple(before[: before.index(_PARAMS)]))
        elif path in arguments:
            trees.add(tuple(path.split("/")[:1]))
    return len(trees) > 1
