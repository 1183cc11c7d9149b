"""Late gathers: a tensor stays split until it is smaller, and is gathered then.

A dim that is renamed to a name without a rule, or split into parts without one, is not split by the
layout rules. So its tensor would be gathered at once, before the slice or the sum that makes it
small. An intermediate tensor may stay split instead: it is gathered where a reader needs it, or
never. Inputs, outputs (once returned), named and stored tensors, and the carries and results of
loops and branches always have the layout of the rules.

A minimum cut decides which tensors stay split. The costs are:

- A tensor that stays split (source side) costs a move to each other layout in which a reader needs
  it.
- A tensor that does not stay split costs the gather.
- An operation whose operands stay split costs what it sends then: to move operands and results, and
  by the collectives that its strategy writes.

A tensor that stays split has all splits of the rules and more, so a move to it is a free slice.
Among equally good cuts, the one with most tensors in the layout of the rules is chosen.

One cost is an approximation: no edge of a cut costs something only if both operands and results
stay split, so results cost that by themselves.
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
from meshdsl.lowering.program import Block, Instruction, wire_of
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation

_RESHAPED = (Form.RENAMED, Form.REGROUPED)

_Layouts = Mapping[Tensor, TensorLayout]


def gathered_late(
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
        constant: tensors that each reader computes for itself.
    """
    stay = _LateGathers(graph, layouts, strategies, chooser, fixed, constant, ()).solve()
    bodies = [body for op in graph.operations for body in op.bodies]
    while bodies:
        body = bodies.pop()
        stay |= _LateGathers(
            body, layouts, strategies, chooser, fixed, constant, body.outputs
        ).solve()
        bodies += [inner for op in body.operations for inner in op.bodies]
    return stay


class _LateGathers:
    """The cut of one graph.

    Each node is a statement that is true on the source side:

    - a tensor: it stays split,
    - ("from", tensor, layout): a reader needs it moved to that layout,
    - ("to", tensor, layout): no reader whose result has the layout of the rules needs it gathered,
    - ("result", operation): some operand stays split.

    Attributes:
        split_layouts: for tensors that may stay split, their layouts if they do.
        read: the tensors that are read at all.
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
        self.fixed_by_name = {*results, *graph.names}
        self.split_layouts: dict[Tensor, TensorLayout] = {}
        self.constant = constant
        self.read = {*graph.outputs, *(t for op in graph.operations for t in op.inputs)}
        self.paid: set[tuple[Tensor, TensorLayout]] = set()
        self.cut = CutGraph()

    def solve(self) -> dict[Tensor, TensorLayout]:
        """Returns the tensors that stay split."""
        self._spread()
        if not self.split_layouts:
            return {}
        touched = []
        for op in self.graph.operations:
            if any(t in self.split_layouts for t in (*op.inputs, *op.outputs)):
                touched.append(op)
            elif op in self.strategies:
                self.paid.update(zip(op.inputs, self.strategies[op].operands, strict=True))
        for op in touched:
            self._add(op)
        for tensor in self.graph.outputs:
            self._needed(tensor, self.layouts[tensor])
        stay = self.cut.source_side()
        return {t: layout for t, layout in self.split_layouts.items() if t in stay}

    # Which tensors may stay split, and how.

    def _spread(self) -> None:
        for op in self.graph.operations:
            if not op.bodies and op.outputs and op.outputs[0] in self.constant:
                continue
            if op.primitive.form in _RESHAPED:
                if self._layout_of(op.inputs[0]).splits:
                    self._offer(op.outputs[0], self._reshaped(op))
            elif op in self.strategies and self._any_split(op.inputs):
                for result in op.outputs:
                    self._offer(result, self._following(op, result))

    def _offer(self, tensor: Tensor, layout: TensorLayout) -> None:
        """Adds a layout in which a tensor may stay, if it has all splits of the rules and more."""
        by_rules = self.layouts[tensor]
        if tensor in self.fixed_by_name or tensor in self.fixed or layout == by_rules:
            return
        if all(layout.axes(name)[: len(axes)] == axes for name, axes in by_rules.splits):
            self.split_layouts[tensor] = layout

    def _any_split(self, tensors: Sequence[Tensor]) -> bool:
        return bool(self.split_layouts) and any(t in self.split_layouts for t in tensors)

    def _layout_of(self, tensor: Tensor) -> TensorLayout:
        return self.split_layouts.get(tensor) or self.layouts[tensor]

    def _reshaped(self, op: Operation) -> TensorLayout:
        results = tuple(self.layouts[t] for t in op.outputs)
        return led_by_operand(Case(op, (self._layout_of(op.inputs[0]),), results, self.mesh))

    def _following(self, op: Operation, result: Tensor) -> TensorLayout:
        """Returns the layout of a result with the splits of the rules and those of operands."""
        layout = self.layouts[result]
        for tensor in op.inputs:
            if tensor not in self.split_layouts:
                continue
            for name, axes in self.split_layouts[tensor].splits:
                before = layout.axes(name)
                dim = result.shape.find(name)
                if dim is None or axes[: len(before)] != before:
                    continue
                if layout.split_axes.isdisjoint(axes[len(before) :]):
                    layout = layout.split(name, axes)
        return layout

    # The cut.

    def _add(self, op: Operation) -> None:
        splittable = [t for t in dict.fromkeys(op.inputs) if t in self.split_layouts]
        if op not in self.strategies:  # it has bodies
            for tensor in op.inputs:
                self._needed(tensor, self.layouts[tensor])
        elif not splittable:
            self._begin(op)
        else:
            self._continue(op, splittable)

    def _needed(self, tensor: Tensor, layout: TensorLayout) -> None:
        """Adds a reader that needs a tensor in one layout in every cut."""
        if tensor in self.split_layouts:
            self._move(tensor, layout, CutGraph.SINK)

    def _move(self, tensor: Tensor, layout: TensorLayout, reader: Hashable) -> None:
        """Adds the cost of moving a tensor that stays split for a reader that does not."""
        cost = self._moved_bytes(tensor, layout)
        if cost > 0:
            node = ("from", tensor, layout)
            self.cut.edge_once(tensor, node, cost)
            self.cut.edge(node, reader, INFINITE)

    def _moved_bytes(self, tensor: Tensor, layout: TensorLayout) -> float:
        """Returns how much more is sent to move a tensor to a layout if it stays split."""
        cost = self._sent(tensor, self.split_layouts[tensor], layout)
        return cost - self._sent(tensor, self.layouts[tensor], layout)

    def _begin(self, op: Operation) -> None:
        """Adds an operation that gathers its operands unless its result stays split."""
        (result,) = op.outputs
        usual, split = self.strategies[op], self._strategy(op, stays=True)
        for tensor, layout in zip(op.inputs, usual.operands, strict=True):
            cost = self._sent(tensor, self.layouts[tensor], layout)
            if cost and (tensor, layout) not in self.paid:
                node = ("to", tensor, layout)
                self.cut.edge_once(CutGraph.SOURCE, node, cost)
                self.cut.edge(node, result, INFINITE)
        self.cut.edge(
            CutGraph.SOURCE, result, self._result_bytes(op, usual, (self.layouts[result],))
        )
        cost = self._result_bytes(op, split, (self.split_layouts[result],))
        cost += sum(
            self._sent(tensor, self.layouts[tensor], layout)
            for tensor, layout in zip(op.inputs, split.operands, strict=True)
        )
        self.cut.edge(result, CutGraph.SINK, cost)

    def _continue(self, op: Operation, splittable: Sequence[Tensor]) -> None:
        """Adds an operation with operands that may stay split; its results may stay split too."""
        staying = [t for t in op.outputs if t in self.split_layouts and t in self.read]
        usual = self.strategies[op]
        results_moved = self._strategy(op, stays=False)
        results_split = self._strategy(op, stays=True) if staying else results_moved
        rows = zip(op.inputs, results_moved.operands, results_split.operands, strict=True)
        for tensor, if_moved, if_split in rows:
            if tensor not in self.split_layouts:
                continue
            if if_split != self.split_layouts[tensor]:
                self._move(tensor, if_split, CutGraph.SINK)
                more = self._moved_bytes(tensor, if_moved) - self._moved_bytes(tensor, if_split)
                for result in staying if more > 0 else ():
                    self.cut.edge_once(tensor, ("more", tensor, op), more)
                    self.cut.edge(("more", tensor, op), result, INFINITE)
            elif if_moved != if_split:
                for result in staying:
                    self._move(tensor, if_moved, result)

        def sent(strategy: Strategy, layouts: Sequence[TensorLayout]) -> float:
            operand_bytes = self._operand_bytes(op, strategy, splittable)
            return operand_bytes + self._result_bytes(op, strategy, layouts)

        # Bytes sent if no operand stays split, and if only operands do.
        by_rules = [self.layouts[t] for t in op.outputs]
        none_split = sent(usual, by_rules)
        operands_split = sent(results_moved, by_rules)
        node = ("result", op)
        for tensor in splittable:
            self.cut.edge(tensor, node, INFINITE)
        if not staying:
            self.cut.edge(node, CutGraph.SINK, max(operands_split - none_split, 0.0))
            return
        all_split = sent(results_split, list(map(self._layout_of, op.outputs)))
        least = min(operands_split, all_split)
        self.cut.edge(node, CutGraph.SINK, max(least - none_split, 0.0))
        least = max(least, none_split)
        # No edge costs more only if operands and results both stay split. So results cost that
        # much by themselves: without split operands they hardly ever save anything.
        sizes = [t.shape.volume * t.dtype.itemsize for t in staying]
        for result, size in zip(staying, sizes, strict=True):
            share = size / max(sum(sizes), 1)
            self.cut.edge(node, result, max(operands_split - least, 0.0) * share)
            self.cut.edge(result, CutGraph.SINK, max(all_split - least, 0.0) * share)
        for unread in op.outputs:
            if unread in self.split_layouts and unread not in self.read:
                self.cut.edge(staying[0], unread, INFINITE)

    def _strategy(self, op: Operation, stays: bool) -> Strategy:
        """Returns the strategy if all operands that may stay split do.

        Args:
            stays: whether the result stays split too.
        """
        operands = tuple(map(self._layout_of, op.inputs))
        results = tuple(self._layout_of(t) if stays else self.layouts[t] for t in op.outputs)
        return self.chooser.strategy(op, operands, results)

    def _operand_bytes(
        self, op: Operation, strategy: Strategy, splittable: Sequence[Tensor]
    ) -> float:
        """Returns the bytes sent for operands that cannot stay split."""
        rows = zip(op.inputs, strategy.operands, strict=True)
        return sum(
            self._sent(t, self.layouts[t], layout)
            for t, layout in rows
            if not any(t is other for other in splittable)
        )

    def _result_bytes(
        self, op: Operation, strategy: Strategy, layouts: Sequence[TensorLayout]
    ) -> float:
        """Returns the bytes sent by an operation, and to move its results to their layouts."""
        rows = zip(op.outputs, strategy.results, layouts, strict=True)
        sent = sum(self._sent(t, left, layout) for t, left, layout in rows if t in self.read)
        return sent + self._bytes_within(op, strategy)

    def _bytes_within(self, op: Operation, strategy: Strategy) -> float:
        """Returns the bytes of the collectives that a strategy writes."""
        if op.primitive.form is Form.ELEMENTWISE or all(t in self.constant for t in op.outputs):
            return 0.0
        builder = BlockBuilder(self.mesh)
        rows = zip(op.inputs, strategy.operands, strict=True)
        results = strategy.emit(builder, [builder.value(t.shape, t.dtype, at) for t, at in rows])
        written = Block((), tuple(builder.instructions), tuple(results))
        return sum((self._cost(i) + START) * n for i, n in written.walk() if i.is_collective)

    def _cost(self, collective: Instruction) -> float:
        sent = wire_of(collective, self.mesh)
        if self.mesh.prices is None:
            return sent
        return self.mesh.prices.cost(collective.op, collective.params["axes"], sent)

    def _sent(self, tensor: Tensor, before: TensorLayout, after: TensorLayout) -> float:
        if before == after or tensor in self.constant:
            return 0.0
        sent = reshard_cost(tensor.shape, tensor.dtype.itemsize, before, after, self.mesh)
        return sent + START if sent else 0.0
