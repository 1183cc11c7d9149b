"""Finding: the loops of a training step that a layout makes a pipeline.

A step in microbatches is a loop over these. In its body, a scan over the layers goes forward, and
another one, which reads what the first has stacked, goes backward. A rule without a scope that
splits the dim of the layers (`layers:pipe`) makes these three loops a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.writing.loops import is_sum
from meshdsl.tensors.dims import Dimension
from meshdsl.tracing.graph import Graph, Operation


@dataclass(frozen=True)
class Stack:
    """A stack of layers in a training step.

    Attributes:
        rule: the rule that splits the layers.
        loop: the loop over microbatches.
        forward, backward: in its body, the two passes over the layers.
    """

    rule: Rule
    loop: Operation
    forward: Operation
    backward: Operation

    @property
    def layers(self) -> Dimension:
        return self.forward.params["dim"]


def find_stack(graph: Graph, layout: Layout, mesh: Mesh) -> Stack | None:
    """Returns the stack of layers that a layout makes a pipeline; None if there is none.

    A program without a backward pass has none: each device then gathers the layers one by one. Of
    several stacks, it is the one with the most layers.

    Raises:
        ValueError: the step is not computed in microbatches.
    """
    found: list[Stack] = []
    for rule in layout.rules:
        if rule.scope or mesh.extent(rule.axes) == 1:
            continue
        if pairs := list(_pairs(graph, rule.dim)):
            forward = pairs[0][0]
            raise ValueError(
                f"`{rule}` makes a pipeline of the {forward.params['dim']} of the loop at "
                f"{forward.source}, but the step computes its batch at once, so that its stages "
                f"would wait for each other: add --microbatches={4 * mesh.extent(rule.axes)} "
                "(make_train_step(microbatches=...)), or keep only parameters split, by "
                f"`params/{rule.dim}:{'+'.join(rule.axes)}`"
            )
        for op in graph.operations:
            if op.name == "scan" and not op.source.backward:
                pairs = list(_pairs(op.params["body"], rule.dim))
                found += [Stack(rule, op, forward, backward) for forward, backward in pairs]
    return max(found, key=lambda stack: stack.layers.size, default=None)


def notes_without(graph: Graph, layout: Layout, mesh: Mesh) -> Iterator[str]:
    """Yields what to say of a step that is no pipeline, though a rule looks like one."""
    blocks = [graph, *(op.params["body"] for op in graph.operations if op.name == "scan")]
    for rule in layout.rules:
        if not rule.scope or mesh.extent(rule.axes) == 1:
            continue
        if any(True for block in blocks for _ in _pairs(block, rule.dim)):
            axes = "+".join(rule.axes)
            yield (
                f"`{rule}` stores the {rule.dim} split over {axes}, and each device gathers and "
                f"computes all of them: this is no pipeline. `{rule.dim}:{axes}` makes one"
            )


def _pairs(graph: Graph, dim: str) -> Iterator[tuple[Operation, Operation]]:
    """Yields the scans along a dim whose results a scan in the other direction reads."""
    scans = [op for op in graph.operations if op.name == "scan" and op.params["dim"].name == dim]
    for number, forward in enumerate(scans):
        carries = forward.params["carries"]
        stacked = set(forward.outputs[carries:])
        if not _passes_on(forward):
            continue
        for backward in scans[number + 1 :]:
            turned = backward.params["reverse"] != forward.params["reverse"]
            if turned and not stacked.isdisjoint(backward.inputs):
                yield forward, backward
                break


def _passes_on(scan: Operation) -> bool:
    """Whether an iteration needs what the one before has computed."""
    body, consts = scan.params["body"], scan.params["consts"]
    return any(not is_sum(body, consts + i, i) for i in range(scan.params["carries"]))
