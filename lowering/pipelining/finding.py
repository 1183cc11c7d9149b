"""Finding: the loops of a training step that a layout makes a pipeline.

A step with microbatches is a loop over them. Its body has two scans over the layers. The first one
is the forward pass. The second one is the backward pass: it runs in the other direction, and reads
tensors that the first one has stacked. A rule without a scope that splits the dim of the layers
(`layers:pipe`) makes these three loops a pipeline.

Each layer has its own parameters. So the forward pass slices an input that is the same for all
microbatches, and the backward pass stacks the gradient of this input. A loop over positions of a
text has no such input, so it is not a stack of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.writing.loops import is_sum
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

_SAME_NUMBERS = ("cast", "rename", "transpose")  # operations between a parameter and its use


class NoPipelineError(ValueError):
    """The stacks of layers of a loop over microbatches cannot be a pipeline."""


@dataclass(frozen=True)
class Stack:
    """A stack of layers in a training step.

    Attributes:
        rule: the rule that splits the layers.
        loop: the loop over microbatches.
        forward, backward: the passes over the layers, in the body of the loop.
    """

    rule: Rule
    loop: Operation
    forward: Operation
    backward: Operation

    @property
    def layers(self) -> Dimension:
        return self.forward.params["dim"]


def find_stacks(graph: Graph, layout: Layout, mesh: Mesh) -> tuple[Stack, ...]:
    """Returns the stacks of layers that a layout makes a pipeline, in the order of the model.

    All of them have the loop and the rule of the stack with the most layers.

    The result is empty for a program without a backward pass: there, each device gathers one layer
    after the other. An optional rule (`layers:pipe?`) makes no pipeline, because users must ask
    for a pipeline explicitly.

    Raises:
        ValueError: the step has no microbatches.
    """
    for rule in _rules(layout, mesh):
        for forward, _ in _pairs(graph, graph.inputs, rule.dim):
            raise _at_once(rule, forward, mesh)
    stacks = list(stacks_of(graph, layout, mesh))
    longest = longest_of(stacks)
    if longest is None:
        return ()
    return tuple(s for s in stacks if s.rule is longest.rule and s.loop is longest.loop)


def longest_of(stacks: Iterable[Stack]) -> Stack | None:
    """Returns the first of the stacks with the most layers; None if there are no stacks."""
    return max(stacks, key=lambda stack: stack.layers.size, default=None)


def stacks_of(graph: Graph, layout: Layout, mesh: Mesh) -> Iterator[Stack]:
    """Yields all stacks of layers that a rule splits over stages, of all loops and rules."""
    for rule in _rules(layout, mesh):
        for op in _loops(graph):
            body, consts = op.params["body"], op.params["consts"]
            for forward, backward in _pairs(body, body.inputs[:consts], rule.dim):
                yield Stack(rule, op, forward, backward)


def _rules(layout: Layout, mesh: Mesh) -> Iterator[Rule]:
    """Yields the rules that can make a pipeline."""
    for rule in layout.rules:
        if not rule.scope and not rule.optional and mesh.extent(rule.axes) > 1:
            yield rule


def _at_once(rule: Rule, forward: Operation, mesh: Mesh) -> ValueError:
    """Returns the error for a step without microbatches."""
    axes = "+".join(rule.axes)
    return ValueError(
        f"`{rule}` makes a pipeline of the {forward.params['dim']} of the loop at "
        f"{forward.source}, but the step has no microbatches, so its stages would wait for each "
        f"other: add --microbatches={4 * mesh.extent(rule.axes)}, or another number that divides "
        "the batch (make_train_step(microbatches=...)); or make no pipeline, by --pipeline=none; "
        f"or split only the parameters, by `params/{rule.dim}:{axes}`"
    )


def notes_without(graph: Graph, layout: Layout, mesh: Mesh) -> Iterator[str]:
    """Yields notes for a step without a pipeline: one for each rule that splits its layers."""
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
    """Returns the operands of a loop that each iteration slices."""
    return scan.inputs[scan.params["consts"] + scan.params["carries"] :]


def scope_of(graph: Graph, loop: Operation, scan: Operation) -> str:
    """Returns what the paths of the parameters of a stack have in common, such as `encoder/blocks`.

    It tells stacks apart that one line makes. It is empty if the paths have nothing in common.

    Args:
        graph: the training step.
        loop: the loop over microbatches.
        scan: the forward pass, in the body of the loop.
    """
    body: Graph = loop.params["body"]
    root, outer = _roots(body), dict(zip(body.inputs, loop.inputs, strict=True))
    paths, root_outside = dict(zip(graph.inputs, graph.input_paths, strict=False)), _roots(graph)
    fixed = [outer[t] for t in map(root, slices_of(scan)) if t in outer]
    found = [paths[t].split("/") for t in map(root_outside, fixed) if paths.get(t)]
    common = [parts[0] for parts in zip(*found, strict=False) if len(set(parts)) == 1]
    return "/".join(common[common.index("params") + 1 :] if "params" in common else common)


def _loops(graph: Graph) -> list[Operation]:
    """Returns the loops of a graph that do not belong to a backward pass."""
    return [op for op in graph.operations if op.name == "scan" and not op.source.backward]


def _pairs(
    graph: Graph, fixed: Iterable[Tensor], dim: str
) -> Iterator[tuple[Operation, Operation]]:
    """Yields the pairs of a forward and a backward pass over the layers of a dim.

    Args:
        graph: the body of a loop over microbatches, or a program without microbatches.
        fixed: the inputs of the graph that may be parameters.
        dim: the name of the dim of the layers.
    """
    scans = [op for op in graph.operations if op.name == "scan" and op.params["dim"].name == dim]
    fixed = set(fixed)
    for number, forward in enumerate(scans):
        if not _is_recurrent(forward):
            continue
        stacked = set(forward.outputs[forward.params["carries"] :])
        for backward in scans[number + 1 :]:
            reverse = backward.params["reverse"] != forward.params["reverse"]
            reads = not stacked.isdisjoint(backward.inputs)
            if reverse and reads and _has_parameters(graph, fixed, forward, backward):
                yield forward, backward
                break


def _is_recurrent(scan: Operation) -> bool:
    """Whether an iteration reads a result of the iteration before it. Sums do not count."""
    body, consts = scan.params["body"], scan.params["consts"]
    return any(not is_sum(body, consts + i, i) for i in range(scan.params["carries"]))


def _has_parameters(
    graph: Graph, fixed: Set[Tensor], forward: Operation, backward: Operation
) -> bool:
    """Whether the forward pass slices a fixed input whose gradient the backward pass stacks."""
    root = _roots(graph)
    sliced = [t for t in slices_of(forward) if root(t) in fixed]
    gradients = [set(t.shape) for t in backward.outputs[backward.params["carries"] :]]
    return any(set(t.shape) in gradients for t in sliced)


def _roots(graph: Graph) -> Callable[[Tensor], Tensor]:
    """Returns a function from a tensor to the one that it is a cast or a transposition of."""
    makers = {t: op for op in graph.operations for t in op.outputs}

    def root(tensor: Tensor) -> Tensor:
        while (op := makers.get(tensor)) is not None and op.name in _SAME_NUMBERS:
            tensor = op.inputs[0]
        return tensor

    return root
