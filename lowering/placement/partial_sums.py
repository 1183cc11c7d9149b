"""Partial sums: each is reduced where that sends the fewest bytes.

The result of a contraction over a split dim is a partial sum. It may be reduced at once, or stay
partial through operations that are linear in it and be reduced later: after several have been
added, after a reduction has made it small, after a loop has accumulated it.

A minimum cut decides, for each mesh axis by itself: a sum over two axes is costed for each as if it
were not partial over the other. A tensor that can be partial either stays partial (source side) or
does not. The costs are:

- A tensor that stays partial costs its reduction if some reader needs it reduced.
- A tensor that stays partial may need moves: a product gathers its other operand, a sum gathers an
  operand that is not partial to mask it.
- An operation through which no partial sum passes may need its operands moved (see `reads`).

One move serves all readers, so it costs once. Among equally good cuts, the one that reduces
earliest is chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.placement.mincut import INFINITE, CutGraph
from meshdsl.lowering.placement.reads import START, Read, Reads
from meshdsl.lowering.stages import Planned
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

# The extra cost per byte of masking an operand, and of computing on a partial sum instead of a
# shard: they break ties.
_MASK = 1e-3
_WIDER = 1e-4
# The cost of not doing as a `Placement` says; finite, since it may contradict itself.
_GIVEN = 1e18


def place_reductions(planned: Planned) -> dict[Tensor, frozenset[str]]:
    """Returns, for tensors that pass partial sums on, the axes over which they stay partial.

    Raises:
        ValueError: a tensor cannot stay partial as a `Placement` says.
    """
    partial: dict[Tensor, frozenset[str]] = {}
    reads = Reads(planned)
    for axis, size in planned.mesh.axes:
        if size > 1:
            for tensor in _AxisProblem(planned, axis, reads).solve():
                partial[tensor] = partial.get(tensor, frozenset()) | {axis}
    _check_given(planned, partial)
    return partial


def _check_given(planned: Planned, partial: Mapping[Tensor, frozenset[str]]) -> None:
    """Raises ValueError with all tensors that do not stay partial as a `Placement` says."""
    given, problems = planned.given, []
    made = {
        tensor: layout.partial_axes
        for op, strategy in planned.strategies.items()
        if given.partial
        for tensor, layout in zip(op.outputs, strategy.results, strict=True)
    }
    for tensor, name in given.names.items():
        if tensor not in planned.layouts:  # lowering has removed it from the graph
            continue
        wanted, axes = given.partial.get(tensor, frozenset()), partial.get(tensor, frozenset())
        where = f"`{name}` {tensor} ({tensor.source})"
        for axis in sorted(wanted - axes):
            why = "it is no partial sum there, nor linear in one"
            if axis in made.get(tensor, ()):
                why = "it is the first sum, and only tensors computed from it can stay partial"
            problems.append(
                f"{where} cannot stay partial over `{axis}`: {why}. Leave `(partial over {axis})` "
                "out"
            )
        for axis in sorted(axes - wanted):
            problems.append(
                f"{where} cannot be reduced over `{axis}`: a tensor computed from it has to stay "
                f"partial. Add `(partial over {axis})`"
            )
    if problems:
        raise ValueError("\n  ".join(["the placement does not fit the program", *problems]))


class _AxisProblem:
    """The cut for one axis.

    Each node is a statement that is true on the source side:

    - a tensor: it stays partial,
    - ("reduced", tensor): no reader needs it reduced; left out where one reader alone decides,
    - ("moved", read): a reader that stays partial needs a tensor moved,
    - ("masked", read, tensor): a reader that stays partial needs the tensor moved, unless it is
      partial,
    - ("usual", read): no reader that does not stay partial needs a tensor moved.
    """

    def __init__(self, planned: Planned, axis: str, reads: Reads) -> None:
        self.planned = planned
        self.axis = axis
        self.reads = reads
        self.paid: set[Read] = set()  # reads whose cost does not depend on the cut
        # Strategies if a partial sum passes, for operations that then have other reads.
        self.through: dict[Operation, Strategy] = {}
        # Results of operations that make partial sums: they are the source.
        self.made: set[Tensor] = set()
        self.can: set[Tensor] = set()  # tensors that are or may be partial
        self.passing: set[Tensor] = set()  # tensors that may pass a partial sum on
        self.linear: dict[Operation, Strategy] = {}  # operations that may pass a partial sum on
        # Bytes of reductions, by dims, bytes per element and layout: many tensors share them.
        self.costs: dict[tuple[Shape, int, TensorLayout], float] = {}
        self.reductions: dict[Tensor, float] = {}  # what it costs to reduce a tensor
        # The readers that a tensor is reduced for unless they stay partial; the sink: in any case.
        self.readers: dict[Tensor, dict[Tensor | str, None]] = defaultdict(dict)
        self.cut = CutGraph()

    def solve(self) -> set[Tensor]:
        self._reach(self.planned.graph)
        if not self.passing:
            return set()
        self._pay()
        self._add(self.planned.graph, 1)
        for tensor in self.planned.graph.outputs:
            self._need_reduced(tensor)
        self._add_reductions()
        kept = self.cut.source_side() | self.made
        return {t for t in self.passing if t in kept}

    # Which tensors can be partial at all.

    def _reach(self, graph: Graph) -> None:
        for op in graph.operations:
            if op.bodies:
                reach = {"cond": self._reach_cond, "scan": self._reach_scan}
                reach.get(op.name, self._reach_closed)(op)
                continue
            strategy = self.planned.strategies[op]
            if any([layout.partial for layout in strategy.results]):
                kinds = [dict(layout.partial).get(self.axis) for layout in strategy.results]
            else:  # as of most operations
                kinds = []
            if any(kinds):
                sums = [t for t, kind in zip(op.outputs, kinds, strict=True) if kind == "sum"]
                self.made.update(sums)
                self.can.update(sums)
            elif self._passes(op, strategy):
                self.linear[op] = strategy
                self.can.update(op.outputs)
                self.passing.update(op.outputs)

    def _passes(self, op: Operation, strategy: Strategy) -> bool:
        return self.axis not in strategy.fixed and any(
            op.inputs[i] in self.can for i in strategy.linear
        )

    def _reach_scan(self, op: Operation) -> None:
        body: Graph = op.params["body"]
        consts, carries = op.params["consts"], op.params["carries"]
        while True:
            before = len(self.can)
            for outer, inner in zip(op.inputs, body.inputs, strict=True):
                if outer in self.can:
                    self._pass_on(inner)
            self._reach(body)
            for i in range(carries):
                if body.outputs[i] in self.can:
                    self._leave(body.inputs[consts + i])
                if body.inputs[consts + i] in self.can:
                    self._leave(op.outputs[i])
            for inner, outer in zip(body.outputs[carries:], op.outputs[carries:], strict=True):
                if inner in self.can:
                    self._leave(outer)
            if len(self.can) == before:
                return

    def _reach_cond(self, op: Operation) -> None:
        for body in op.bodies:
            for outer, inner in zip(op.inputs[1:], body.inputs, strict=True):
                if outer in self.can:
                    self._pass_on(inner)
            self._reach(body)
            for inner, outer in zip(body.outputs, op.outputs, strict=True):
                if inner in self.can:
                    self._pass_on(outer)

    def _reach_closed(self, op: Operation) -> None:
        """Visits bodies whose inputs and outputs are not partial, as those of a while loop."""
        for body in op.bodies:
            self._reach(body)

    def _leave(self, tensor: Tensor) -> None:
        """Allows a result of an iteration to be partial, unless it is scattered into storage."""
        planned = self.planned
        if tensor not in planned.stored or self.axis not in planned.layouts[tensor].split_axes:
            self._pass_on(tensor)

    def _pass_on(self, tensor: Tensor) -> None:
        self.can.add(tensor)
        self.passing.add(tensor)

    # Operands that are read in another layout than their own.

    def _pay(self) -> None:
        """Collects the reads that do not depend on the cut, and the operations whose reads do."""
        layouts, usual = self.planned.layouts, self.reads.usual
        split = {at for at in set(layouts.values()) if at.dim_of(self.axis) is not None}
        for op, moved in usual.items():
            if op not in self.linear:
                self.paid |= moved
        for op, strategy in self.linear.items():
            moved = usual.get(op, frozenset())
            if not split.isdisjoint([layouts[t] for t in (*op.inputs, *op.outputs)]):
                through = self.reads.through(op, self.axis)
                if moved or through.operands != strategy.operands:
                    self.through[op] = through
                    moved &= self.reads.of(op, through, self._partial_operands(op, strategy))
            self.paid |= moved

    def _add_reads(
        self, op: Operation, strategy: Strategy, partial_operands: list[Tensor], times: int
    ) -> None:
        """Adds the moves of an operation if a partial sum passes through it, and if none does."""
        through, (result,) = self.through[op], op.outputs
        layouts = self.planned.layouts
        rows = zip(op.inputs, strategy.operands, through.operands, strict=True)
        for tensor, usual, needed in rows:
            passed = any(tensor is operand for operand in partial_operands)
            if usual != layouts[tensor]:
                self._move_if_reduced(self.reads.read(op, tensor, usual), result, times)
            if needed != layouts[tensor] and (strategy.additive or not passed):
                read = self.reads.read(op, tensor, needed)
                self._move_if_partial(read, result, tensor if passed else None, times)

    def _move_if_partial(
        self, read: Read, reader: Tensor, masked: Tensor | None, times: int
    ) -> None:
        """Adds the cost of a move if the reader stays partial.

        Args:
            masked: if given, the move is needed only if this tensor is not partial.
        """
        cost = 0.0 if read in self.paid else self.reads.cost(read, times)
        if cost:
            node = ("moved", read) if masked is None else ("masked", read, masked)
            self.cut.edge_once(node, CutGraph.SINK if masked is None else masked, cost)
            self.cut.edge(reader, node, INFINITE)

    def _move_if_reduced(self, read: Read, reader: Tensor, times: int) -> None:
        """Adds the cost of a move if the reader does not stay partial."""
        cost = 0.0 if read in self.paid else self.reads.cost(read, times)
        if cost:
            node = ("usual", read)
            self.cut.edge_once(CutGraph.SOURCE, node, cost)
            self.cut.edge(node, reader, INFINITE)

    # The cut.

    def _add(self, graph: Graph, times: int) -> None:
        for op in graph.operations:
            if op.bodies:
                add = {"cond": self._add_cond, "scan": self._add_scan}
                add.get(op.name, self._add_closed)(op, times)
                continue
            strategy = self.planned.strategies[op]
            for tensor in op.outputs:
                self._add_tensor(tensor, times)
            if op in self.linear:
                self._add_linear(op, strategy, times)
            else:
                for tensor in op.inputs:
                    self._need_reduced(tensor)

    def _add_tensor(self, tensor: Tensor, times: int) -> None:
        if tensor not in self.can:
            return
        self.reductions[tensor] = times * (self._cost(tensor) + START)
        if tensor in self.made:
            return
        if self.axis in self.planned.layouts[tensor].split_axes:
            self.cut.edge(tensor, CutGraph.SINK, times * tensor.bytes * _WIDER)
        given = self.planned.given
        if tensor in given.tensors:
            if self.axis in given.partial.get(tensor, ()):
                self.cut.edge(CutGraph.SOURCE, tensor, _GIVEN)
            else:
                self.cut.edge(tensor, CutGraph.SINK, _GIVEN)

    def _cost(self, tensor: Tensor) -> float:
        """Returns the bytes that reducing a tensor sends."""
        reduced = self.planned.layouts[tensor]
        key = tensor.shape, tensor.dtype.itemsize, reduced
        if key not in self.costs:
            partial = reduced.drop([self.axis]).add_partial([self.axis])
            self.costs[key] = self.reads.bytes_between(tensor, partial, reduced)
        return self.costs[key]

    def _add_linear(self, op: Operation, strategy: Strategy, times: int) -> None:
        (result,) = op.outputs
        partial_operands = self._partial_operands(op, strategy)
        if op in self.through:
            self._add_reads(op, strategy, partial_operands, times)
        for tensor in op.inputs:
            if not any(tensor is operand for operand in partial_operands):
                if not (strategy.additive and any(tensor is op.inputs[i] for i in strategy.linear)):
                    self._need_reduced(tensor)
                else:
                    self.cut.edge(result, CutGraph.SINK, times * tensor.bytes * _MASK)
        for tensor in partial_operands:
            mask = times * tensor.bytes * _MASK
            self._tie(tensor, result, mask if strategy.additive else INFINITE)
        # A product of a tensor with itself is linear in each operand, but not in the tensor.
        if (
            not strategy.additive
            and sum(op.inputs[i] is partial_operands[0] for i in strategy.linear) > 1
        ):
            self._need_reduced(partial_operands[0])
            self.cut.edge(result, CutGraph.SINK, INFINITE)

    def _partial_operands(self, op: Operation, strategy: Strategy) -> list[Tensor]:
        """Returns the operands that may be partial if the result is."""
        operands = [op.inputs[i] for i in strategy.linear if op.inputs[i] in self.can]
        return operands if strategy.additive else operands[:1]

    def _tie(self, before: Tensor, after: Tensor, mask: float) -> None:
        """Relates an operand and a result of a linear operation.

        If `after` stays partial, `before` does too, or is masked at the cost of `mask`. If `after`
        does not stay partial, `before` is needed reduced.
        """
        if before not in self.made:
            self.cut.edge(after, before, mask)
        if before in self.can:
            self.readers[before][after] = None

    def _need_reduced(self, tensor: Tensor) -> None:
        if tensor in self.can:
            self.readers[tensor][CutGraph.SINK] = None

    def _add_reductions(self) -> None:
        """Adds the reductions of tensors: one serves all readers."""
        for tensor, readers in self.readers.items():
            start: Tensor | str = CutGraph.SOURCE if tensor in self.made else tensor
            cost = self.reductions.get(tensor, 0.0)
            if CutGraph.SINK in readers:
                if start is tensor:
                    self.cut.edge(tensor, CutGraph.SINK, cost)
            elif len(readers) == 1:
                self.cut.edge(start, next(iter(readers)), cost)
            else:
                self.cut.edge(start, ("reduced", tensor), cost)
                for reader in readers:
                    self.cut.edge(("reduced", tensor), reader, INFINITE)

    def _add_scan(self, op: Operation, times: int) -> None:
        body: Graph = op.params["body"]
        consts, carries = op.params["consts"], op.params["carries"]
        inner_times = times * op.params["dim"].size
        for tensor in body.inputs:
            self._add_tensor(tensor, inner_times)
        self._add(body, inner_times)
        for tensor in op.outputs:
            self._add_tensor(tensor, times)
        for position, (outer, inner) in enumerate(zip(op.inputs, body.inputs, strict=True)):
            if inner not in self.can:
                self._need_reduced(outer)
            elif consts <= position < consts + carries:
                self._add_carry(op, outer, inner, times)
                self._add_carry(op, body.outputs[position - consts], inner, inner_times)
                self._join(inner, op.outputs[position - consts])
            else:
                self._tie(outer, inner, INFINITE)
        for inner, outer in zip(body.outputs[carries:], op.outputs[carries:], strict=True):
            if outer in self.can:
                self._tie(inner, outer, INFINITE)
            else:
                self._need_reduced(inner)

    def _add_cond(self, op: Operation, times: int) -> None:
        self._need_reduced(op.inputs[0])
        for tensor in op.outputs:
            self._add_tensor(tensor, times)
        for body in op.bodies:
            for tensor in body.inputs:
                self._add_tensor(tensor, times)
            self._add(body, times)
            for outer, inner in zip(op.inputs[1:], body.inputs, strict=True):
                if inner in self.can:
                    self._tie(outer, inner, INFINITE)
                else:
                    self._need_reduced(outer)
            for inner, outer in zip(body.outputs, op.outputs, strict=True):
                if outer in self.can:
                    self._add_carry(op, inner, outer, times)
                else:
                    self._need_reduced(inner)

    def _add_closed(self, op: Operation, times: int) -> None:
        for tensor in op.inputs:
            self._need_reduced(tensor)
        for body in op.bodies:
            self._add(body, times)
            for tensor in body.outputs:
                self._need_reduced(tensor)

    def _add_carry(self, op: Operation, tensor: Tensor, target: Tensor, times: int) -> None:
        """Relates a carry, or the result of a cond (`target`), to a tensor that becomes its value.

        If `target` stays partial, the tensor stays partial too, or is moved and masked.
        """
        mask, layout = times * tensor.bytes * _MASK, self.planned.layouts[tensor]
        if layout.dim_of(self.axis) is not None:
            read = self.reads.read(op, tensor, layout.drop([self.axis]))
            self._move_if_partial(read, target, tensor if tensor in self.can else None, times)
        if tensor in self.can:
            self._tie(tensor, target, mask)
        else:
            self.cut.edge(target, CutGraph.SINK, mask)

    def _join(self, first: Tensor, second: Tensor) -> None:
        """Lets both tensors stay partial, or neither."""
        self.cut.edge(first, second, INFINITE)
        self.cut.edge(second, first, INFINITE)
