"""Parts: the part of a pipeline to which each operation of a microbatch belongs.

The body of the loop over microbatches has a forward and a backward pass over each stack of layers.
Other operations compute the inputs of the layers, the loss and its gradient, and the gradients of
operations before the layers. The *level* of a tensor is the last of these parts that it depends
on. `joint` defines passes and junctions.

The loop adds gradients to running sums. `terms` has the terms of each sum, because the head and the
layers add to a sum in different ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshdsl.lowering.graphs.from_nothing import from_nothing
from meshdsl.lowering.pipelining.finding import NoPipelineError, Stack
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation
from meshdsl.tracing.trace import bind, located

# Levels. A tensor of one level may also depend on tensors of all lower levels.
FIXED = 0  # depends on no microbatch
BATCH = 1  # depends on the data of its microbatch; BATCH + j: depends on results of pass j


@dataclass(frozen=True)
class Term:
    """A term of a running sum: a tensor, and the linear operations that follow it, in order."""

    tensor: Tensor
    after: tuple[Operation, ...] = ()


class Parts:
    """The body of a loop over microbatches, divided into parts.

    Attributes:
        stacks: the stacks of layers, in the order of the model.
        passes: the operations of the passes; pass j has the index j - 1.
        levels: the level of each tensor.
        late: the tensors that depend on tensors that the forward pass stacks over all layers.
        constants: the tensors that depend on no input.
        makers: the operation that makes each tensor.
        consts: the inputs that are the same for all microbatches.
        sums: the inputs that are running sums.
        slices: the inputs that are the data of one microbatch.
        terms: the terms that a microbatch adds to each running sum.
        results: the tensors that the loop stacks along the dim of the microbatches.
    """

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Divides the body of the loop of some stacks.

        Raises:
            NoPipelineError: a microbatch reads results of the one before it, other than sums; or
                the backward passes are not in the reverse order of the forward passes.
        """
        self.stacks = tuple(stacks)
        params = stacks[0].loop.params
        body: Graph = params["body"]
        first, last = params["consts"], params["consts"] + params["carries"]
        self.body = body
        self.rule, self.loop = stacks[0].rule, stacks[0].loop
        self.passes = self._passes()
        self.consts = body.inputs[:first]
        self.sums = body.inputs[first:last]
        self.slices = body.inputs[last:]
        self.results = body.outputs[params["carries"] :]
        self.makers = {t: op for op in body.operations for t in op.outputs}
        self.constants: set[Tensor] = set()
        for op in body.operations:
            if not op.bodies and from_nothing(op, self.constants):
                self.constants.update(op.outputs)
        self._pass_of_carry = {
            tensor: number
            for number, op in enumerate(self.passes, start=1)
            for tensor in op.outputs[: op.params["carries"]]
        }
        self.late: set[Tensor] = set()
        self.levels = self._levels()
        self._of_layers = {
            t: number
            for number, stack in enumerate(stacks)
            for t in stack.backward.outputs[stack.backward.params["carries"] :]
        }
        self._on_sums = self._depending_on_sums()
        sums = zip(self.sums, body.outputs, strict=False)
        self.terms = [self._terms_added(before, after) for before, after in sums]

    @property
    def head(self) -> int:
        """The number of the junction between the forward and the backward passes."""
        return len(self.stacks)

    def _passes(self) -> tuple[Operation, ...]:
        forward = [stack.forward for stack in self.stacks]
        backward = [stack.backward for stack in reversed(self.stacks)]
        passes = (*forward, *backward)
        positions = {op: position for position, op in enumerate(self.body.operations)}
        if [positions[op] for op in passes] != sorted(positions[op] for op in passes):
            raise NoPipelineError(
                f"`{self.rule}` makes no pipeline of the loop at {self.loop.source}: the backward "
                "passes over its stacks of layers do not have the reverse order of the forward ones"
            )
        return passes

    def _levels(self) -> dict[Tensor, int]:
        levels = dict.fromkeys((*self.consts, *self.sums), FIXED)
        levels.update(dict.fromkeys(self.slices, BATCH))
        for op in self.body.operations:
            level = max((levels[t] for t in op.inputs), default=FIXED)
            if op in self.passes:
                number = self.passes.index(op) + 1
                level = BATCH + number
                if number <= self.head:
                    self.late.update(op.outputs[op.params["carries"] :])
            elif not self.late.isdisjoint(op.inputs):
                self.late.update(op.outputs)
            levels.update(dict.fromkeys(op.outputs, level))
        return levels

    def junction(self, tensor: Tensor) -> int:
        """Returns the junction that computes a tensor for the sums or results of the loop."""
        return max(self.levels[tensor] - BATCH, self.head)

    def pass_of(self, tensor: Tensor) -> int:
        """Returns the number of the pass with a tensor as a final carry; 0 if there is none."""
        return self._pass_of_carry.get(tensor, 0)

    def carries_under(self, tensors: Iterable[Tensor]) -> dict[Tensor, None]:
        """Returns the final carries of passes that some tensors are computed from."""
        return dict.fromkeys(t for t in self.under(tensors, lambda _: False) if self.pass_of(t))

    def under(self, tensors: Iterable[Tensor], ends: Callable[[Tensor], bool]) -> Iterator[Tensor]:
        """Yields some tensors and those that they are computed from, each once.

        It does not go on from results of passes, and from tensors for which `ends` is true.
        """
        seen: set[Tensor] = set()
        front = list(tensors)
        while front:
            tensor = front.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            yield tensor
            op = self.makers.get(tensor)
            if op is not None and op not in self.passes and not ends(tensor):
                front += op.inputs

    def _depending_on_sums(self) -> set[Tensor]:
        depending = set(self.sums)
        for op in self.body.operations:
            if not depending.isdisjoint(op.inputs):
                depending.update(op.outputs)
        return depending

    def _terms_added(self, before: Tensor, after: Tensor) -> list[Term]:
        """Returns the terms that a microbatch adds to a running sum.

        Raises:
            NoPipelineError: the result is not the sum and other terms.
        """
        terms = self._terms_of(after)
        rest = [term for term in terms if term.tensor is not before or term.after]
        if len(rest) != len(terms) - 1 or any(t.tensor in self._on_sums for t in rest):
            raise NoPipelineError(
                f"`{self.rule}` makes no pipeline of the loop at {self.loop.source}: {after} "
                f"({after.source}) depends on the microbatch before. In a pipeline, a microbatch "
                "can only add to sums"
            )
        return rest

    def _terms_of(self, tensor: Tensor) -> list[Term]:
        """Returns the terms whose sum is a tensor. Linear operations apply to each term."""
        op = self.makers.get(tensor)
        if op is None or op in self.passes:
            return [Term(tensor)]
        if op.name == "add":
            terms = [term for t in op.inputs for term in self._terms_of(t)]
        elif (operand := self._linear_operand(op)) is not None:
            terms = [Term(t.tensor, (*t.after, op)) for t in self._terms_of(operand)]
        else:
            return [Term(tensor)]
        return terms if self._must_separate(tensor, terms) else [Term(tensor)]

    def _must_separate(self, tensor: Tensor, terms: Sequence[Term]) -> bool:
        """Whether different ticks compute the terms, or layers and others add them."""
        junctions = {self.junction(term.tensor) for term in terms}
        stacked = any(self.of_stack(term.tensor) is not None for term in terms)
        return tensor in self._on_sums or stacked or len(junctions) > 1

    def of_stack(self, tensor: Tensor) -> int | None:
        """Returns the number of the stack whose backward pass stacks a tensor, else None."""
        return self._of_layers.get(tensor)

    def _linear_operand(self, op: Operation) -> Tensor | None:
        """Returns the only varying operand of an elementwise operation, if it is linear in it."""
        if op.primitive.form is not Form.ELEMENTWISE or len(op.outputs) != 1:
            return None
        rest = [t for t in op.inputs if self.levels[t] != FIXED]
        linear = [op.inputs[i] for i in op.linear]
        return rest[0] if len(rest) == 1 and rest[0] in linear else None

    @cached_property
    def fixed(self) -> dict[Tensor, None]:
        """The fixed tensors that passes and varying operations read.

        Constants are not included, because each reader computes them.
        """

        def is_fixed(tensor: Tensor) -> bool:
            return self.levels[tensor] == FIXED and tensor not in self.constants

        operations = self.body.operations
        readers = [op for op in operations if op in self.passes or not is_fixed(op.outputs[0])]
        read = [t for op in readers for t in op.inputs] + list(self.body.outputs)
        # The sums also have the level FIXED, but microbatches change them. `_on_sums` has them.
        return dict.fromkeys(t for t in read if is_fixed(t) and t not in self._on_sums)


class Values:
    """The tensors of a microbatch in the present trace. A tensor is computed when it is needed.

    Attributes:
        known: the tensor of the present trace for each known tensor of the body.
    """

    def __init__(
        self,
        parts: Parts,
        known: Mapping[Tensor, Tensor],
        given: Callable[[Tensor], Tensor] | None = None,
        saved: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Starts with the known tensors.

        Args:
            parts: the body of the loop over microbatches.
            known: the tensor of the present trace for some tensors of the body.
            given: returns the tensor of the present trace for a fixed tensor, or for data of the
                microbatch. By default, fixed tensors are computed.
            saved: returns the tensor of the present trace for a final carry of an earlier pass.
        """
        self.parts = parts
        self.known = dict(known)
        self._given = given
        self._saved = saved

    def get(self, tensor: Tensor) -> Tensor:
        """Returns the tensor of the present trace for a tensor of the body.

        Raises:
            NoPipelineError: the tensor is an unknown result of a pass over the layers.
        """
        if tensor not in self.known:
            op = self.parts.makers.get(tensor)
            if self._given is not None and (op is None or tensor in self.parts.fixed):
                self.known[tensor] = self._given(tensor)
                return self.known[tensor]
            assert op is not None, tensor
            if self._saved is not None and self.parts.pass_of(tensor):
                self.known[tensor] = self._saved(tensor)
            elif op in self.parts.passes:
                raise self._too_late(tensor, op)
            else:
                arguments = self.every(op.inputs)
                with located(op.source):
                    outputs = bind(op.primitive, arguments, op.params).outputs
                self.known.update(zip(op.outputs, outputs, strict=True))
        return self.known[tensor]

    def every(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return [self.get(t) for t in tensors]

    def _too_late(self, tensor: Tensor, op: Operation) -> NoPipelineError:
        """Returns the error for a tensor that operations of other ticks need."""
        readers = [o for o in self.parts.body.operations if tensor in o.inputs]
        lines = ", ".join(dict.fromkeys(str(o.source) for o in readers))
        return NoPipelineError(
            f"`{self.parts.rule}` makes no pipeline of the loop at {op.source}: {lines} needs "
            f"{tensor} of all its layers together with later results of the same microbatch, and "
            "no stage has both"
        )


@dataclass(frozen=True)
class Late:
    """The results of the loop that need tensors of all layers, such as the losses of routers.

    The pipeline computes them after its ticks.

    Attributes:
        results: the results of the loop over microbatches that are late.
        stacked: the tensors that they need and the layers stack.
        heads: the tensors that they need and the head computes.
    """

    results: tuple[Tensor, ...]
    stacked: tuple[Tensor, ...]
    heads: tuple[Tensor, ...]

    @staticmethod
    def of(parts: Parts) -> Late:
        """Returns the late results of a loop.

        Raises:
            NoPipelineError: a result needs a gradient.
        """
        levels = parts.levels
        for tensor in parts.results:
            if levels[tensor] > BATCH + parts.head:
                raise NoPipelineError(
                    f"`{parts.rule}` makes a pipeline, and a pipeline cannot return {tensor} "
                    f"({tensor.source}) of each microbatch, because it depends on gradients"
                )
        results = [t for t in parts.results if t in parts.late]
        under = list(parts.under(results, lambda t: t not in parts.late))
        stacked = [t for t in under if t in parts.late and parts.makers[t] in parts.passes]
        heads = [t for t in under if t not in parts.late and levels[t] > BATCH]
        return Late(tuple(dict.fromkeys(results)), tuple(stacked), tuple(heads))
