"""Storage: which tensors have the layouts of stored parameters, gradients and optimizer state.

A scoped rule (`params/embed:data`) gives a layout to a tensor with a path: an input, an output, or
a tensor that `md.name` or differentiation names. A tensor with the same dims may have this layout
too if it is an elementwise result, a slice or a stack of slices of it: an updated moment, a
parameter cast before it is gathered, the gradient that a backward scan stacks.

A minimum cut decides which of them are stored. A stored tensor costs a gather if some reader needs
it in the layout of the rules without a scope. A partial sum costs less to reduce into storage than
to reduce to all devices. So gathers happen on the cheaper side of a cast, optimizers run on shards,
and gradients are reduce-scattered directly into storage.

A sum over microbatches stays partial and is reduced once, unless memory is short. A stack of layers
is not gathered at once, unless gathered weights are to be kept: the loop that uses its slices
gathers them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard import reshard_cost
from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.placement.choosing import Chooser
from meshdsl.lowering.placement.mincut import INFINITE, CutGraph
from meshdsl.lowering.writing.loops import is_sum
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation

# The cost of starting one gather, in bytes on the wire.
_START = 1024.0
# The extra cost of computing on a full tensor instead of its shard, per byte: it breaks ties.
_WORK = 1e-3
# The weight of a second gather: below 1, since keeping results of the first one takes memory.
_AGAIN = 0.98
# The cost of moving inputs and named tensors out of storage; finite, since rules may disagree.
_FIXED = 1e18

_Map = Callable[[TensorLayout], TensorLayout | None]


def stored(
    graph: Graph,
    layout: Layout,
    chooser: Chooser,
    keep: bool,
    reduce_each: bool,
    again: bool,
) -> dict[Tensor, TensorLayout]:
    """Returns the tensors that are stored, with their layouts.

    Args:
        keep: whether gathered tensors are kept, so that one gather serves all readers.
        reduce_each: whether a loop adds up sums in storage; else it adds partial sums, which are
            reduced once after the loop.
        again: whether the layers of a pipeline's stages may be stored, so that each pass over them
            gathers them; else they are gathered before the first pass, once per step.
    """
    if not any(rule.scope for rule in layout.rules):
        return {}
    return _Storage(graph, layout, chooser, keep, reduce_each, again).solve()


def tensors_with_paths(graph: Graph) -> Iterator[tuple[Tensor, str]]:
    """Yields the tensors of a graph and its bodies that have paths, with these."""
    yield from zip(graph.inputs, graph.input_paths, strict=False)
    yield from zip(graph.outputs, graph.output_paths, strict=False)
    yield from graph.names.items()
    for op in graph.operations:
        for body in op.bodies:
            yield from tensors_with_paths(body)


def stored_inputs(graph: Graph, layout: Layout) -> list[Tensor]:
    """Returns the inputs that are stored in another layout than they are used in."""
    rows = zip(graph.inputs, graph.input_paths, strict=True)
    return [t for t, path in rows if layout.assign(t.shape, path) != layout.inside(t.shape)]


class _Storage:
    """The cut.

    Each node is a statement that is true on the source side:

    - a tensor: it is stored,
    - ("moved", tensor, phase): no reader of a phase needs it moved out of storage,
    - ("moved back", tensor, phase): a result of such a reader is stored.

    The last two are left out where one reader alone decides them.

    Attributes:
        stored_layouts: for tensors that may be stored, their layouts if they are.
        stacks: tensors that a loop slices.
        reads: for tensors and phases, how often the first reader runs, and of all readers the
            results that need no move if they are stored too; None: the reader needs the move.
        costs: the costs of moving tensors, by their dims, bytes per element and stored layout, and
            whether they move into storage; thousands of parameters may share them.
        savings: the costs of computing in storage instead, by the same.
        related: for each tensor, those that may be stored if it is, with maps between layouts.
    """

    def __init__(
        self,
        graph: Graph,
        layout: Layout,
        chooser: Chooser,
        keep: bool,
        reduce_each: bool,
        again: bool,
    ) -> None:
        self.graph = graph
        self.layout = layout
        self.chooser = chooser
        self.mesh = chooser.mesh
        self.keep = keep
        self.reduce_each = reduce_each
        self.again = again
        self.stored_layouts: dict[Tensor, TensorLayout] = {}
        self.stacks: set[Tensor] = set()
        self.reads: dict[tuple[Tensor, int], tuple[int, dict[Tensor | None, None]]] = {}
        self.costs: dict[tuple[Shape, int, TensorLayout, bool], float] = {}
        self.savings: dict[tuple[Shape, int, TensorLayout], float] = {}
        self.related: dict[Tensor, list[tuple[Tensor, _Map]]] = defaultdict(list)
        self.cut = CutGraph()

    def solve(self) -> dict[Tensor, TensorLayout]:
        """Returns the tensors that are stored."""
        self._relate(self.graph)
        self._reach()
        if not self.stored_layouts:
            return {}
        self._fix()
        self._add(self.graph, 1, phased=True)
        for tensor, path in zip(self.graph.outputs, self.graph.output_paths, strict=False):
            if tensor in self.stored_layouts:
                layout = self.layout.assign(tensor.shape, path)
                if layout == self.stored_layouts[tensor]:
                    self.cut.edge(CutGraph.SOURCE, tensor, self._cost(tensor, back=True))
                else:
                    self._read(tensor, 1, 1)
        self._add_moves()
        stored_side = self.cut.source_side()
        return {
            tensor: layout
            for tensor, layout in self.stored_layouts.items()
            if tensor in stored_side
        }

    # Which tensors may be stored, and where.

    def _relate(self, graph: Graph) -> None:
        for op in graph.operations:
            for first, second, forwards, backwards in _relations(op):
                self.related[first].append((second, forwards))
                self.related[second].append((first, backwards))
            for first, second in _sums(op):
                self.related[first].append((second, self._sum_layout(second)))
                self.related[second].append((first, self._sum_layout(first)))
            for first, second, forwards, backwards in _dealt(op) if self.again else ():
                self.related[first].append((second, forwards))
                self.related[second].append((first, backwards))
            if op.name == "scan":
                consts, carries = op.params["consts"], op.params["carries"]
                self.stacks.update(op.inputs[consts + carries :])
            for body in op.bodies:
                self._relate(body)
            if op.name == "scan":
                inner = zip(op.inputs[:consts], op.params["body"].inputs[:consts], strict=True)
                self.stacks.update(outside for outside, inside in inner if inside in self.stacks)

    def _reach(self) -> None:
        """Spreads the layouts of tensors with paths to related tensors, nearest first."""
        front = []
        for tensor, path in tensors_with_paths(self.graph):
            layout = self.layout.assign(tensor.shape, path)
            if layout != self._unstored(tensor):
                front.append((tensor, layout))
        while front:
            following = []
            for tensor, layout in front:
                if tensor in self.stored_layouts:
                    continue
                self.stored_layouts[tensor] = layout
                for other, layout_of in self.related[tensor]:
                    other_layout = layout_of(layout)
                    if other not in self.stored_layouts and other_layout is not None:
                        following.append((other, other_layout))
            front = following
        for tensor in [
            t for t, layout in self.stored_layouts.items() if layout == self._unstored(t)
        ]:
            del self.stored_layouts[tensor]

    def _sum_layout(self, tensor: Tensor) -> _Map:
        """Returns the map of layouts for a running sum of a loop.

        The sum may be in storage if each part is reduced into storage at once, or if storage does
        not split it further, so that it is not reduced there.
        """
        return lambda layout: layout if self._may_store_sum(tensor, layout) else None

    def _may_store_sum(self, tensor: Tensor, stored_layout: TensorLayout) -> bool:
        """Whether a running sum may be stored in a layout."""
        return self.reduce_each or not self._splits_further(tensor, stored_layout)

    def _splits_further(self, tensor: Tensor, stored_layout: TensorLayout) -> bool:
        """Whether storage has splits of a tensor that the rules without a scope lack."""
        splits = set(self._unstored(tensor).splits)
        return any(split not in splits for split in stored_layout.splits)

    def _unstored(self, tensor: Tensor) -> TensorLayout:
        """Returns the layout of a tensor if it is not stored."""
        return self.layout.inside(tensor.shape)

    # The cut.

    def _fix(self) -> None:
        inputs = set(self.graph.inputs)
        outputs = set(self.graph.outputs)
        for tensor, path in tensors_with_paths(self.graph):
            stored_layout = self.stored_layouts.get(tensor)
            if stored_layout is None or (tensor in outputs and tensor not in inputs):
                continue
            rules = [self.layout.rule_for(name, path) for name in tensor.shape.names]
            if tensor in inputs or any(rule is not None and rule.scope for rule in rules):
                at = self.layout.assign(tensor.shape, path)
                if at == stored_layout:
                    self.cut.edge(CutGraph.SOURCE, tensor, _FIXED)
                else:
                    self.cut.edge(tensor, CutGraph.SINK, _FIXED)

    def _add(self, graph: Graph, times: int, phased: bool) -> None:
        """Adds the reads and results of a graph.

        Args:
            times: how often the graph runs.
            phased: whether it has a forward and a backward pass.
        """
        phase = 0
        for op in graph.operations:
            if phased and op.source.backward and not self.keep:
                phase = 1
            self._operation(op, times, phase)
            for tensor in op.outputs:
                self._make(op, tensor, times)
            if op.name in _BODIES:
                _BODIES[op.name](self, op, times, phase)
            for body in op.bodies:
                runs = op.params["dim"].size if op.name == "scan" else 1
                self._add(body, times * runs, phased and not op.source.backward)

    def _operation(self, op: Operation, times: int, phase: int) -> None:
        if op.bodies or _reads_anywhere(op):
            if op.primitive.form is Form.SAME:
                for before, after in zip(op.inputs, op.outputs, strict=True):
                    self._tie(before, after)
            return
        result = op.outputs[0]
        if op.name == "deal_to_stages" and result in self.stored_layouts:
            # Once per step would be cheaper, also before a cast; the choice is to gather again.
            self._tie(op.inputs[0], result)
            self.cut.edge(CutGraph.SOURCE, result, _FIXED)
            return
        for tensor in dict.fromkeys(op.inputs):
            if tensor not in self.stored_layouts:
                continue
            stored = self.stored_layouts.get(result)
            if stored is not None and self._lets_store(tensor, result, stored):
                self._read(tensor, times, phase, result)
            elif not self._reads_stored(op, tensor):
                self._read(tensor, times, phase)
            elif not self._splits_further(tensor, self.stored_layouts[tensor]):
                more = self._sent(op, {}) - self._sent(op, {tensor: self.stored_layouts[tensor]})
                self.cut.edge(CutGraph.SOURCE, tensor, times * max(more, 0.0))

    def _lets_store(self, tensor: Tensor, result: Tensor, stored: TensorLayout) -> bool:
        """Whether a tensor in storage lets a result have the layout `stored`."""
        for other, layout_of in self.related[tensor]:
            if other is result and layout_of(self.stored_layouts[tensor]) == stored:
                return True
        return False

    def _sent(self, op: Operation, stored: Mapping[Tensor, TensorLayout]) -> float:
        """Returns the bytes an operation sends if the operands `stored` have these layouts."""
        operands = tuple(stored.get(t) or self._unstored(t) for t in op.inputs)
        results = tuple(self._unstored(t) for t in op.outputs)
        strategy = self.chooser.strategy(op, operands, results)
        rows = [*zip(op.inputs, operands, strategy.operands, strict=True)]
        rows += zip(op.outputs, strategy.results, results, strict=True)
        return sum(
            reshard_cost(t.shape, t.dtype.itemsize, before, after, self.mesh)
            for t, before, after in rows
        )

    def _reads_stored(self, op: Operation, tensor: Tensor) -> bool:
        """Whether the strategy of an operation reads a tensor in its stored layout."""
        if op.primitive.form is Form.ELEMENTWISE:
            return False
        stored_layout = self.stored_layouts[tensor]
        operands = tuple(stored_layout if t is tensor else self._unstored(t) for t in op.inputs)
        results = tuple(self._unstored(t) for t in op.outputs)
        strategy = self.chooser.strategy(op, operands, results)
        needed = zip(op.inputs, strategy.operands, strict=True)
        return all(layout == stored_layout for operand, layout in needed if operand is tensor)

    def _read(self, tensor: Tensor, times: int, phase: int, result: Tensor | None = None) -> None:
        """Adds a reader that needs a tensor moved.

        Args:
            result: if given, the tensor is moved unless this one is stored too.
        """
        self.reads.setdefault((tensor, phase), (times, {}))[1][result] = None

    def _add_moves(self) -> None:
        """Adds what the readers of tensors need moved: one move serves all readers of a phase."""
        edge = self.cut.edge
        for (tensor, phase), (times, results) in self.reads.items():
            moved, back = ("moved", tensor, phase), ("moved back", tensor, phase)
            cost = (_AGAIN if phase else 1.0) * times * self._cost(tensor)
            cost_back = times * self._cost(tensor, back=True)
            stored = [result for result in results if result is not None]
            if len(stored) < len(results):
                edge(tensor, CutGraph.SINK, cost)
            elif len(stored) == 1:
                edge(tensor, stored[0], cost)
            else:
                edge(tensor, moved, cost)
                for result in stored:
                    edge(moved, result, INFINITE)
            if len(stored) == 1:
                edge(stored[0], tensor, cost_back)
            elif stored:
                edge(back, tensor, cost_back)
                for result in stored:
                    edge(result, back, INFINITE)

    def _cost(self, tensor: Tensor, back: bool = False) -> float:
        """Returns the cost of moving a tensor out of storage, or into it (`back`)."""
        shape, size, stored_layout = (
            tensor.shape,
            tensor.dtype.itemsize,
            self.stored_layouts[tensor],
        )
        key = shape, size, stored_layout, back
        if key not in self.costs:
            layouts = stored_layout, self._unstored(tensor)
            cost = reshard_cost(shape, size, *(layouts[::-1] if back else layouts), self.mesh)
            self.costs[key] = cost + _START if cost else _WORK
        return self.costs[key]

    def _make(self, op: Operation, tensor: Tensor, times: int) -> None:
        """Adds the cost that is saved, or added, if an operation's result is stored."""
        stored_layout = self.stored_layouts.get(tensor)
        if stored_layout is None:
            return
        unstored_layout = self._unstored(tensor)
        shape, size = tensor.shape, tensor.dtype.itemsize
        saved = self.savings.get((shape, size, stored_layout))
        if saved is None:
            saved_elements = unstored_layout.local(shape, self.mesh).volume
            saved_elements -= stored_layout.local(shape, self.mesh).volume
            saved = self.savings[shape, size, stored_layout] = saved_elements * size * _WORK
        if not op.bodies and op.primitive.form not in (Form.ELEMENTWISE, Form.SAME):
            saved += self._saved(op, tensor, unstored_layout, stored_layout)
        if saved > 0:
            self.cut.edge(CutGraph.SOURCE, tensor, times * saved)
        else:
            self.cut.edge(tensor, CutGraph.SINK, -times * saved)

    def _saved(
        self,
        op: Operation,
        tensor: Tensor,
        unstored_layout: TensorLayout,
        stored_layout: TensorLayout,
    ) -> float:
        """Returns the bytes that are not sent if an operation's result is stored."""
        operands = tuple(self._unstored(t) for t in op.inputs)

        def strategy(layout: TensorLayout) -> tuple[Strategy, TensorLayout]:
            """Returns the strategy if the result has a layout, and the layout it computes."""
            results = tuple(layout if t is tensor else self._unstored(t) for t in op.outputs)
            chosen = self.chooser.strategy(op, operands, results)
            computed = zip(op.outputs, chosen.results, strict=True)
            return chosen, next(result for t, result in computed if t is tensor)

        def moved(tensor: Tensor, before: TensorLayout, after: TensorLayout) -> float:
            return reshard_cost(tensor.shape, tensor.dtype.itemsize, before, after, self.mesh)

        def sent_before(chosen: Strategy) -> float:
            rows = zip(op.inputs, operands, chosen.operands, strict=True)
            return sum(moved(t, before, after) for t, before, after in rows)

        usual, computed = strategy(unstored_layout)
        if any(kind == "varying" for _, kind in computed.partial):
            return 0.0
        saved = moved(tensor, computed, unstored_layout) - moved(tensor, computed, stored_layout)
        if not self._splits_further(tensor, stored_layout):
            if_stored, computed_then = strategy(stored_layout)  # operands may need no moves then
            saved_then = moved(tensor, computed, unstored_layout)
            saved_then -= moved(tensor, computed_then, stored_layout)
            saved = max(saved, saved_then + sent_before(usual) - sent_before(if_stored))
        return saved

    def _scan(self, op: Operation, times: int, phase: int) -> None:
        body: Graph = op.params["body"]
        consts, carries = op.params["consts"], op.params["carries"]
        for position, (outer, inner) in enumerate(zip(op.inputs, body.inputs, strict=True)):
            if position < consts:
                self._captured(outer, inner, times, phase)
            elif position < consts + carries:
                layout = self.stored_layouts.get(inner)
                if is_sum(body, position, position - consts) and not (
                    layout is not None and self._may_store_sum(inner, layout)
                ):
                    continue
                self._tie(outer, inner)
                self._tie(body.outputs[position - consts], inner)
                self._tie(op.outputs[position - consts], inner)
            elif inner in self.stored_layouts and not self.keep:
                self._tie(outer, inner)
            elif outer in self.stored_layouts:
                self._read(outer, times, phase, inner if inner in self.stored_layouts else None)
        for inner, outer in zip(body.outputs[carries:], op.outputs[carries:], strict=True):
            if inner in self.stored_layouts:
                self._tie(inner, outer)

    def _captured(self, outer: Tensor, inner: Tensor, times: int, phase: int) -> None:
        if inner in self.stacks and not self.keep:
            self._tie(outer, inner)
        elif outer in self.stored_layouts:
            self._read(outer, times, phase, inner if inner in self.stored_layouts else None)

    def _cond(self, op: Operation, times: int, phase: int) -> None:
        for body in op.bodies:
            for outer, inner in zip(op.inputs[1:], body.inputs, strict=True):
                self._captured(outer, inner, times, phase)
            for inner, outer in zip(body.outputs, op.outputs, strict=True):
                self._tie(inner, outer)

    def _while(self, op: Operation, times: int, phase: int) -> None:
        consts = op.params["consts"]
        for body in op.bodies:
            for position, (outer, inner) in enumerate(zip(op.inputs, body.inputs, strict=True)):
                if position < consts:
                    self._captured(outer, inner, times, phase)
                else:
                    self._tie(outer, inner)
        body = op.params["body"]
        for tensors in zip(op.inputs[consts:], body.outputs, op.outputs, strict=True):
            self._tie(tensors[0], tensors[1])
            self._tie(tensors[0], tensors[2])

    def _tie(self, first: Tensor, second: Tensor) -> None:
        """Lets both tensors be stored, or neither; neither if one of them cannot be."""
        for tensor, other in ((first, second), (second, first)):
            if tensor in self.stored_layouts:
                self.cut.edge(
                    tensor, other if other in self.stored_layouts else CutGraph.SINK, INFINITE
                )


_BODIES = {"cond": _Storage._cond, "scan": _Storage._scan, "while_loop": _Storage._while}


def _reads_anywhere(op: Operation) -> bool:
    """Whether an operation reads a tensor in any layout: devices combine the results of shards."""
    form = op.primitive.form
    return form is Form.SAME or (form is Form.REDUCTION and op.primitive.combines is not None)


def _sums(op: Operation) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of tensors of a loop's running sums: before it, in it, and after it."""
    if op.name == "scan":
        yield from _carried(op, sums=True)


def _carried(scan: Operation, sums: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pairs of tensors of a loop's carries: of the running sums, or of all others."""
    body: Graph = scan.params["body"]
    consts = scan.params["consts"]
    for number in range(scan.params["carries"]):
        if sums == is_sum(body, consts + number, number):
            start, before = scan.inputs[consts + number], body.inputs[consts + number]
            after, result = body.outputs[number], scan.outputs[number]
            yield from ((start, before), (before, after), (after, result))


def _relations(op: Operation) -> Iterator[tuple[Tensor, Tensor, _Map, _Map]]:
    """Yields pairs of tensors that may be stored if the other is, and the maps of their layouts.

    A loop's running sums are not among them: see `_sums`.
    """

    def alike(firsts: Sequence[Tensor], seconds: Sequence[Tensor]) -> Iterator:
        for first, second in zip(firsts, seconds, strict=True):
            yield first, second, _same, _same

    def slices(stacks: Sequence[Tensor], slices_: Sequence[Tensor]) -> Iterator:
        for stack, slice_ in zip(stacks, slices_, strict=True):
            yield stack, slice_, _restricted(slice_), _same

    params = op.params
    if op.name == "scan":
        body, consts, carries = params["body"], params["consts"], params["carries"]
        yield from alike(op.inputs[:consts], body.inputs[:consts])
        for first, second in _carried(op, sums=False):
            yield first, second, _same, _same
        yield from slices(op.inputs[consts + carries :], body.inputs[consts + carries :])
        yield from slices(op.outputs[carries:], body.outputs[carries:])
    elif op.name == "while_loop":
        consts = params["consts"]
        for body in op.bodies:
            yield from alike(op.inputs, body.inputs)
        yield from alike(op.outputs, params["body"].outputs)
        yield from alike(op.outputs, op.inputs[consts:])
    elif op.name == "cond":
        for body in op.bodies:
            yield from alike(op.inputs[1:], body.inputs)
            yield from alike(op.outputs, body.outputs)
    elif op.primitive.form is Form.SAME:
        yield from alike(op.inputs, op.outputs)
    elif op.name == "rename":
        names: Mapping[str, str] = params["names"]
        back = {v: k for k, v in names.items()}
        yield op.inputs[0], op.outputs[0], _renamed(names), _renamed(back)
    elif op.primitive.form in (Form.ELEMENTWISE, Form.ARRANGED):
        (result,) = op.outputs
        for tensor in dict.fromkeys(op.inputs):
            if tensor.shape == result.shape or set(tensor.shape) == set(result.shape):
                yield tensor, result, _same, _same


def _dealt(op: Operation) -> Iterator[tuple[Tensor, Tensor, _Map, _Map]]:
    """Yields the stack of all layers and a stage's own part of it, and the maps of layouts."""
    if op.name not in ("deal_to_stages", "collect_from_stages"):
        return
    (before,), (after,) = op.inputs, op.outputs
    stack, own = (before, after) if op.name == "deal_to_stages" else (after, before)
    layers, axes = op.params["layers"].name, op.params["axes"]

    def own_layout(layout: TensorLayout) -> TensorLayout | None:
        rest = layout.restrict(own.shape.names)
        return rest if rest.split_axes.isdisjoint(axes) else None

    def stack_layout(layout: TensorLayout) -> TensorLayout | None:
        return layout.split(layers, axes) if layout.split_axes.isdisjoint(axes) else None

    yield stack, own, own_layout, stack_layout


def _same(layout: TensorLayout) -> TensorLayout:
    return layout


def _restricted(tensor: Tensor) -> _Map:
    return lambda layout: layout.restrict(tensor.shape.names)


def _renamed(names: Mapping[str, str]) -> _Map:
    return lambda layout: layout.rename(names)
