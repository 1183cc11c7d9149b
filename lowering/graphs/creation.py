"""Creation: programs that make a state, and training steps, told by their graphs.

A job gives one layout to the programs that make its state, to its step and to its evaluation. Only
the step has every dim and path that the layout names.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.ops.random import KEY
from meshdsl.tensors.mirrors import PARAMS
from meshdsl.tracing.graph import Graph

_COPIES = ("cast", "name")


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


def returned_anew(graph: Graph) -> set[str]:
    """Returns the arguments that a training step returns anew; of other programs, none.

    A training step has a backward pass, which may be inside of a loop, and returns its parameters
    anew: computed from the old ones not by way of gradients alone. The parameters are the argument
    that has `params` in its paths, before all others. Without one, a step is what returns two
    arguments anew. A program that returns gradients, their sums and statistics is none.
    """
    if not has_backward(graph):
        return set()
    arguments = list(dict.fromkeys(path.split("/")[0] for path in graph.input_paths))
    places = {argument: {number} for number, argument in enumerate(arguments)}
    origins = _origins(graph, [places[path.split("/")[0]] for path in graph.input_paths])
    known, renewed = set(graph.input_paths), set()
    for path, of in zip(graph.output_paths, origins, strict=False):
        parts = path.split("/")
        if path not in known and PARAMS in parts:  # as in `return {"new": params}`
            parts = parts[parts.index(PARAMS) :]
        if "/".join(parts) in known and not of.isdisjoint(places[parts[0]]):
            renewed.add(parts[0])
    parted = [path.split("/") for path in graph.input_paths]
    holding = [parts for parts in parted if PARAMS in parts]
    if holding:
        params = min(holding, key=lambda parts: parts.index(PARAMS))[0]
        return renewed if params in renewed else set()
    return renewed if len(renewed) > 1 else set()


def has_backward(graph: Graph) -> bool:
    """Whether a graph has a part of a backward pass, also inside of loops."""
    return any(op.source.backward or any(map(has_backward, op.bodies)) for op in graph.operations)


def _origins(graph: Graph, of_inputs: Sequence[set[int]]) -> list[set[int]]:
    """Returns what each output is computed from otherwise than by a backward pass."""
    origins = dict(zip(graph.inputs, of_inputs, strict=False))
    for op in graph.operations:
        given = [origins.get(tensor, set()) for tensor in op.inputs]
        made: list[set[int]] = [set()] * len(op.outputs)
        if op.source.backward:
            pass
        elif not any(map(has_backward, op.bodies)):
            made = [set().union(*given)] * len(op.outputs)
        elif op.name == "scan":
            made = _origins(op.bodies[0], given)
        origins.update(zip(op.outputs, made, strict=False))
    return [origins.get(tensor, set()) for tensor in graph.outputs]
