"""Parts: which operations of a microbatch belong to which part of a pipeline.

The body of the loop over microbatches has a forward and a backward pass over the layers. Other
operations compute what the layers read, the loss and its gradient, and the gradients of what comes
before the layers. The *level* of a tensor says which of these it depends on. There may be several
stacks of layers; see `joint` for what passes and junctions are.

The sums of the gradients over the microbatches are taken apart (`terms`): what the head adds is
added in other ticks than what the layers add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from meshdsl.lowering.graphs.from_nothing import from_nothing
from meshdsl.lowering.pipelining.finding import NoPipelineError, Stack
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Form, Graph, Operation
from meshdsl.tracing.trace import bind, located

# Levels; what a tensor depends on includes all that is lower.
FIXED = 0  # the same for all microbatches
BATCH = 1  # the data of its microbatch; BATCH + j: what pass j leaves


@dataclass(frozen=True)
class Term:
    """A summand of a gradient: a tensor, and linear operations that are then done one by one."""

    tensor: Tensor
    after: tuple[Operation, ...] = ()


class Parts:
    """The body of a loop over microbatches, taken apart.

    Attributes:
        stacks: the stacks of layers, in the order of the model.
        passes: the operations of the passes; pass j is number j - 1.
        levels: by tensor.
        late: the tensors that need what all layers of a stack have stacked.
        constants: the tensors that depend on nothing at all.
        makers: the operation that makes each tensor.
        consts, sums, slices: the inputs: what is fixed, the running sums, parts of the batch.
        terms: for each running sum, what a microbatch adds to it.
        results: what the loop stacks along the dim of the microbatches.
    """

    def __init__(self, stacks: Sequence[Stack]) -> None:
        """Takes the body apart.

        Raises:
            NoPipelineError: microbatches do more than add up results; or a stack starts where
                another one is on its way back.
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
        self._ends = {
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
        self.terms = [self._added(start, end) for start, end in sums]

    @property
    def head(self) -> int:
        """The number of the junction between forward and backward passes."""
        return len(self.stacks)

    def _passes(self) -> tuple[Operation, ...]:
        forth = [stack.forward for stack in self.stacks]
        back = [stack.backward for stack in reversed(self.stacks)]
        place = {op: number for number, op in enumerate(self.body.operations)}
        passes = (*forth, *back)
        if [place[op] for op in passes] != sorted(place[op] for op in passes):
            raise NoPipelineError(
                f"`{self.rule}` makes a pipeline of stacks that follow each other, forth and back "
                f"in reverse; those of the loop at {self.loop.source} do not"
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
        """Returns after which pass a tensor is computed that sums or results need."""
        return max(self.levels[tensor] - BATCH, self.head)

    def is_end(self, tensor: Tensor) -> int:
        """Returns the number of the pass that leaves a tensor for what follows it; 0 if none."""
        return self._ends.get(tensor, 0)

    def ends_under(self, tensors: Iterable[Tensor]) -> dict[Tensor, None]:
        """Returns what passes leave that some tensors are computed of."""
        ends: dict[Tensor, None] = {}
        seen: set[Tensor] = set()
        front = list(tensors)
        while front:
            tensor = front.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if self.is_end(tensor):
                ends[tensor] = None
            elif (op := self.makers.get(tensor)) is not None and op not in self.passes:
                front += op.inputs
        return ends

    def _depending_on_sums(self) -> set[Tensor]:
        depending = set(self.sums)
        for op in self.body.operations:
            if not depending.isdisjoint(op.inputs):
                depending.update(op.outputs)
        return depending

    def _added(self, start: Tensor, end: Tensor) -> list[Term]:
        """Returns what is added to a running sum.

        Raises:
            NoPipelineError: the sum is not only added to.
        """
        terms = self._apart(end)
        rest = [term for term in terms if term.tensor is not start or term.after]
        if len(rest) != len(terms) - 1 or any(t.tensor in self._on_sums for t in rest):
            raise NoPipelineError(
                f"`{self.rule}` makes a pipeline, in which the microbatches of the loop at "
                f"{self.loop.source} only add up results; {end} ({end.source}) depends "
                "otherwise on the microbatch before"
            )
        return rest

    def _apart(self, tensor: Tensor) -> list[Term]:
        """Returns the summands of a tensor; linear operations are done on each by itself."""
        op = self.makers.get(tensor)
        if op is None or op in self.passes:
            return [Term(tensor)]
        if op.name == "add":
            terms = [term for t in op.inputs for term in self._apart(t)]
        elif (operand := self._passed_by(op)) is not None:
            terms = [Term(t.tensor, (*t.after, op)) for t in self._apart(operand)]
        else:
            return [Term(tensor)]
        return terms if self._must_stay_apart(tensor, terms) else [Term(tensor)]

    def _must_stay_apart(self, tensor: Tensor, terms: Sequence[Term]) -> bool:
        """Whether summands are known in different ticks, or are added in different ways."""
        ticks = {self.junction(term.tensor) for term in terms}
        stacked = any(self.of_stack(term.tensor) is not None for term in terms)
        return tensor in self._on_sums or stacked or len(ticks) > 1

    def of_stack(self, tensor: Tensor) -> int | None:
        """Returns the number of the stack whose backward pass has stacked a tensor, if any."""
        return self._of_layers.get(tensor)

    def _passed_by(self, op: Operation) -> Tensor | None:
        """Returns the operand of an elementwise operation that is linear in it alone, if any."""
        if op.primitive.form is not Form.ELEMENTWISE or len(op.outputs) != 1:
            return None
        rest = [t for t in op.inputs if self.levels[t] != FIXED]
        linear = [op.inputs[i] for i in op.linear]
        return rest[0] if len(rest) == 1 and rest[0] in linear else None

    @cached_property
    def fixed(self) -> dict[Tensor, None]:
        """The tensors that are the same for all microbatches, and that others read.

        Those that depend on nothing are not among them: each reader makes them.
        """

        def is_fixed(tensor: Tensor) -> bool:
            return self.levels[tensor] == FIXED and tensor not in self.constants

        operations = self.body.operations
        readers = [op for op in operations if op in self.passes or not is_fixed(op.outputs[0])]
        read = [t for op in readers for t in op.inputs] + list(self.body.outputs)
        ends = set(self.sums) | self._on_sums
        return dict.fromkeys(t for t in read if is_fixed(t) and t not in ends)


class Values:
    """The tensors of a microbatch, computed again where they are needed, once each.

    Attributes:
        known: tensors of the body, and what stands for them in the present trace.
    """

    def __init__(
        self,
        parts: Parts,
        known: Mapping[Tensor, Tensor],
        given: Callable[[Tensor], Tensor] | None = None,
        saved: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Starts with what is known.

        Args:
            given: returns what stands for a fixed tensor, or for a part of the batch; by default
                fixed tensors are computed.
            saved: returns what an earlier pass has left.
        """
        self.parts = parts
        self.known = dict(known)
        self._given = given
        self._saved = saved

    def get(self, tensor: Tensor) -> Tensor:
        """Returns what stands for a tensor of the body.

        Raises:
            NoPipelineError: it is a result of a pass over the layers, and not known.
        """
        if tensor not in self.known:
            op = self.parts.makers.get(tensor)
            if self._given is not None and (op is None or tensor in self.parts.fixed):
                self.known[tensor] = self._given(tensor)
                return self.known[tensor]
            assert op is not None, tensor
            if self._saved is not None and self.parts.is_end(tensor):
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
        """Returns the error of a tensor that is needed in other ticks than it is computed in."""
        readers = [o for o in self.parts.body.operations if tensor in o.inputs]
        lines = ", ".join(dict.fromkeys(str(o.source) for o in readers))
        return NoPipelineError(
            f"`{self.parts.rule}` makes a pipeline of the loop at {op.source}; {lines} "
            f"needs {tensor} of all its layers at once, together with later results of the same "
            "microbatch, which no stage has"
        )


@dataclass(frozen=True)
class Late:
    """Results of a microbatch that need what all its layers have stacked, as losses of routers.

    Attributes:
        results: among the results of the loop over microbatches.
        stacked: what they need of the layers.
        heads: what they need of what the head computes.
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
                    f"`{parts.rule}` makes a pipeline, which cannot return {tensor} "
                    f"({tensor.source}) of each microbatch: it depends on gradients"
                )
        results = [t for t in parts.results if t in parts.late]
        stacked: dict[Tensor, None] = {}
        heads: dict[Tensor, None] = {}
        seen: set[Tensor] = set()
        front = list(results)
        while front:
            tensor = front.pop()
            if tensor in seen:
                continue
            seen.add(tensor)
            if tensor in parts.late:
                if parts.makers[tensor] in parts.passes:
                    stacked[tensor] = None
                else:
                    front += parts.makers[tensor].inputs
            elif levels[tensor] > BATCH:
                heads[tensor] = None
        return Late(tuple(dict.fromkeys(results)), tuple(stacked), tuple(heads))
