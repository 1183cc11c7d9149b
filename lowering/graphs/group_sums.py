"""Group sums: sums over groups of a split dim, computed without moving the elements.

`sum(split(x, channels -> group, member), member)` needs complete groups. If a layout splits the
channels and a group lies on several devices, a split would gather all channels first. Instead, each
device adds up its elements of every group, and the devices reduce one number per group:

    sum(where(group of each channel == group, x, 0), channels)

This is done if it sends less, and if a device adds at most `_MOST` times as many elements as after
gathering x.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import meshdsl.ops as ops
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.stages import Placed
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.trace import Trace, tracing

_MOST = 2


def sum_groups(placed: Placed) -> Graph:
    """Returns the graph with group sums that move no elements; the graph itself without such sums.

    `sum_groups(place(graph, layout, Chooser(mesh)))`.
    """
    return _GroupSums(placed).rewrite(placed.graph)


class _GroupSums:
    def __init__(self, placed: Placed) -> None:
        self.placed = placed

    def rewrite(self, graph: Graph) -> Graph:
        splits = {op.outputs[0]: op for op in graph.operations if op.name == "split"}
        if not splits and not any(op.bodies for op in graph.operations):
            return graph
        readers = Counter(t for op in graph.operations for t in op.inputs)
        readers.update(graph.outputs)
        operations: list[Operation] = []
        changed = False
        for op in graph.operations:
            bodies = {}
            if op.bodies:
                bodies = {name: self.rewrite(b) for name, b in op.params.items() if _is_graph(b)}
            if any(bodies[name] is not op.params[name] for name in bodies):
                op, changed = replace(op, params={**op.params, **bodies}), True
            split = splits.get(op.inputs[0]) if op.name == "sum" else None
            if split and readers[op.inputs[0]] == 1 and self._sends_less(op, split):
                operations += _inlined(op, split)
                changed = True
            else:
                operations.append(op)
        return replace(graph, operations=tuple(operations)) if changed else graph

    def _sends_less(self, op: Operation, split: Operation) -> bool:
        (x,), (out,) = split.inputs, op.outputs
        layouts, mesh = self.placed.layouts, self.placed.mesh
        kept = _kept(op, split)
        axes = layouts[x].axes(split.params["whole"])
        devices = mesh.extent(axes)
        few = Shape(kept).volume <= _MOST * devices
        if devices == 1 or not kept or not few or not is_float(x.dtype):
            return False
        now = self.placed.chooser.sends(split, [layouts[x]], [layouts[split.outputs[0]]])
        where = layouts[out].restrict([d.name for d in out.shape if d not in kept])
        if where.split_axes & set(axes):  # another dim of the sums lies along these axes
            return False
        sums = reshard_cost(out.shape, out.dtype.itemsize, where.add_partial(axes), where, mesh)
        return sums < now


def _kept(op: Operation, split: Operation) -> list[Dimension]:
    """Returns the parts of a dim that a sum keeps, if those that it sums over are the last."""
    parts: Sequence[Dimension] = split.params["parts"]
    if any(part.name == split.params["whole"] for part in parts):
        return []
    over = [part.name in op.params["over"] for part in parts]
    count = over.index(True) if True in over else len(parts)
    return list(parts[:count]) if all(over[count:]) and any(over) else []


def _inlined(op: Operation, split: Operation) -> list[Operation]:
    """Returns the operations that compute a group sum from the tensor that was split."""
    (x,), (out,) = split.inputs, op.outputs
    whole = x.shape.get(split.params["whole"])
    kept = Shape(_kept(op, split))
    groups = Dimension(whole.name, kept.volume)

    def group_sum(x: Tensor) -> Tensor:
        group = ops.arange(whole) // (whole.size // groups.size)
        number = ops.arange(groups).split(groups, kept)
        mine = ops.outer(ops.equal, group, number)
        over = [whole.name, *(name for name in op.params["over"] if x.shape.find(name))]
        return ops.sum(ops.outer(ops.where, mine, x, 0), over).transpose(out.shape)

    trace = Trace()
    with tracing(trace):
        inputs = [trace.input(x.shape, x.dtype, x.source)]
        graph, _ = trace.finish([group_sum(*inputs)])
    now = {graph.inputs[0]: x, graph.outputs[0]: out}
    return [
        replace(
            inner,
            inputs=tuple(now.get(t, t) for t in inner.inputs),
            outputs=tuple(now.get(t, t) for t in inner.outputs),
            source=op.source,
        )
        for inner in graph.operations
    ]


def _is_graph(param: object) -> bool:
    return isinstance(param, Graph)
