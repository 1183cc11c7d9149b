"""Postponed moves: a tensor stays split for a while, until it is smaller, and is gathered then.

A dim that is renamed to a name without a rule, or split into parts without one, is not split by the
layout rules. So its tensor would be gathered at once, before the slice or the sum that makes it
small. An intermediate tensor may stay split instead: it is gathered where a reader needs it, or
never. Inputs, outputs (once returned), named and stored tensors, and the carries and results of
loops and branches always have the layout of the rules.

A minimum cut decides which tensors stay split. The costs are:

- A tensor that stays split (source side) costs a move to each other layout in which a reader needs
  it.
- A tensor that does not stay split costs the gather.
- A sum over a dim that stays split costs the reduction.

A tensor that stays split has all splits of the rules and more, so a move to it is a free slice.
Among equally good cuts the one is taken that leaves most tensors in the layout of the rules.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.partition import Case, Strategy
from meshdsl.lowering.partition.shape import led_by_operand
from meshdsl.lowering.placement.choosing import Chooser
from meshdsl.lowering.placement.mincut import INFINITE, CutGraph
from meshdsl.lowering.placement.reads import START
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation

_RESHAPED = (Form.RENAMED, Form.REGROUPED)

_Layouts = Mapping[Tensor, TensorLayout]


def postponed(
    graph: Graph,
    layouts: _Layouts,
    strategies: Mapping[Operation, Strategy],
    chooser: Chooser,
    fixed: Container[Tensor],
    constant: Container[Tensor],
) -> dict[Tensor, TensorLayout]:
    """Returns the tensors of a graph and its bodies that stay split, with their layouts.

    Args:
        fixed: tensors that keep the layout of the rules, besides those that have names.
        constant: tensors that each reader makes for itself.
    """
    stay = _Postponed(graph, layouts, strategies, chooser, fixed, constant, ()).solve()
    bodies = [body for op in graph.operations for body in op.bodies]
    while bodies:
        body = bodies.pop()
        stay |= _Postponed(
            body, layouts, strategies, chooser, fixed, constant, body.outputs
        ).solve()
        bodies += [inner for op in body.operations for inner in op.bodies]
    return stay


class _Postponed:
    """The cut of one graph.

    Nodes: a tensor (it stays split), ("from", tensor, layout) (a reader needs it moved there),
    ("to", tensor, layout) (no reader with a result as the rules say needs it gathered), and
    ("result", operation) (some operand stays split).

    Attributes:
        places: the layouts of tensors if they stay split; for those that may.
        paid: the reads that some reader moves in every cut.
    """

    def __init__(
        self,
        graph: Graph,
        layouts: _Layouts,
        strategies: Mapping[Operation, Strategy],
        chooser: Chooser,
        fixed: Container[Tensor],
        constant: Container[Tensor],
        results: Sequence[Tensor],
    ) -> None:
        self.graph = graph
        self.layouts = layouts
        self.strategies = strategies
        self.chooser = chooser
        self.mesh = chooser.mesh
        self.fixed = fixed
        self.fixed_by_name = {*results, *graph.names}  # which cannot stay split
        self.places: dict[Tensor, TensorLayout] = {}
        self.constant = constant
        self.paid: set[tuple[Tensor, TensorLayout]] = set()
        self.cut = CutGraph()

    def solve(self) -> dict[Tensor, TensorLayout]:
        """Returns the tensors that stay split."""
        self._spread()
        if not self.places:
            return {}
        touched = []
        for op in self.graph.operations:
            if any(t in self.places for t in (*op.inputs, *op.outputs)):
                touched.append(op)
            elif op in self.strategies:
                self.paid.update(zip(op.inputs, self.strategies[op].operands, strict=True))
        for op in touched:
            self._add(op)
        for tensor in self.graph.outputs:
            self._needed(tensor, self.layouts[tensor])
        stay = self.cut.source_side()
        return {tensor: place for tensor, place in self.places.items() if tensor in stay}

    # Which tensors may stay split, and how.

    def _spread(self) -> None:
        for op in self.graph.operations:
            if not op.bodies and op.outputs and op.outputs[0] in self.constant:
                continue
            if op.primitive.form in _RESHAPED:
                if self._at(op.inputs[0]).splits:
                    self._offer(op.outputs[0], self._reshaped(op))
            elif op.primitive.positionwise and self._any(op.inputs):
                self._offer(op.outputs[0], self._following(op))

    def _offer(self, tensor: Tensor, place: TensorLayout) -> None:
        """Adds the layout in which a tensor may stay, if it splits further than the rules do."""
        home = self.layouts[tensor]
        if tensor in self.fixed_by_name or tensor in self.fixed or place == home:
            return
        if all(place.axes(name)[: len(axes)] == axes for name, axes in home.splits):
            self.places[tensor] = place

    def _any(self, tensors: Sequence[Tensor]) -> bool:
        return bool(self.places) and any(t in self.places for t in tensors)

    def _at(self, tensor: Tensor) -> TensorLayout:
        return self.places.get(tensor) or self.layouts[tensor]

    def _reshaped(self, op: Operation) -> TensorLayout:
        home = tuple(self.layouts[t] for t in op.outputs)
        return led_by_operand(Case(op, (self._at(op.inputs[0]),), home, self.mesh))

    def _following(self, op: Operation) -> TensorLayout:
        """Returns the layout of a result with the splits of the rules and those of operands."""
        (result,) = op.outputs
        place = self.layouts[result]
        for tensor in op.inputs:
            if tensor not in self.places:
                continue
            for name, axes in self.places[tensor].splits:
                home = place.axes(name)
                dim = result.shape.find(name)
                if dim is None or dim not in tensor.shape or axes[: len(home)] != home:
                    continue
                if place.split_axes.isdisjoint(axes[len(home) :]):
                    place = place.split(name, axes)
        return place

    # The cut.

    def _add(self, op: Operation) -> None:
        moving = [t for t in dict.fromkeys(op.inputs) if t in self.places]
        known = op.primitive.positionwise
        if not known:
            strategy = self.strategies.get(op)
            homes = strategy.operands if strategy else tuple(self.layouts[t] for t in op.inputs)
            for tensor, where in zip(op.inputs, homes, strict=True):
                self._needed(tensor, where)
        elif not moving:
            self._begin(op)
        else:
            self._continue(op, moving)

    def _needed(self, tensor: Tensor, where: TensorLayout) -> None:
        """Adds a reader that needs a tensor in one layout in every cut."""
        if tensor in self.places:
            self._move(tensor, where, CutGraph.SINK)

    def _move(self, tensor: Tensor, where: TensorLayout, reader: Hashable) -> None:
        """Adds a reader that needs a tensor moved if the tensor stays split and it does not."""
        cost = self._sent(tensor, self.places[tensor], where)
        cost -= self._sent(tensor, self.layouts[tensor], where)
        if cost > 0:
            node = ("from", tensor, where)
            self.cut.edge_once(tensor, node, cost)
            self.cut.edge(node, reader, INFINITE)

    def _begin(self, op: Operation) -> None:
        """Adds an operation that gathers its operands unless its result stays split."""
        (result,) = op.outputs
        usual, split = self.strategies[op], self._strategy(op, (), stays=True)
        for tensor, where in zip(op.inputs, usual.operands, strict=True):
            cost = self._sent(tensor, self.layouts[tensor], where)
            if cost and (tensor, where) not in self.paid:
                node = ("to", tensor, where)
                self.cut.edge_once(CutGraph.SOURCE, node, cost)
                self.cut.edge(node, result, INFINITE)
        self.cut.edge(CutGraph.SOURCE, result, self._left(op, usual, self.layouts[result]))
        cost = self._left(op, split, self.places[result])
        cost += sum(
            self._sent(tensor, self.layouts[tensor], where)
            for tensor, where in zip(op.inputs, split.operands, strict=True)
        )
        self.cut.edge(result, CutGraph.SINK, cost)

    def _continue(self, op: Operation, moving: Sequence[Tensor]) -> None:
        """Adds an operation with operands that may stay split: its result may too, or is moved."""
        (result,) = op.outputs
        stays = result in self.places
        usual = self.strategies[op]
        alone = self._strategy(op, moving, stays=False)
        along = self._strategy(op, moving, stays=True) if stays else alone
        rows = zip(op.inputs, alone.operands, along.operands, strict=True)
        for tensor, where, there in rows:
            if tensor not in self.places:
                continue
            if there != self.places[tensor]:
                self._move(tensor, there, CutGraph.SINK)
            elif where != there:
                self._move(tensor, where, result)
        base = self._rest(op, usual, moving) + self._left(op, usual, self.layouts[result])
        last = self._rest(op, alone, moving) + self._left(op, alone, self.layouts[result])
        node = ("result", op)
        for tensor in moving:
            self.cut.edge(tensor, node, INFINITE)
        if stays:
            both = self._rest(op, along, moving) + self._left(op, along, self.places[result])
            self.cut.edge(node, CutGraph.SINK, max(both - base, 0.0))
            self.cut.edge(node, result, max(last - max(both, base), 0.0))
        else:
            self.cut.edge(node, CutGraph.SINK, max(last - base, 0.0))

    def _strategy(self, op: Operation, moving: Sequence[Tensor], stays: bool) -> Strategy:
        """Returns the strategy if some operands, and perhaps the result, stay split."""
        operands = tuple(self.places[t] if t in self.places else self.layouts[t] for t in op.inputs)
        results = tuple(self._at(t) if stays else self.layouts[t] for t in op.outputs)
        return self.chooser.strategy(op, operands, results)

    def _rest(self, op: Operation, strategy: Strategy, moving: Sequence[Tensor]) -> float:
        """Returns the bytes sent for operands that cannot stay split."""
        rows = zip(op.inputs, strategy.operands, strict=True)
        return sum(
            self._sent(t, self.layouts[t], where)
            for t, where in rows
            if not any(t is other for other in moving)
        )

    def _left(self, op: Operation, strategy: Strategy, place: TensorLayout) -> float:
        """Returns the bytes sent to move an operation's result to its layout."""
        (result,) = op.outputs
        sent = self._sent(result, strategy.results[0], place)
        if op.name == "window" and place.axes(op.params["dim"]):  # shards exchange elements
            sent += place.local(result.shape, self.mesh).volume * result.dtype.itemsize + START
        return sent

    def _sent(self, tensor: Tensor, before: TensorLayout, after: TensorLayout) -> float:
        if before == after or tensor in self.constant:
            return 0.0
        sent = reshard_cost(tensor.shape, tensor.dtype.itemsize, before, after, self.mesh)
        return sent + START if sent else 0.0
