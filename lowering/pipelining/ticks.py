"""Ticks: writes the body of a loop over ticks; see `loops`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import meshdsl.ops as ops
from meshdsl.lowering.pipelining.chunks import carries_of
from meshdsl.lowering.pipelining.joint import NONE, Phase
from meshdsl.lowering.pipelining.layers import (
    LOSS_GRADIENTS,
    STARTS,
    Fields,
    Layers,
    State,
    line_of,
    value_of,
)
from meshdsl.lowering.pipelining.parts import Term, Values
from meshdsl.lowering.pipelining.regions import of_stage
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import located

if TYPE_CHECKING:
    from meshdsl.lowering.pipelining.loops import Pipeline


@dataclass(frozen=True)
class Tick:
    """Writes one tick of a phase.

    Attributes:
        pipeline: the pipeline.
        phase: the phase.
        state: the state after the tick before. `run` updates it.
        own: the columns of each stack.
        shared: the columns of each junction.
    """

    pipeline: Pipeline
    phase: Phase
    state: State
    own: Sequence[Fields]
    shared: Sequence[Fields]

    def run(self) -> list[Tensor]:
        """Writes the tick; returns the results of the head."""
        pipeline, joint = self.pipeline, self.pipeline.joint
        results: list[Tensor] = []
        starts: dict[int, list[Tensor]] = {}  # operands of passes, from this tick

        def values(microbatch: Tensor, known: Mapping[Tensor, Tensor]) -> Values:
            return pipeline.own_values(self.state, microbatch, known)

        for number in self.phase.passes:
            if number > joint.count:
                stack, state = self._stack(number)
                with located(stack.stack.backward.source):
                    state["gradients"] = stack.sent(state["gradients"], -1)
        for number in self.phase.passes:
            stack, state = self._stack(number)
            fields = self.own[stack.number]
            if number <= joint.count:
                operands = self._first() if number == 1 else self._start(number, starts)
                carries = stack.forward(state, operands, fields, values)
                if number in self.phase.junctions:
                    starts[number + 1], made = self._junction(number, carries)
                    results += made
                state["inputs"] = stack.sent(carries, 1)
                continue
            with located(stack.stack.backward.source):
                stack.backward(state, self._start(number, starts), fields, values)
                if number in self.phase.junctions or number == 2 * joint.count:
                    starts[number + 1], _ = self._junction(number, list(state["gradients"]))
        return results

    def _stack(self, number: int) -> tuple[Layers, State]:
        stack = self.pipeline.stacks[self.pipeline.joint.stack_of(number)]
        return stack, self.state["stacks"][stack.number]

    def _first(self) -> list[Tensor]:
        """Returns the inputs of the first chunk of the model: the results of junction 0."""
        due, microbatch = (self.shared[0](name) for name in ("due", "microbatch"))
        wanted = carries_of(self.pipeline.parts.passes[0])
        return self._where_due(
            due,
            lambda: self.pipeline.common_values(self.state, microbatch, {}).every(wanted),
            wanted,
        )

    def _start(self, number: int, starts: Mapping[int, list[Tensor]]) -> Sequence[Tensor]:
        """Returns the operands of a pass, which the junction before it computes.

        The result is empty if no microbatch starts this pass in the phase.
        """
        stack, state = self._stack(number)
        at_once = starts.get(number, [])
        buffers = state[STARTS if number <= self.pipeline.joint.count else LOSS_GRADIENTS]
        if not buffers:
            return at_once
        slot = self.shared[number - 1]("load")
        waited = [stack.dims.get(buffer, slot) for buffer in buffers]
        if not at_once:
            return waited
        return [ops.where(slot >= 0, a, b) for a, b in zip(waited, at_once, strict=True)]

    def _junction(
        self, number: int, carries: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Computes the junction after a pass, for the microbatch that has just finished the pass.

        Args:
            number: the number of the pass and of the junction.
            carries: the final carries of the pass, in the region.

        Returns:
            The operands of the next pass, and the results of the head.
        """
        pipeline, parts, joint = self.pipeline, self.pipeline.parts, self.pipeline.joint
        scan, shared, terms = parts.passes[number - 1], self.shared[number], pipeline.terms(number)
        due, microbatch = shared("due"), shared("microbatch")
        last = number == 2 * joint.count
        wanted = [] if last else list(carries_of(parts.passes[number]))
        results = pipeline.results if number == parts.head else []
        saved = pipeline.saved_after(number)
        if not (wanted or terms or results or saved):
            return [], []
        stage = pipeline.dims.stage
        table = joint.stacks[joint.stack_of(number)]
        at = table.placement[-1 if number <= joint.count else 0]

        def compute() -> list[Tensor]:
            pairs = zip(scan.outputs, carries, strict=False)
            known = {t: of_stage(x, stage, at) for t, x in pairs}
            values = pipeline.common_values(self.state, microbatch, known)
            added = [value_of(term, parts, values) for _, term in terms]
            return [
                *values.every(wanted),
                *added,
                *values.every(results),
                *values.every(saved.values()),
            ]

        like = [*wanted, *(_tensor_of(term) for _, term in terms), *results, *saved.values()]
        computed = iter(self._where_due(due, compute, like))
        starts = list(islice(computed, len(wanted)))
        self._add(terms, list(islice(computed, len(terms))), due)
        made = list(islice(computed, len(results)))
        for index, tensor in saved.items():
            slot = ops.where(due == 1, pipeline.slot(tensor, microbatch), NONE)
            buffer = self.state["carries"][index]
            self.state["carries"][index] = pipeline.dims.put(buffer, next(computed), slot)
        if not last:
            stack, state = self._stack(number + 1)
            name = STARTS if number < joint.count else LOSS_GRADIENTS
            state[name] = [
                stack.dims.put(buffer, x, shared("store"))
                for buffer, x in zip(state[name], starts, strict=False)
            ]
        return starts, made

    def _where_due(
        self, due: Tensor, compute: Callable[[], list[Tensor]], like: Iterable[Tensor]
    ) -> list[Tensor]:
        """Returns computed tensors in ticks with this work, and zeros or other data in others.

        With one round, nearly all ticks have the work, so there is no `cond`.

        Args:
            due: 1 if the tick has the work: s32[].
            compute: computes the tensors.
            like: tensors with the shapes and dtypes of the results.
        """
        if self.pipeline.dims.round.size == 1:
            return compute()

        def idle() -> list[Tensor]:
            return [ops.zeros(t.shape, t.dtype) for t in like]

        computed: list[Tensor] = ops.cond(due == 1, compute, idle)
        return computed

    def _add(
        self, terms: Sequence[tuple[int, Term]], values: Sequence[Tensor], due: Tensor
    ) -> None:
        """Adds the values of terms to their sums, in ticks with this work."""
        sums = self.state["shared"]
        for (number, _), value in zip(terms, values, strict=True):
            with located(line_of(self.pipeline.parts, number)):
                sums[number] = sums[number] + ops.where(due == 1, value, 0)


def _tensor_of(term: Term) -> Tensor:
    """Returns the tensor of the body that has the value of a term."""
    return term.after[-1].outputs[0] if term.after else term.tensor
