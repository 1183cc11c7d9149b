"""Stages: what lowering knows after each of its steps, frozen.

    Simplified   the graph, without what is computed twice or for nothing
    Placed       every tensor has a layout
    Planned      every operation has a strategy, in a graph that is rewritten where that sends less
    Reduced      every partial sum has a place where it becomes whole
    Written      the instructions of one device
    (program)    the same, improved by passes

`lower.lower_in_stages` goes through them once, in this order, and `meshdsl explain --stage=...`
prints one of them (`reports.stages`).
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.placement.choosing import Chooser
from meshdsl.lowering.program import SpmdProgram
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation


@dataclass(frozen=True)
class Simplified:
    """A graph that computes nothing twice and nothing for nothing, and what to lower it for."""

    graph: Graph
    mesh: Mesh
    layout: Layout


@dataclass(frozen=True)
class Given:
    """A `Placement` of a graph, by its tensors.

    Attributes:
        names: of these tensors, for errors.
        partial: of some of them, the axes over which they stay partial; others are whole.
        inputs, outputs: layouts by the numbers of the graph's inputs and outputs.
    """

    names: Mapping[Tensor, str] = field(default_factory=dict)
    tensors: Mapping[Tensor, TensorLayout] = field(default_factory=dict)
    partial: Mapping[Tensor, frozenset[str]] = field(default_factory=dict)
    inputs: Mapping[int, TensorLayout] = field(default_factory=dict)
    outputs: Mapping[int, TensorLayout] = field(default_factory=dict)


@dataclass(frozen=True)
class Placed:
    """A layout for every tensor of a graph, bodies included.

    Attributes:
        chooser: what takes one of the strategies that an operation has.
        layouts: where the tensors are; none of these layouts is partial.
        constant: the tensors that are made where they are read, and never moved.
        stored: the tensors that live in storage (see `placement.storage`).
        moved: the layouts of what a loop stacks for another one as it has moved it.
        given: what a `Placement` decides.
        strategies: of the operations, as far as they have been worked out.
    """

    graph: Graph
    chooser: Chooser
    layouts: Mapping[Tensor, TensorLayout]
    constant: Set[Tensor] = frozenset()
    stored: frozenset[Tensor] = frozenset()
    moved: Mapping[Tensor, TensorLayout] = field(default_factory=dict)
    given: Given = field(default_factory=Given)
    strategies: Mapping[Operation, Strategy] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.chooser.mesh


@dataclass(frozen=True)
class Planned(Placed):
    """A strategy for every operation without bodies.

    Attributes:
        unused: the options that change nothing, in words.
    """

    unused: tuple[str, ...] = ()

    def strategy_without(self, op: Operation, axes: frozenset[str]) -> Strategy:
        """Returns the strategy of an operation whose tensors are not split over some axes.

        So a partial sum over them may pass through it.
        """
        operands = [self.layouts[tensor].drop(axes) for tensor in op.inputs]
        results = [self.layouts[tensor].drop(axes) for tensor in op.outputs]
        return self.chooser.strategy(op, operands, results)


@dataclass(frozen=True)
class Reduced:
    """Where partial sums become whole.

    Attributes:
        partial: of the tensors that pass partial sums on, the axes over which they stay partial.
    """

    planned: Planned
    partial: Mapping[Tensor, frozenset[str]]

    def layout(self, tensor: Tensor, like: Tensor | None = None) -> TensorLayout:
        """Returns the layout of a tensor, partial over the axes over which `like` stays partial.

        Args:
            like: the tensor itself by default.
        """
        axes = self.partial.get(tensor if like is None else like, frozenset())
        return partial_form(self.planned.layouts[tensor], axes)


@dataclass(frozen=True)
class Written:
    """The instructions of one device, before passes improve them."""

    program: SpmdProgram


def partial_form(layout: TensorLayout, axes: Set[str]) -> TensorLayout:
    """Returns the layout of a tensor that stays partial over `axes`."""
    return layout.drop(axes).add_partial(sorted(axes)) if axes else layout
