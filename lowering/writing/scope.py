"""Scope: writes one block of a program: the instructions of its operations, and the moves between.

Each operand is fetched in the layout that its operation needs, and a moved tensor is used again by
later readers. Constants (tensors made of no input, elementwise results included) are never moved:
they are made for each reader in the layout that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.collectives import REDUCING
from meshdsl.lowering.communication.reshard import reshard, reshard_cost
from meshdsl.lowering.parameters import Barrier
from meshdsl.lowering.partition import Strategy
from meshdsl.lowering.program import Value
from meshdsl.lowering.stages import Planned, Reduced, partial_form
from meshdsl.lowering.writing.bodies import BODIES
from meshdsl.lowering.writing.builder import BOOL, INT32, BlockBuilder
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Operation


@dataclass
class Scope:
    """The lowering of one block.

    Attributes:
        versions: the values of each tensor, by layout.
        outer: for the consts of a body, the tensor of the parent scope.
        consts: values of the parent that the body uses, and the body's inputs for them.
        masked: complete tensors as partial sums: one device has them, the others have zeros.
        from_nothing: constants that are made for each reader, with their operations.
        phased: whether a backward pass may follow a forward pass in this block. Then weights are
            gathered again for it.
        again: stored tensors after a barrier that waits for the backward pass, so that no compiler
            merges the second gather with the first.
    """

    reduced: Reduced
    parent: Scope | None = None
    versions: dict[Tensor, dict[TensorLayout, Value]] = field(default_factory=dict)
    outer: dict[Tensor, Tensor] = field(default_factory=dict)
    consts: dict[Value, Value] = field(default_factory=dict)
    masked: dict[tuple[Tensor, TensorLayout], Value] = field(default_factory=dict)
    from_nothing: dict[Tensor, Operation] = field(default_factory=dict)
    phased: bool = False
    again: dict[Tensor, Value] = field(default_factory=dict)
    planned: Planned = field(init=False)
    builder: BlockBuilder = field(init=False)

    def __post_init__(self) -> None:
        self.planned = self.reduced.planned
        self.builder = BlockBuilder(self.planned.mesh)

    def define(self, tensor: Tensor, value: Value) -> None:
        if tensor in self.versions:
            self.versions[tensor][value.layout] = value
        else:
            self.versions[tensor] = {value.layout: value}

    def run(self, operations: Sequence[Operation]) -> None:
        for op in operations:
            if self.phased and op.source.backward:
                self._turn(op)
            if op.name in BODIES:
                BODIES[op.name](self, op)
            elif op.outputs and op.outputs[0] in self.planned.constant:
                self.from_nothing[op.outputs[0]] = op
            else:
                self._operation(op)

    def _turn(self, op: Operation) -> None:
        """Starts the backward pass: forgets the moved versions of stored tensors."""
        self.phased = False
        if not self.builder.instructions:
            return
        late = self.builder.instructions[-1].outputs[0]
        for tensor in [t for t in self.versions if t in self.planned.stored]:
            home = self.planned.layouts[tensor]
            versions = self.versions[tensor]
            if len(versions) > 1 and home in versions:
                value = versions[home]
                results = [(v.shape, v.dtype, v.layout) for v in (value, late)]
                self.builder.source = op.source
                params: Barrier = {"stored": True}
                behind = self.builder.add("barrier", (value, late), results, params)
                self.again[tensor] = behind[0]
                self.versions[tensor] = {home: value}

    def _operation(self, op: Operation) -> None:
        through = self.reduced.partial.get(op.outputs[0], frozenset())
        strategy = self.planned.strategies[op]
        if through:
            strategy = self.planned.strategy_without(op, through)
        layouts: Sequence[TensorLayout] = strategy.operands
        if through:
            layouts = list(strategy.operands)
            for axis in sorted(through):
                for position in self._summands(op, strategy, axis):
                    layouts[position] = layouts[position].add_partial([axis])
        self.builder.source = op.source
        versions = self.versions
        inputs = [
            versions[t][where] if t in versions and where in versions[t] else self.get(t, where)
            for t, where in zip(op.inputs, layouts, strict=True)
        ]
        self.builder.source = op.source
        for tensor, value in zip(op.outputs, strategy.emit(self.builder, inputs), strict=True):
            self.define(tensor, value)

    def _summands(self, op: Operation, strategy: Strategy, axis: str) -> Sequence[int]:
        """Returns the operands that are read as partial sums over `axis`."""
        if strategy.additive:
            return strategy.linear
        return [i for i in strategy.linear if self._is_partial(op.inputs[i], axis)][:1]

    def _is_partial(self, tensor: Tensor, axis: str) -> bool:
        if tensor in self.outer:
            assert self.parent is not None
            return self.parent._is_partial(self.outer[tensor], axis)
        versions = self.versions.get(tensor, {})
        return any((axis, "sum") in layout.partial for layout in versions)

    def get(self, tensor: Tensor, where: TensorLayout) -> Value:
        """Returns a tensor in a layout, moving it there if it has not been moved before."""
        versions = self.versions.setdefault(tensor, {})
        if where in versions:
            return versions[where]
        if tensor in self.outer and not self._gathers(tensor, where):
            value = self._capture(tensor, where)
        elif where.partial and not self._can_leave(tensor, where):
            if (tensor, where) not in self.masked:  # no version: the tensor is not partial itself
                self.masked[tensor, where] = self._masked(tensor, where)
            return self.masked[tensor, where]
        elif tensor in self.from_nothing:
            value = self._make(tensor, where)
        else:
            value = self._move(tensor, where)
        versions[where] = value
        return value

    def _capture(self, tensor: Tensor, where: TensorLayout) -> Value:
        assert self.parent is not None
        outside = self.parent.get(self.outer[tensor], where)
        if outside not in self.consts:
            self.consts[outside] = self.builder.value(tensor.shape, tensor.dtype, where)
        return self.consts[outside]

    def _gathers(self, tensor: Tensor, where: TensorLayout) -> bool:
        """Whether a stored tensor of the parent's is moved here, where it is used."""
        home = self.planned.layouts[tensor]
        if tensor not in self.planned.stored or where.partial or where == home:
            return False
        self.get(tensor, home)
        return True

    def _can_leave(self, tensor: Tensor, where: TensorLayout) -> bool:
        return all(self._is_partial(tensor, axis) for axis in where.partial_axes)

    def _masked(self, tensor: Tensor, where: TensorLayout) -> Value:
        """Makes a complete value a partial sum: the first device along the axes has it."""
        axes = [a for a in where.partial_axes if not self._is_partial(tensor, a)]
        shape, dtype = tensor.shape, tensor.dtype
        op = self.from_nothing.get(tensor)
        if op is not None and op.name == "full" and op.params["value"] == 0:
            return self.builder.one("full", (), shape, dtype, where, value=0)
        value = self.get(tensor, where.drop(axes))
        index = self.builder.device_index(axes)
        zero = self.builder.number(0, INT32)
        first = self.builder.one("equal", (index, zero), index.shape, BOOL, index.layout)
        blank = self.builder.number(0, dtype)
        return self.builder.one("select", (first, value, blank), shape, dtype, where)

    def _make(self, tensor: Tensor, where: TensorLayout) -> Value:
        op = self.from_nothing[tensor]
        operands = []
        if op.name == "rename":
            operands = [where.rename({v: k for k, v in op.params["names"].items()})]
        strategy = self.planned.chooser.strategy(op, operands, [where])
        inputs = [self.get(t, at) for t, at in zip(op.inputs, strategy.operands, strict=True)]
        reader, self.builder.source = self.builder.source, op.source
        (value,) = strategy.emit(self.builder, inputs)
        self.builder.source = reader
        return value

    def _move(self, tensor: Tensor, where: TensorLayout) -> Value:
        versions = self.versions[tensor]
        home = partial_form(self.planned.layouts[tensor], frozenset(where.partial_axes))
        if where != home and not any(set(v.partial) == set(where.partial) for v in versions):
            self.get(tensor, home)
        size, mesh = tensor.dtype.itemsize, self.planned.mesh
        starts = [v for v in versions if set(where.partial) <= set(v.partial)]
        start = min(starts, key=lambda v: reshard_cost(tensor.shape, size, v, where, mesh))
        value, reader = versions[start], self.builder.source
        if start == self.planned.layouts[tensor]:
            value = self.again.get(tensor, value)
        for move in reshard(tensor.shape, size, start, where, mesh):
            result = [(tensor.shape, tensor.dtype, move.result)]
            if move.op in REDUCING:  # reported with the line that made the partial sum
                self.builder.source = tensor.source
            value = self.builder.add(move.op, (value,), result, move.params)[0]
            self.builder.source = reader
            versions.setdefault(move.result, value)
        return value

    # Bodies; see `lowering.writing.bodies`.

    def inside(self, op: Operation, inner: Sequence[Tensor], outer: Sequence[Tensor]) -> Scope:
        """Returns a scope for a body of `op`, whose tensors `inner` are this one's `outer`."""
        scope = Scope(self.reduced, self)
        scope.phased = self.phased and not op.source.backward
        scope.outer = dict(zip(inner, outer, strict=True))
        return scope

    def place(self, tensor: Tensor, kept: Tensor) -> TensorLayout:
        """Returns the layout of `tensor`, partial over the axes over which `kept` stays partial."""
        return self.reduced.layout(tensor, kept)
