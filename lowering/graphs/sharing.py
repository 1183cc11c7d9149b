"""Sharing: the backward pass reuses values that the forward pass has moved or reduced.

The backward loop over layers reads values that the forward loop stacked, and recomputes others. If
both passes move a value in the same way (the input of a product that is gathered along `length`),
the forward loop stacks the moved value. If recomputing a value would reduce a partial sum again,
and `md.checkpoint(..., collectives=True)` keeps the results of collectives, the forward loop
stacks the sum. Values are the same if they are computed by the same operations from the same
values. Stored weights are not shared: they are gathered again (see `storage`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.program import exact_key
from meshdsl.lowering.stages import Planned
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation, TracedTensor

_Reader = tuple[Operation, int]


@dataclass
class Shared:
    """A graph in which the backward pass reads what the forward pass kept for it.

    Attributes:
        layouts: the layouts of the tensors that it keeps.
    """

    graph: Graph
    layouts: dict[Tensor, TensorLayout] = field(default_factory=dict)


def share(planned: Planned) -> Shared:
    """Returns an equal graph that sends less, by keeping more."""
    shared = Shared(planned.graph)
    shared.graph = _Sharing(planned, shared.layouts).rewrite(planned.graph)
    return shared


class _Sharing:
    def __init__(self, planned: Planned, kept_layouts: dict[Tensor, TensorLayout]) -> None:
        self.planned = planned
        self.kept_layouts = kept_layouts
        self.known: dict[Hashable, int] = {}

    def rewrite(self, graph: Graph) -> Graph:
        scans = [position for position, op in enumerate(graph.operations) if op.name == "scan"]
        again = any(op.name == "barrier" for op in graph.operations)
        if not any(op.bodies for op in graph.operations) and not again:
            return graph
        # Numbers of all values are needed only to compare a recomputation, or two loops.
        numbers = self._numbers(graph, {}) if again or len(scans) > 1 else {}
        operations = list(graph.operations)
        for position, op in enumerate(operations):
            if not op.bodies:
                continue
            bodies = {
                name: self.rewrite(body) if isinstance(body, Graph) else body
                for name, body in op.params.items()
            }
            if any(bodies[name] is not op.params[name] for name in bodies):
                operations[position] = replace(op, params=bodies)
        if again:
            operations = self._same_graph(operations, numbers)
        for count, later in enumerate(scans):
            for earlier in scans[:count]:
                if self._follows(operations[earlier], operations[later]):
                    pair = self._pair(operations[earlier], operations[later], numbers)
                    operations[earlier], operations[later] = pair
        if all(a is b for a, b in zip(operations, graph.operations, strict=True)):
            return graph
        return replace(graph, operations=tuple(operations))

    # Equal values have equal numbers, computed from the numbers of their operands.

    def _numbers(self, graph: Graph, known_numbers: Mapping[Tensor, int]) -> dict[Tensor, int]:
        """Returns the number of every tensor of a graph, given those of some of its inputs."""
        numbers = {t: known_numbers.get(t, self._number(id(t))) for t in graph.inputs}
        for op in graph.operations:
            if op.name == "barrier":
                numbers.update((b, numbers[a]) for a, b in zip(op.inputs, op.outputs, strict=True))
                continue
            key = _key(op, [numbers[t] for t in op.inputs])
            for place, tensor in enumerate(op.outputs):
                numbers[tensor] = self._number((key, place) if key is not None else id(tensor))
        return numbers

    def _number(self, key: Hashable) -> int:
        return self.known.setdefault(key, len(self.known))

    # Within one graph: sums that a recomputation would reduce again.

    def _same_graph(
        self, operations: list[Operation], numbers: Mapping[Tensor, int]
    ) -> list[Operation]:
        again = _Recomputed(operations)
        if not again.keeping:
            return operations
        first: dict[int, tuple[int, Tensor]] = {}
        kept: dict[Operation, dict[Tensor, Tensor]] = defaultdict(dict)  # through which barrier
        instead: dict[Tensor, Tensor] = {}
        place = {op: position for position, op in enumerate(operations)}
        for position, op in enumerate(operations):
            for tensor in op.outputs:
                if tensor not in again.keeping:
                    first.setdefault(numbers[tensor], (position, tensor))
                elif numbers[tensor] in first and self._reduced(op, tensor):
                    made, before = first[numbers[tensor]]
                    barrier = again.keeping[tensor]
                    if made > place[barrier]:
                        instead[tensor] = before
                        continue
                    fresh = TracedTensor(before.shape, before.dtype, before.source)
                    instead[tensor] = kept[barrier].setdefault(before, fresh)
        return [_reading(_with_more(op, kept.get(op, {})), instead) for op in operations]

    # Between two loops.

    @staticmethod
    def _follows(forward: Operation, backward: Operation) -> bool:
        """Whether a loop reads slices of a tensor that another one stacked."""
        if forward.params["dim"] != backward.params["dim"]:
            return False
        stacked = forward.outputs[forward.params["carries"] :]
        first = backward.params["consts"] + backward.params["carries"]
        return not set(stacked).isdisjoint(backward.inputs[first:])

    def _pair(
        self, forward: Operation, backward: Operation, outside: Mapping[Tensor, int]
    ) -> tuple[Operation, Operation]:
        """Returns the two loops; the first stacks the values that the second reuses."""
        ahead: Graph = forward.params["body"]
        behind: Graph = backward.params["body"]
        made = self._numbers(ahead, self._inputs(forward, outside, {}))
        stacks = forward.outputs[forward.params["carries"] :]
        inner = ahead.outputs[forward.params["carries"] :]
        slices = {stack: made[t] for stack, t in zip(stacks, inner, strict=True)}
        used = self._numbers(behind, self._inputs(backward, outside, slices))
        twins = {number: tensor for tensor, number in reversed(made.items())}
        again = _Recomputed(behind.operations)
        kept: list[tuple[Tensor, Tensor, TensorLayout, list[_Reader]]] = []
        for tensor, readers in _readers(behind).items():
            twin = twins.get(used[tensor])
            if twin is None or twin.shape.find(forward.params["dim"].name) is not None:
                continue
            for where, some in self._kept(tensor, twin, readers, ahead, again):
                kept.append((tensor, twin, where, some))
        return self._keep(forward, backward, kept) if kept else (forward, backward)

    def _inputs(
        self, loop: Operation, outside: Mapping[Tensor, int], slices: Mapping[Tensor, int]
    ) -> dict[Tensor, int]:
        """Returns the numbers of the inputs of a loop's body, without its carries."""
        consts, carries = loop.params["consts"], loop.params["carries"]
        numbers = {}
        for position, (outer, inner) in enumerate(
            zip(loop.inputs, loop.params["body"].inputs, strict=True)
        ):
            number = outside.get(outer, self._number(id(outer)))  # kept by a loop before
            if position < consts:
                numbers[inner] = self._number(("whole", number))
            elif position >= consts + carries:
                known = slices.get(outer)
                numbers[inner] = self._number(("slice", number)) if known is None else known
        return numbers

    def _kept(
        self,
        tensor: Tensor,
        twin: Tensor,
        readers: Sequence[_Reader],
        ahead: Graph,
        again: _Recomputed,
    ) -> Iterator[tuple[TensorLayout, list[_Reader]]]:
        """Yields the layouts in which a value is kept, with the readers of each."""
        layouts, size, mesh = self.planned.layouts, tensor.dtype.itemsize, self.planned.mesh
        if tensor in self.planned.stored or twin in self.planned.stored:
            return
        if tensor in again.computed and tensor not in again.keeping:
            return
        if tensor not in layouts or twin not in layouts:  # an earlier pair has made it
            return
        home = layouts[tensor]
        maker = again.maker.get(tensor)
        moved = self._by_layout(_readers(ahead).get(twin, ()))
        wanted = self._by_layout(readers)
        left = list(readers)
        for where, some in wanted.items():
            if where not in moved or not reshard_cost(tensor.shape, size, home, where, mesh):
                continue
            if not reshard_cost(tensor.shape, size, where, home, mesh):
                yield where, list(readers)  # the others take a slice of it
                return
            yield where, some
            left = [reader for reader in left if reader not in some]
        if left and maker is not None and tensor in again.keeping and self._reduced(maker, tensor):
            yield home, left

    def _by_layout(self, readers: Sequence[_Reader]) -> dict[TensorLayout, list[_Reader]]:
        by_layout: dict[TensorLayout, list[_Reader]] = defaultdict(list)
        for op, position in readers:
            strategy = self.planned.strategies.get(op)
            if strategy is not None:
                by_layout[strategy.operands[position].complete()].append((op, position))
        return by_layout

    def _reduced(self, maker: Operation, tensor: Tensor) -> bool:
        """Whether the operation that makes a tensor leaves a partial sum."""
        strategy = self.planned.strategies.get(maker)
        if strategy is None:
            return False
        made = zip(maker.outputs, strategy.results, strict=True)
        return any(left.partial for output, left in made if output is tensor)

    def _keep(
        self,
        forward: Operation,
        backward: Operation,
        kept: Sequence[tuple[Tensor, Tensor, TensorLayout, list[_Reader]]],
    ) -> tuple[Operation, Operation]:
        dim = forward.params["dim"]
        ahead: Graph = forward.params["body"]
        behind: Graph = backward.params["body"]
        instead: dict[_Reader, Tensor] = {}
        twins, stacks, slices = [], [], []
        for tensor, twin, where, readers in kept:
            stack = TracedTensor(Shape([dim, *twin.shape]), twin.dtype, twin.source)
            piece = TracedTensor(twin.shape, twin.dtype, tensor.source)
            twins.append(twin)
            stacks.append(stack)
            slices.append(piece)
            self.kept_layouts[stack] = self.kept_layouts[piece] = where
            instead.update(dict.fromkeys(readers, piece))
        operations = tuple(
            replace(
                op, inputs=tuple(instead.get((op, i), tensor) for i, tensor in enumerate(op.inputs))
            )
            for op in behind.operations
        )
        ahead = replace(ahead, outputs=(*ahead.outputs, *twins))
        behind = replace(behind, inputs=(*behind.inputs, *slices), operations=operations)
        forward = replace(
            forward,
            outputs=(*forward.outputs, *stacks),
            params={**forward.params, "body": ahead},
        )
        backward = replace(
            backward,
            inputs=(*backward.inputs, *stacks),
            params={**backward.params, "body": behind},
        )
        return forward, backward


class _Recomputed:
    """The tensors that a graph recomputes.

    Attributes:
        maker: the operation that makes each tensor.
        computed: tensors that are recomputed from kept values.
        keeping: those of `md.checkpoint` with `collectives`, with the last barrier before each.
    """

    def __init__(self, operations: Sequence[Operation]) -> None:
        self.maker: dict[Tensor, Operation] = {}
        self.computed: set[Tensor] = set()
        self.keeping: dict[Tensor, Operation] = {}
        place: dict[Operation, int] = {}
        for op in operations:
            place[op] = len(place)
            self.maker.update(dict.fromkeys(op.outputs, op))
            if op.name == "barrier":
                self.computed.update(op.outputs)
                if op.params.get("collectives"):
                    self.keeping.update(dict.fromkeys(op.outputs, op))
            elif not op.source.backward:
                if any(t in self.computed for t in op.inputs):
                    self.computed.update(op.outputs)
                behind = [self.keeping[t] for t in op.inputs if t in self.keeping]
                if behind:
                    self.keeping.update(
                        dict.fromkeys(op.outputs, max(behind, key=place.__getitem__))
                    )


def _with_more(barrier: Operation, more: Mapping[Tensor, Tensor]) -> Operation:
    """Returns a barrier with more operands; `more` has its result for each of them."""
    if not more:
        return barrier
    inputs, outputs = (*barrier.inputs, *more), (*barrier.outputs, *more.values())
    return replace(barrier, inputs=inputs, outputs=outputs)


def _reading(op: Operation, instead: Mapping[Tensor, Tensor]) -> Operation:
    """Returns an operation whose operands are replaced by `instead`."""
    if not any(t in instead for t in op.inputs):
        return op
    return replace(op, inputs=tuple(instead.get(t, t) for t in op.inputs))


def _readers(graph: Graph) -> dict[Tensor, list[_Reader]]:
    readers: dict[Tensor, list[_Reader]] = defaultdict(list)
    for op in graph.operations:
        for position, tensor in enumerate(op.inputs):
            readers[tensor].append((op, position))
    return readers


def _key(op: Operation, inputs: Sequence[int]) -> Hashable | None:
    """Returns a key that equal operations share; None for effects and operations with bodies."""
    if op.effect or op.bodies:
        return None
    items = []
    for name in sorted(op.params):
        value = op.params[name]
        if isinstance(value, np.ndarray):
            return None
        items.append((name, exact_key(value)))
    return op.name, tuple(inputs), tuple(items)
