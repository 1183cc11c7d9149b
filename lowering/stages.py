"""Stages: the result of each step of lowering, frozen.

    Simplified   the graph, without operations that are duplicate or not needed
    Placed       every tensor has a layout
    Planned      every operation has a strategy, in a graph that is rewritten if that sends less
    Reduced      it is decided where every partial sum is reduced
    Written      the instructions of one device
    (program)    the same, improved by passes

`lower.lower_in_stages` runs them once, in this order. `meshdsl explain --stage=...` prints one of
them (`reports.stages`).
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
    """A graph without duplicate or unneeded operations, and the mesh and layout to lower it for."""

    graph: Graph
    mesh: Mesh
    layout: Layout


@dataclass(frozen=True)
class Given:
    """The layouts that a `Placement` gives to tensors of a graph.

    Attributes:
        names: the names of these tensors, for errors.
        tensors: their layouts where they are not partial.
        partial: for those that stay partial, the axes over which they do.
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
        chooser: chooses among the strategies of an operation.
        layouts: the layouts of the tensors; none is partial.
        constant: the tensors that each reader computes for itself, so that they are never moved.
        stored: the tensors that have the layouts of storage (see `placement.storage`).
        moved: the layouts of tensors that a loop has moved before it stacks them for another loop.
        given: the layouts that a `Placement` gives.
        strategies: the strategies of operations without bodies.
        joint: whether some products have chosen theirs together (see `placement.joint`).
    """

    graph: Graph
    chooser: Chooser
    layouts: Mapping[Tensor, TensorLayout]
    constant: Set[Tensor] = frozenset()
    stored: frozenset[Tensor] = frozenset()
    moved: Mapping[Tensor, TensorLayout] = field(default_factory=dict)
    given: Given = field(default_factory=Given)
    strategies: Mapping[Operation, Strategy] = field(default_factory=dict)
    joint: bool = False

    @property
    def mesh(self) -> Mesh:
        return self.chooser.mesh


@dataclass(frozen=True)
class Planned(Placed):
    """A strategy for every operation without bodies.

    Attributes:
        unused: messages about options without effect.
    """

    unused: tuple[str, ...] = ()

    def strategy_without(self, op: Operation, axes: frozenset[str]) -> Strategy:
        """Returns the strategy of an operation if its tensors are not split over some axes.

        Then a partial sum over these axes can pass through it.
        """
        operands = [self.layouts[tensor].drop(axes) for tensor in op.inputs]
        results = [self.layouts[tensor].drop(axes) for tensor in op.outputs]
        return self.chooser.strategy(op, operands, results)


@dataclass(frozen=True)
class Reduced:
    """The decision where partial sums are reduced.

    Attributes:
        partial: for tensors that pass partial sums on, the axes over which they stay partial.
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
