"""Loops: writes the pipeline of a training step as loops over ticks.

All stages run one program. A tick has a forward and a backward pass over a chunk of each stack
(`layers`). It also has the junctions between passes (`joint`), such as the loss and its gradient
for the microbatch that the last chunk has just computed.

All stages compute the junctions together, for one microbatch. So the layout may split their tensors
over the axes of the pipeline (`vocab:model+pipe`). With several rounds, only some ticks have a
junction. Then it is in a `cond`, and all devices take the same branch.

Results travel between ticks. A forward pass sends its result at its end, during the backward pass
of the same tick. A backward pass sends its result at the start of the next tick, during the forward
pass of that tick.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np

import meshdsl.ops as ops
from meshdsl.lowering.pipelining.chunks import Dims, carries_of
from meshdsl.lowering.pipelining.joint import OWN, SHARED, Joint, Phase
from meshdsl.lowering.pipelining.layers import (
    BACKWARD_STATE,
    FORWARD_STATE,
    LOSS_GRADIENTS,
    STARTS,
    Fields,
    Layers,
    State,
    line_of,
)
from meshdsl.lowering.pipelining.parts import Late, Parts, Term, Values
from meshdsl.lowering.pipelining.regions import enter, vary
from meshdsl.lowering.pipelining.ticks import Tick
from meshdsl.ops.literal import LITERAL
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.trace import bind_one, located

# The state between ticks is a tree of tensors:
#   stacks: the state of each stack (see `layers`)
#   carries: buffers of final carries of passes that later passes or junctions read
#   shared: the running sums, without the sums of gradients of layers


class Pipeline:
    """Writes a loop over microbatches as a pipeline into the present trace.

    Pipeline(Parts(stacks), joint, dims of the stacks).write(arguments of the loop)

    Attributes:
        parts: the body of the loop.
        joint: the timetable.
        dims: the dims of the first stack, for those dims that all stacks share.
        microbatch: the dim of the microbatches.
        batch: the sliced operands of the loop, by the slice in its body.
        fixed: the fixed tensors of the body in the present trace.
        stacks: the passes over each stack.
    """

    def __init__(self, parts: Parts, joint: Joint, dims: Sequence[Dims]) -> None:
        self.parts = parts
        self.joint = joint
        self.dims = dims[0]
        self.microbatch: Dimension = parts.loop.params["dim"]
        self.batch: dict[Tensor, Tensor] = {}
        self.fixed: dict[Tensor, Tensor] = {}
        rows = enumerate(zip(joint.stacks, dims, strict=True))
        self.stacks = [
            Layers(parts, number, table, dim, self.late.stacked) for number, (table, dim) in rows
        ]

    # Tensors that the parts read and return.

    @cached_property
    def late(self) -> Late:
        """The results of the loop that need tensors of all layers."""
        return Late.of(self.parts)

    @cached_property
    def results(self) -> list[Tensor]:
        """The tensors that the head returns for each microbatch."""
        own = [t for t in self.parts.results if t not in self.parts.late]
        return list(dict.fromkeys([*own, *self.late.heads]))

    @cached_property
    def layered(self) -> dict[int, Layers]:
        """The stack of each running sum that has gradients of layers, by the number of the sum."""
        return {number: stack for stack in self.stacks for number in stack.sums}

    def terms(self, junction: int) -> list[tuple[int, Term]]:
        """Returns the terms that a junction adds to running sums: (number of the sum, term)."""
        return [
            (number, term)
            for number, terms in enumerate(self.parts.terms)
            if number not in self.layered
            for term in terms
            if self.parts.junction(term.tensor) == junction
        ]

    @cached_property
    def _last_reads(self) -> dict[Tensor, dict[int, int]]:
        """The last tick that reads a final carry of a pass, by tensor and microbatch.

        The junction directly after the pass needs no buffer, so it does not count.
        """
        joint, parts = self.joint, self.parts
        last: dict[Tensor, dict[int, int]] = {}

        def read(tensors: Iterable[Tensor], junction: int, ticks: Mapping[int, int]) -> None:
            for carry in parts.carries_under(tensors):
                if parts.pass_of(carry) != junction:
                    known = last.setdefault(carry, dict(ticks))
                    last[carry] = {k: max(tick, known[k]) for k, tick in ticks.items()}

        every = range(joint.microbatches)
        for number in joint.passes:
            scan = parts.passes[number - 1]
            ticks = joint.ticks_of(number)
            final = {k: max(t for (_, m), t in ticks.items() if m == k) for k in every}
            read(scan.inputs[: scan.params["consts"]], 0, final)
            wanted = [term.tensor for _, term in self.terms(number)]
            if number < 2 * joint.count:
                wanted += carries_of(parts.passes[number])
            if number == joint.count:
                wanted += self.results
            read(wanted, number, {k: joint.end(number, k) for k in every})
        return last

    @cached_property
    def _saved(self) -> dict[Tensor, tuple[np.ndarray, int]]:
        """The buffers of each final carry that later ticks read: by microbatch; their number."""
        return {
            tensor: self.joint.buffers(self.parts.pass_of(tensor), last)
            for tensor, last in self._last_reads.items()
        }

    # Before and after the loops.

    def write(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results of the loop: sums, then tensors stacked along the microbatches."""
        parts = self.parts
        first, last = len(parts.consts), len(parts.consts) + len(parts.sums)
        self.batch = dict(zip(parts.slices, arguments[last:], strict=True))
        before = Values(parts, dict(zip(parts.consts, arguments[:first], strict=True)))
        with located(parts.stacks[-1].forward.source):
            self.fixed = {t: before.get(t) for t in parts.fixed}
            varying = self._by_loop([t for stack in self.stacks for t in stack.varying], {})
            for stack in self.stacks:
                stack.fetch(before, varying)
            state = self._start(arguments[first:last])
            rows: list[list[Tensor]] = []  # the results of heads, by phase
            for phase in self.joint.phases:
                state, results = self._loop(phase, state)
                rows += [results] if parts.head in phase.junctions else []
            stacked = [ops.concat(each, self.dims.tick) for each in zip(*rows, strict=True)]
            sums = [self._total(number, state) for number in range(len(parts.sums))]
            return [*sums, *self._by_microbatch(state, stacked)]

    def _start(self, sums: Sequence[Tensor]) -> State:
        """Returns the state before the first tick."""
        rest = [n for n in range(len(sums)) if n not in self.layered]
        saved = self._saved.items()
        return {
            "stacks": {n: stack.start(sums) for n, stack in enumerate(self.stacks)},
            "carries": {
                n: self.dims.buffers([(tensor.shape, tensor.dtype)], count)[0]
                for n, (tensor, (_, count)) in enumerate(saved)
            },
            "shared": {n: sums[n] for n in rest},
        }

    def _total(self, number: int, state: State) -> Tensor:
        """Returns the result of a running sum."""
        if (stack := self.layered.get(number)) is not None:
            with located(line_of(self.parts, number)):
                total = stack.dims.from_stages(state["stacks"][stack.number]["layers"][number])
        else:
            total = state["shared"][number]
        return total.transpose(self.parts.sums[number].shape.names)

    def _by_microbatch(self, state: State, stacked: Sequence[Tensor]) -> list[Tensor]:
        """Returns the stacked results of the loop, in the order of the microbatches."""
        joint, dim, head = self.joint, self.microbatch, self.parts.head
        start = next(phase.start for phase in joint.phases if head in phase.junctions)
        ticks = np.array([joint.end(head, k) - start for k in range(dim.size)], np.int32)
        rows = _literal(ticks, [dim])
        heads = {
            t: ops.take(x, rows, self.dims.tick) for t, x in zip(self.results, stacked, strict=True)
        }
        late = self._late(heads, state)
        return [(heads | late)[t].transpose([dim.name, *t.shape.names]) for t in self.parts.results]

    def _late(self, heads: Mapping[Tensor, Tensor], state: State) -> dict[Tensor, Tensor]:
        """Returns the results that need tensors of all layers, by a loop over microbatches."""
        given = {t: heads[t] for t in self.late.heads}
        for stack in self.stacks:
            dims, stacked = stack.dims, state["stacks"][stack.number]["stacked"]
            for tensor, x in zip(stack.late, stacked, strict=True):
                rounds = [dims.round] if dims.round.size > 1 else []
                given[tensor] = dims.from_stages(
                    ops.split(x, dims.slot, [self.microbatch, *rounds])
                )
        return self._by_loop(self.late.results, given)

    def _by_loop(
        self, wanted: Sequence[Tensor], given: Mapping[Tensor, Tensor]
    ) -> dict[Tensor, Tensor]:
        """Computes tensors of all microbatches, in a loop over these.

        Args:
            wanted: tensors of the body.
            given: known tensors, with the dim of the microbatches.
        """
        if not wanted:
            return {}

        def one(_: None, values: tuple[list[Tensor], list[Tensor]]) -> tuple[None, list[Tensor]]:
            known = dict(zip(given, values[0], strict=True))
            batch = dict(zip(self.batch, values[1], strict=True))
            values_of_one = Values(
                self.parts, known, lambda t: batch[t] if t in batch else self.fixed[t]
            )
            return None, values_of_one.every(wanted)

        xs = (list(given.values()), list(self.batch.values()))
        _, results = ops.scan(one, None, xs, self.microbatch)
        return dict(zip(wanted, results, strict=True))

    # One phase.

    def _loop(self, phase: Phase, state: State) -> tuple[State, list[Tensor]]:
        """Writes the loop of a phase; returns the state after it, and the results of its heads."""
        dims, tick = self.dims, Dimension(self.dims.tick, phase.ticks)
        own, shared = (rows[phase.start : phase.stop] for rows in self.joint.rows)
        rows = (
            enter(
                _literal(own, [tick, dims.stage, Dimension(dims.field, own.shape[-1])]), dims.stage
            ),
            _literal(shared, [tick, Dimension(dims.field, shared.shape[-1])]),
        )

        def step(changing: State, rows: tuple[Tensor, Tensor]) -> tuple[State, list[Tensor]]:
            own = self._fields(rows[0], OWN, len(self.stacks))
            shared = self._fields(rows[1], SHARED, len(self.joint.passes) + 1)
            now = _updated(state, changing)
            results = Tick(self, phase, now, own, shared).run()
            return self._changing(phase, now), results

        after, results = ops.scan(step, self._changing(phase, state), rows, tick)
        return _updated(state, after), results

    def _changing(self, phase: Phase, state: State) -> State:
        """Returns the part of the state that the ticks of a phase change.

        The loop does not carry the rest. So running sums may stay partial if it does not change
        them.
        """
        names: dict[int, list[str]] = {n: [] for n in range(len(self.stacks))}
        junctions = list(phase.junctions)
        for number in phase.passes:
            is_forward = number <= self.joint.count
            names[self.joint.stack_of(number)] += FORWARD_STATE if is_forward else BACKWARD_STATE
            junctions += [number] if number == 2 * self.joint.count else []
        for number in phase.junctions:  # the operands of the next pass
            is_forward = number < self.joint.count
            names[self.joint.stack_of(number + 1)].append(STARTS if is_forward else LOSS_GRADIENTS)
        sums = {number for junction in junctions for number, _ in self.terms(junction)}
        carries = [
            n for n, tensor in enumerate(self._saved) if self.parts.pass_of(tensor) in junctions
        ]
        return {
            "stacks": {
                n: {name: state["stacks"][n][name] for name in each} for n, each in names.items()
            },
            "carries": {n: state["carries"][n] for n in carries},
            "shared": {number: state["shared"][number] for number in sorted(sums)},
        }

    def _fields(self, row: Tensor, names: Sequence[str], count: int) -> list[Fields]:
        """Returns the columns of each stack or junction. Each column is read at most once."""
        read: dict[int, Tensor] = {}

        def field(column: int) -> Tensor:
            if column not in read:
                read[column] = ops.index(row, self.dims.field, column)
            return read[column]

        def fields(number: int) -> Fields:
            return lambda name: field(number * len(names) + names.index(name))

        return [fields(number) for number in range(count)]

    # Values that ticks read.

    def own_values(
        self, state: State, microbatch: Tensor, known: Mapping[Tensor, Tensor]
    ) -> Values:
        """Returns the values of each stage for its own microbatch, in a region."""
        return self._values(state, microbatch, known, vary)

    def common_values(
        self, state: State, microbatch: Tensor, known: Mapping[Tensor, Tensor]
    ) -> Values:
        """Returns the values that all stages compute together, for one microbatch."""
        return self._values(state, microbatch, known, lambda x: x)

    def _values(
        self,
        state: State,
        microbatch: Tensor,
        known: Mapping[Tensor, Tensor],
        enters: Callable[[Tensor], Tensor],
    ) -> Values:
        """Returns the values of a microbatch. `enters` is `vary` in a region, else the identity."""

        def given(tensor: Tensor) -> Tensor:
            if tensor in self.fixed:
                return enters(self.fixed[tensor])
            return ops.take(enters(self.batch[tensor]), microbatch, self.microbatch)

        def saved(tensor: Tensor) -> Tensor:
            buffer = state["carries"][list(self._saved).index(tensor)]
            return self.dims.get(enters(buffer), self.slot(tensor, microbatch))

        return Values(self.parts, known, given, saved)

    def saved_after(self, number: int) -> dict[int, Tensor]:
        """Returns the final carries of a pass that later ticks read, by their number among all."""
        rows = enumerate(self._saved)
        return {n: tensor for n, tensor in rows if self.parts.pass_of(tensor) == number}

    def slot(self, tensor: Tensor, microbatch: Tensor) -> Tensor:
        """Returns the number of the buffer of a final carry for a microbatch."""
        slots, _ = self._saved[tensor]
        return ops.take(_literal(slots, [self.microbatch]), microbatch, self.microbatch)


def _updated(state: State, changed: State) -> State:
    """Returns a copy of a state with the changed tensors."""
    stacks = state["stacks"].items()
    return {
        "stacks": {n: {**stack, **changed["stacks"][n]} for n, stack in stacks},
        "carries": {**state["carries"], **changed["carries"]},
        "shared": {**state["shared"], **changed["shared"]},
    }


def _literal(data: np.ndarray, dims: Sequence[Dimension]) -> Tensor:
    return bind_one(LITERAL, (), {"data": data, "shape": Shape(dims)})
