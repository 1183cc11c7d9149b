"""Finding: the loops of a training step that a layout makes a pipeline.

A step in microbatches is a loop over these. In its body, a scan over the layers goes forward, and
another one, which reads what the first has stacked, goes backward. A rule without a scope that
splits the dim of the layers (`layers:pipe`) makes these three loops a pipeline.

Layers have parameters of their own: the forward pass reads a slice of some input that is the same
for all microbatches, and the backward pass stacks its gradient. A loop over positions is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.writing.loops import is_sum
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

_SAME_NUMBERS = ("cast", "rename", "transpose")  # operations between a parameter and its use


class NoPipelineError(ValueError):
    """A loop over microbatches cannot be a pipeline of its stacks of layers."""


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


def find_stacks(graph: Graph, layout: Layout, mesh: Mesh) -> tuple[Stack, ...]:
    """Returns the stacks of layers that a layout makes a pipeline; none if there are none.

    A program without a backward pass has none: each device then gathers the layers one by one. A
    rule that need not be used (`layers:pipe?`) makes none: whether there is a pipeline is the
    user's choice. All stacks are of one loop and one rule: those of the stack with the most layers.
    They are in the order of the model.

    Raises:
        ValueError: the step is not computed in microbatches.
    """
    for rule in _rules(layout, mesh):
        for forward, _ in _pairs(graph, graph.inputs, rule.dim):
            raise _at_once(rule, forward, mesh)
    found = list(stacks_of(graph, layout, mesh))
    longest = longest_of(found)
    if longest is None:
        return ()
    return tuple(s for s in found if s.rule is longest.rule and s.loop is longest.loop)


def longest_of(stacks: Iterable[Stack]) -> Stack | None:
    """Returns the stack with the most layers, if any; of several, the first."""
    return max(stacks, key=lambda stack: stack.layers.size, default=None)


def stacks_of(graph: Graph, layout: Layout, mesh: Mesh) -> Iterator[Stack]:
    """Yields the stacks of layers that a layout splits among stages."""
    for rule in _rules(layout, mesh):
        for op in _loops(graph):
            body, consts = op.params["body"], op.params["consts"]
            for forward, backward in _pairs(body, body.inputs[:consts], rule.dim):
                yield Stack(rule, op, forward, backward)


def _rules(layout: Layout, mesh: Mesh) -> Iterator[Rule]:
    """Yields the rules that make pipelines."""
    for rule in layout.rules:
        if not rule.scope and not rule.optional and mesh.extent(rule.axes) > 1:
            yield rule


def _at_once(rule: Rule, forward: Operation, mesh: Mesh) -> ValueError:
    """Returns the error of a step that computes its batch in one piece."""
    axes = "+".join(rule.axes)
    return ValueError(
        f"`{rule}` makes a pipeline of the {forward.params['dim']} of the loop at "
        f"{forward.source}, but the step computes its batch at once, so that its stages would wait "
        f"for each other: add --microbatches={4 * mesh.extent(rule.axes)} "
        "(make_train_step(microbatches=...)); or have no pipeline, by --pipeline=none; or keep "
        f"only parameters split, by `params/{rule.dim}:{axes}`"
    )


def notes_without(graph: Graph, layout: Layout, mesh: Mesh) -> Iterator[str]:
    """Yields what to say of a step that is no pipeline, though a rule looks like one."""
    blocks = [(graph, graph.inputs)]
    for op in _loops(graph):
        body = op.params["body"]
        blocks.append((body, body.inputs[: op.params["consts"]]))
    for rule in layout.rules:
        if mesh.extent(rule.axes) == 1:
            continue
        if any(True for block, fixed in blocks for _ in _pairs(block, fixed, rule.dim)):
            axes = "+".join(rule.axes)
            text = f"`{rule}` stores the {rule.dim} split over {axes}, and each device gathers and "
            text += "computes all of them: this is no pipeline"
            if rule.scope or rule.optional:
                text += f". `{rule.dim}:{axes}` makes one"
            yield text


def slices_of(scan: Operation) -> tuple[Tensor, ...]:
    """Returns the operands of which an iteration of a loop reads a slice."""
    return scan.inputs[scan.params["consts"] + scan.params["carries"] :]


def _loops(graph: Graph) -> list[Operation]:
    """Returns the loops of a graph that are not those of a backward pass."""
    return [op for op in graph.operations if op.name == "scan" and not op.source.backward]


def _pairs(
    graph: Graph, fixed: Iterable[Tensor], dim: str
) -> Iterator[tuple[Operation, Operation]]:
    """Yields the passes over layers along a dim: forward, and backward.

    Args:
        fixed: the inputs that may hold parameters.
    """
    scans = [op for op in graph.operations if op.name == "scan" and op.params["dim"].name == dim]
    fixed = set(fixed)
    for number, forward in enumerate(scans):
        carries = forward.params["carries"]
        stacked = set(forward.outputs[carries:])
        if not _passes_on(forward):
            continue
        for backward in scans[number + 1 :]:
            turned = backward.params["reverse"] != forward.params["reverse"]
            reads = turned and not stacked.isdisjoint(backward.inputs)
            if reads and _has_parameters(graph, fixed, forward, backward):
                yield forward, backward
                break


def _passes_on(scan: Operation) -> bool:
    """Whether an iteration needs what the one before has computed."""
    body, consts = scan.params["body"], scan.params["consts"]
    return any(not is_sum(body, consts + i, i) for i in range(scan.params["carries"]))


def _has_parameters(
    graph: Graph, fixed: Set[Tensor], forward: Operation, backward: Operation
) -> bool:
    """Whether a loop slices an input whose gradient the backward pass stacks."""
    makers = {t: op for op in graph.operations for t in op.outputs}

    def root(tensor: Tensor) -> Tensor:
        while (op := makers.get(tensor)) is not None and op.name in _SAME_NUMBERS:
            tensor = op.inputs[0]
        return tensor

    sliced = [t for t in slices_of(forward) if root(t) in fixed]
    gradients = [set(t.shape) for t in backward.outputs[backward.params["carries"] :]]
    return any(set(t.shape) in gradients for t in sliced)
