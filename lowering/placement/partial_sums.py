"""Where partial sums become whole: each is reduced where that sends the fewest bytes.

The result of a contraction over a split dim is a partial sum. It may be reduced at once, or stay
partial through operations that are linear in it and be reduced later: after several have been
added, after a reduction has made it small, after a loop has accumulated it. For each mesh axis
this is a minimum cut: every tensor that can be partial either stays so (source side) or not, and
pays for its reduction if it does while some reader needs it whole. What staying partial forces on
others is paid in the same cut: an operand that a product then needs gathered, a summand that is
gathered to be masked; and so is what an operation moves only if no partial sum passes through it
(see `reads`). One move serves all readers, so it is paid once. Of equally good cuts the earliest is
taken.
"""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.placement.mincut import INFINITE, CutGraph
from meshdsl.lowering.placement.reads import START, Read, Reads
from meshdsl.lowering.stages import Planned
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation

# What computing on a partial sum costs against computing on a shard, per byte: to break ties.
_MASK = 1e-3
_WIDER = 1e-4
# What keeps tensors as a `Placement` has them; finite, should that contradict itself.
_GIVEN = 1e18


def place_reductions(planned: Planned) -> dict[Tensor, frozenset[str]]:
    """Returns, for tensors that pass partial sums on, the axes over which they stay partial.

    Raises:
        ValueError: a tensor cannot stay partial as a `Placement` says.
    """
    found: dict[Tensor, frozenset[str]] = {}
    reads = Reads(planned)
    for axis, size in planned.mesh.axes:
        if size > 1:
            for tensor in _AxisProblem(planned, axis, reads).solve():
                found[tensor] = found.get(tensor, frozenset()) | {axis}
    _check_given(planned, found)
    return found


def _check_given(planned: Planned, partial: Mapping[Tensor, frozenset[str]]) -> None:
    """Raises ValueError unless tensors stay partial as a `Placement` says; tells every one."""
    given, wrong = planned.given, []
    made = {
        tensor: layout.partial_axes
        for op, strategy in planned.strategies.items()
        if given.partial
        for tensor, layout in zip(op.outputs, strategy.results, strict=True)
    }
    for tensor, name in given.names.items():
        if tensor not in planned.layouts:  # lowering has taken it out of the graph
            continue
        wanted, axes = given.partial.get(tensor, frozenset()), partial.get(tensor, frozenset())
        where = f"`{name}` {tensor} ({tensor.source})"
        for axis in sorted(wanted - axes):
            why = "it is no partial sum there, nor linear in one"
            if axis in made.get(tensor, ()):
                why = "it is the sum itself, and only what is made of it can stay partial"
            wrong.append(
                f"{where} cannot stay partial over `{axis}`: {why}. Leave `(partial over {axis})` "
                "out"
            )
        for axis in sorted(axes - wanted):
            wrong.append(
                f"{where} cannot be whole over `{axis}`: what is made of it is to stay partial. "
                f"Add `(partial over {axis})`"
            )
    if wrong:
        raise ValueError("\n  ".join(["the placement does not fit the program", *wrong]))


class _AxisProblem:
    """The cut for one axis.

    Nodes: a tensor (it stays partial), ("whole", tensor) (nothing needs it whole), ("moved", read)
    (something that stays partial needs a tensor moved), ("masked", read) (or needs it moved unless
    it is partial), and ("usual", read) (nothing that is whole needs it moved).
    """

    def __init__(self, planned: Planned, axis: str, reads: Reads) -> None:
        self.planned = planned
        self.axis = axis
        self.reads = reads
        self.paid: set[Read] = set()  # whatever is partial
        self.through: dict[Operation, Strategy] = {}  # of those that move something else if partial
        self.made: set[Tensor] = set()  # partial as their operation leaves them
        self.can: set[Tensor] = set()  # partial, or could pass a partial sum on
        self.passing: set[Tensor] = set()
        self.linear: dict[Operation, Strategy] = {}  # that may pass a partial sum on
        self.cut = CutGraph()

    def solve(self) -> set[Tensor]:
        self._reach(self.planned.graph)
        if not self.passing:
            return set()
        self._pay()
        self._add(self.planned.graph, 1)
        for tensor in self.planned.graph.outputs:
            self._need_whole(tensor)
        kept = self.cut.source_side()
        return {t for t in self.passing if t in kept}

    # Which tensors can be partial at all.

    def _reach(self, graph: Graph) -> None:
        for op in graph.operations:
            if op.bodies:
                reach = {"cond": self._reach_cond, "scan": self._reach_scan}
                reach.get(op.name, self._reach_closed)(op)
                continue
            strategy = self.planned.strategies[op]
            kinds = [dict(layout.partial).get(self.axis) for layout in strategy.results]
            if any(kinds):
                left = [t for t, kind in zip(op.outputs, kinds, strict=True) if kind == "sum"]
                self.made.update(left)
                self.can.update(left)
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
        """Bodies that take and return whole values, as those of a while loop do."""
        for body in op.bodies:
            self._reach(body)

    def _leave(self, tensor: Tensor) -> None:
        """Lets a partial sum leave an iteration, unless it is scattered into storage there."""
        planned = self.planned
        if tensor not in planned.stored or self.axis not in planned.layouts[tensor].split_axes:
            self._pass_on(tensor)

    def _pass_on(self, tensor: Tensor) -> None:
        self.can.add(tensor)
        self.passing.add(tensor)

    # What is moved elsewhere than where the layout rules put it.

    def _pay(self) -> None:
        """Finds the reads that do not depend on the cut, and the operations whose reads do."""
        layouts, usual = self.planned.layouts, self.reads.usual
        for op, moved in usual.items():
            if op not in self.linear:
                self.paid |= moved
        for op, strategy in self.linear.items():
            moved = usual.get(op, frozenset())
            if any(layouts[t].dim_of(self.axis) is not None for t in (*op.inputs, *op.outputs)):
                through = self.reads.through(op, self.axis)
                if moved or through.operands != strategy.operands:
                    self.through[op] = through
                    moved &= self.reads.of(op, through, self._summands(op, strategy))
            self.paid |= moved

    def _add_reads(
        self, op: Operation, strategy: Strategy, summands: list[Tensor], times: int
    ) -> None:
        """Adds what an operation moves if a partial sum passes through it, and if none does."""
        through, (result,) = self.through[op], op.outputs
        layouts = self.planned.layouts
        rows = zip(op.inputs, strategy.operands, through.operands, strict=True)
        for tensor, usual, where in rows:
            passed = any(tensor is summand for summand in summands)
            if usual != layouts[tensor]:
                self._move_if_whole(self.reads.read(op, tensor, usual), result, times)
            if where != layouts[tensor] and (strategy.additive or not passed):
                read = self.reads.read(op, tensor, where)
                self._move_if_partial(read, result, tensor if passed else None, times)

    def _move_if_partial(
        self, read: Read, reader: Tensor, masked: Tensor | None, times: int
    ) -> None:
        """A reader that stays partial has a tensor moved, unless that is partial and `masked`."""
        cost = 0.0 if read in self.paid else self.reads.cost(read, times)
        if cost:
            node = ("moved", read) if masked is None else ("masked", read, masked)
            self.cut.edge_once(node, CutGraph.SINK if masked is None else masked, cost)
            self.cut.edge(reader, node, INFINITE)

    def _move_if_whole(self, read: Read, reader: Tensor, times: int) -> None:
        """A reader that does not stay partial has a tensor moved."""
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
                    self._need_whole(tensor)

    def _add_tensor(self, tensor: Tensor, times: int) -> None:
        if tensor not in self.can:
            return
        if tensor in self.made:
            self.cut.edge(CutGraph.SOURCE, tensor, INFINITE)
        self.cut.edge(tensor, ("whole", tensor), times * (self._cost(tensor) + START))
        if self.axis in self.planned.layouts[tensor].split_axes:
            self.cut.edge(tensor, CutGraph.SINK, times * tensor.bytes * _WIDER)
        given = self.planned.given
        if tensor in given.tensors and tensor not in self.made:
            if self.axis in given.partial.get(tensor, ()):
                self.cut.edge(CutGraph.SOURCE, tensor, _GIVEN)
            else:
                self.cut.edge(tensor, CutGraph.SINK, _GIVEN)

    def _cost(self, tensor: Tensor) -> float:
        whole = self.planned.layouts[tensor]
        summand = whole.drop([self.axis]).add_partial([self.axis])
        return self.reads.between(tensor, summand, whole)

    def _add_linear(self, op: Operation, strategy: Strategy, times: int) -> None:
        (result,) = op.outputs
        summands = self._summands(op, strategy)
        if op in self.through:
            self._add_reads(op, strategy, summands, times)
        for tensor in op.inputs:
            if not any(tensor is summand for summand in summands):
                if not (strategy.additive and any(tensor is op.inputs[i] for i in strategy.linear)):
                    self._need_whole(tensor)
                else:
                    self.cut.edge(result, CutGraph.SINK, times * tensor.bytes * _MASK)
        for tensor in summands:
            mask = times * tensor.bytes * _MASK
            self._tie(tensor, result, mask if strategy.additive else INFINITE)
        if not strategy.additive and sum(op.inputs[i] is summands[0] for i in strategy.linear) > 1:
            self._need_whole(summands[0])
            self.cut.edge(result, CutGraph.SINK, INFINITE)

    def _summands(self, op: Operation, strategy: Strategy) -> list[Tensor]:
        """Returns the operands that may be partial where the result is."""
        found = [op.inputs[i] for i in strategy.linear if op.inputs[i] in self.can]
        return found if strategy.additive else found[:1]

    def _tie(self, before: Tensor, after: Tensor, mask: float) -> None:
        """`after` partial takes `before` partial, or masked at a price; whole takes it whole."""
        self.cut.edge(after, before, mask)
        if before in self.can:
            self.cut.edge(("whole", before), after, INFINITE)

    def _need_whole(self, tensor: Tensor) -> None:
        if tensor in self.can:
            self.cut.edge(("whole", tensor), CutGraph.SINK, INFINITE)

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
                self._need_whole(outer)
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
                self._need_whole(inner)

    def _add_cond(self, op: Operation, times: int) -> None:
        self._need_whole(op.inputs[0])
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
                    self._need_whole(outer)
            for inner, outer in zip(body.outputs, op.outputs, strict=True):
                if outer in self.can:
                    self._add_carry(op, inner, outer, times)
                else:
                    self._need_whole(inner)

    def _add_closed(self, op: Operation, times: int) -> None:
        for tensor in op.inputs:
            self._need_whole(tensor)
        for body in op.bodies:
            self._add(body, times)
            for tensor in body.outputs:
                self._need_whole(tensor)

    def _add_carry(self, op: Operation, tensor: Tensor, taker: Tensor, times: int) -> None:
        """A carry or a cond's result that stays partial takes what it gets partial, or masked."""
        mask, layout = times * tensor.bytes * _MASK, self.planned.layouts[tensor]
        if layout.dim_of(self.axis) is not None:
            read = self.reads.read(op, tensor, layout.drop([self.axis]))
            self._move_if_partial(read, taker, tensor if tensor in self.can else None, times)
        if tensor in self.can:
            self._tie(tensor, taker, mask)
        else:
            self.cut.edge(taker, CutGraph.SINK, mask)

    def _join(self, one: Tensor, other: Tensor) -> None:
        self.cut.edge(one, other, INFINITE)
        self.cut.edge(other, one, INFINITE)
