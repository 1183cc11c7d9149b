"""Merged sums: sums and extremes of merged dims, reduced before the dims are merged.

A block of a merged dim has consecutive positions of its first part. If another part is split, a
device has pieces of all blocks, so `sum(merge(x, [length, channels], m), m)` would move x before
it is small. The same numbers come of the parts:

    sum(x, [length, channels])

and `sum(merge(x, ...), batch)` is `merge(sum(x, batch), ...)`. Elementwise operations between the
merge and the sum are done on the parts too. This is done if nothing else reads what is in between.
Devices never compute more: the merged dim may be split only over axes that split its parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from meshdsl.lowering.stages import Placed
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation, TracedTensor


def sum_parts(placed: Placed) -> Graph:
    """Returns the graph with sums before merges; the graph itself if no merge is reduced."""
    if placed.mesh.size == 1:
        return placed.graph
    return _rewrite(placed.graph, placed)


def _rewrite(graph: Graph, placed: Placed) -> Graph:
    made = {op.outputs[0]: op for op in graph.operations if len(op.outputs) == 1}
    merges = any(op.name == "merge" for op in graph.operations)
    if not merges and not any(op.bodies for op in graph.operations):
        return graph
    readers = Counter(t for op in graph.operations for t in op.inputs)
    readers.update(graph.outputs)
    readers.update([*graph.names])
    chains = {op: _chain(op, made, readers, placed) for op in graph.operations if merges}
    starts = Counter(chain[0] for chain in chains.values() if chain)
    operations: list[Operation] = []
    changed = False
    for op in graph.operations:
        bodies = {k: _rewrite(v, placed) for k, v in op.params.items() if isinstance(v, Graph)}
        if any(bodies[name] is not op.params[name] for name in bodies):
            op, changed = replace(op, params={**op.params, **bodies}), True
        chain = chains.get(op)
        reduced = []
        if chain and starts[chain[0]] == readers[chain[0].outputs[0]]:
            reduced = _reduced(op, chain)
            changed = changed or bool(reduced)
        operations += reduced or [op]
    return replace(graph, operations=tuple(operations)) if changed else graph


def _chain(
    op: Operation, made: Mapping[Tensor, Operation], readers: Counter[Tensor], placed: Placed
) -> list[Operation]:
    """Returns a merge and the elementwise operations between it and a reduction, or nothing.

    Only the merge may have other readers.
    """
    if op.primitive.form is not Form.REDUCTION or "over" not in op.params:
        return []
    chain: list[Operation] = []
    tensor = op.inputs[0]
    while tensor in made:
        before = made[tensor]
        chain.append(before)
        if before.name == "merge":
            return chain[::-1] if _may(chain, placed) else []
        elementwise = before.primitive.form is Form.ELEMENTWISE and not before.primitive.effect
        if not elementwise or readers[tensor] > 1:
            return []
        wide = [t for t in before.inputs if t.shape == before.outputs[0].shape]
        if len(wide) != 1:
            return []
        (tensor,) = wide
    return []


def _may(chain: list[Operation], placed: Placed) -> bool:
    *between, merge = chain
    name, parts = merge.params["whole"], Shape(merge.params["parts"])
    (x,), (merged,) = merge.inputs, merge.outputs
    layouts = placed.layouts
    split = {axis for part in parts for axis in layouts[x].axes(part.name)}
    if not split.issuperset(layouts[merged].axes(name)):
        return False
    narrow = [t for op in between for t in op.inputs if t.shape != op.outputs[0].shape]
    return not any(d.name == name or parts.find(d.name) for t in narrow for d in t.shape)


def _reduced(op: Operation, chain: list[Operation]) -> list[Operation]:
    """Returns the operations that reduce what was merged; none if dims come in another order."""
    merge, *between = chain
    whole, parts = merge.params["whole"], merge.params["parts"]
    (tensor,), (out,) = merge.inputs, op.outputs
    operations = []
    old = merge.outputs[0]
    for elementwise in between:
        inputs = tuple(tensor if t is old else t for t in elementwise.inputs)
        old = elementwise.outputs[0]
        made = TracedTensor(tensor.shape, old.dtype, elementwise.source)
        operations.append(replace(elementwise, inputs=inputs, outputs=(made,)))
        tensor = made
    over = op.params["over"]
    if whole in over:
        names = tuple(
            n for name in over for n in (Shape(parts).names if name == whole else (name,))
        )
        operations.append(replace(op, inputs=(tensor,), params={**op.params, "over": names}))
        return operations if tensor.shape.without(names) == out.shape else []
    left = tensor.shape.without(over)
    shape = Shape(
        out.shape.get(whole) if d == parts[0] else d for d in left if d not in tuple(parts[1:])
    )
    made = TracedTensor(left, out.dtype, op.source)
    operations.append(replace(op, inputs=(tensor,), outputs=(made,)))
    params = {**merge.params, "shape": out.shape}
    operations.append(replace(merge, inputs=(made,), outputs=(out,), params=params))
    return operations if shape == out.shape else []
