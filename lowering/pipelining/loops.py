"""Loops: a step's pipeline, written as loops over ticks.

All stages run one program. A tick has four parts: the forward pass of a chunk of layers; loss and
gradient of the microbatch that the last chunk has just done (the *head*); the backward pass of a
chunk; and the gradients of what comes before the layers (the *tail*). What a stage works on, it
reads off its rows of the timetable. A pass without work computes on anything, and its results are
not used.

Chunks run in a region (`regions`): each stage has its own layers, microbatch and activations. What
comes before and after the layers is computed by all stages alike, for one microbatch, so that its
layout may use the axes of the pipeline too (`vocab:model+pipe`). Where only some ticks have such
work, it is in a `cond`, which all devices take alike.

Results travel to the next stage from one tick to the next. A forward pass sends at the end of its
part, beside the backward pass of the same tick; a backward pass at the begin of the next tick,
beside the forward pass there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

import meshdsl.ops as ops
from meshdsl.lowering.pipelining.chunks import Dims, carries_of, unless_filling
from meshdsl.lowering.pipelining.finding import slices_of
from meshdsl.lowering.pipelining.parts import Late, Level, Parts, Term, Values
from meshdsl.lowering.pipelining.regions import enter, of_stage, send, vary
from meshdsl.lowering.pipelining.timetable import OWN, SHARED, Phase, Timetable
from meshdsl.ops.control.scan import SCAN
from meshdsl.ops.literal import LITERAL
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Operation
from meshdsl.tracing.source import Source
from meshdsl.tracing.trace import bind, bind_one, located

# What ticks pass on, a tree of tensors:
#   inputs, gradients: what the neighbours have sent, or (gradients) what is to be sent to them
#   waiting_inputs, ...: buffers of those that are not used in the tick in which they arrive
#   kept: buffers of activations
#   stacked: buffers of what chunks stack beside those, of all microbatches
#   layers: sums of the gradients of a stage's own layers, by the number of the sum
#   shared: all other sums
State: TypeAlias = dict[str, Any]
_Fields = Callable[[str], Tensor]  # the name of a column of a timetable -> its number: s32[]


class Pipeline:
    """Writes a loop over microbatches as a pipeline, into the present trace.

    Pipeline(Parts(stack), timetable, dims).write(arguments of the loop)
    """

    def __init__(self, parts: Parts, timetable: Timetable, dims: Dims) -> None:
        self.parts = parts
        self.timetable = timetable
        self.dims = dims
        self.stack = parts.stack
        self.microbatch: Dimension = parts.stack.loop.params["dim"]
        self.batch: dict[Tensor, Tensor] = {}  # what the loop slices, by its slice
        self.fixed: dict[Tensor, Tensor] = {}
        self.stacks: dict[Tensor, Tensor] = {}  # each stage's own layers
        self.real: Tensor | None = None

    # What the parts read and return.

    @cached_property
    def kept(self) -> list[Tensor]:
        """What the forward pass stacks and the backward pass reads."""
        stacked = set(self.stack.forward.outputs[self.stack.forward.params["carries"] :])
        return [t for t in dict.fromkeys(slices_of(self.stack.backward)) if t in stacked]

    @cached_property
    def late(self) -> Late:
        """What the loop returns of each microbatch that needs all its layers."""
        return Late.of(self.parts)

    @cached_property
    def results(self) -> list[Tensor]:
        """What heads return, for each microbatch."""
        own = [t for t in self.parts.results if self.parts.levels[t] <= Level.HEAD]
        return list(dict.fromkeys([*own, *self.late.heads]))

    @cached_property
    def layered(self) -> list[int]:
        """The numbers of the sums of what the backward pass stacks: the layers' gradients."""
        numbers = []
        for number, terms in enumerate(self.parts.terms):
            kinds = {self.parts.is_of_layers(term.tensor) for term in terms}
            if len(kinds) > 1:
                line = self.parts.body.outputs[number].source
                raise ValueError(
                    f"`{self.stack.rule}` makes a pipeline of the loop at "
                    f"{self.stack.forward.source}; {line} adds gradients of its layers to other "
                    "ones of the same parameter, which no stage has"
                )
            if kinds == {True}:
                numbers.append(number)
        return numbers

    def _terms(self, tail: bool) -> list[tuple[int, Term]]:
        """Returns the summands of sums that are no stacks of layers, with the sums' numbers."""
        levels = self.parts.levels
        return [
            (number, term)
            for number, terms in enumerate(self.parts.terms)
            if number not in self.layered
            for term in terms
            if (levels[term.tensor] is Level.TAIL) == tail
        ]

    # Before and after the loops.

    def write(self, arguments: Sequence[Tensor]) -> list[Tensor]:
        """Returns the results of the loop: sums, then what it stacks along the microbatches."""
        parts = self.parts
        first, last = len(parts.consts), len(parts.consts) + len(parts.sums)
        self.batch = dict(zip(parts.slices, arguments[last:], strict=True))
        before = Values(parts, dict(zip(parts.consts, arguments[:first], strict=True)))
        with located(self.stack.forward.source):
            self.fixed = {t: before.get(t) for t in parts.fixed}
            for scan in (self.stack.forward, self.stack.backward):
                for tensor in slices_of(scan):
                    if parts.levels[tensor] is Level.FIXED and tensor not in self.stacks:
                        self.stacks[tensor] = self.dims.apart(before.get(tensor))
            self.real = self.dims.real() if self.dims.fills else None
            state = self._start(arguments[first:last])
            rows: list[list[Tensor]] = []  # what heads return, by phase
            for phase in self.timetable.phases:
                state, results = self._loop(phase, state)
                rows += [results] if phase.head else []
            stacked = [ops.concat(each, self.dims.tick) for each in zip(*rows, strict=True)]
            sums = [self._total(number, state) for number in range(len(parts.sums))]
            return [*sums, *self._by_microbatch(state, stacked)]

    def _start(self, sums: Sequence[Tensor]) -> State:
        """Returns what the first tick gets."""
        table, dims = self.timetable, self.dims
        inputs = [(t.shape, t.dtype) for t in carries_of(self.stack.forward)]
        gradients = [(t.shape, t.dtype) for t in carries_of(self.stack.backward)]
        kept = [(dims.chunk_shape(t.shape), t.dtype) for t in self.kept]
        stacked = [(dims.chunk_shape(t.shape), t.dtype) for t in self.late.stacked]
        rest = [n for n in range(len(sums)) if n not in self.layered]
        return {
            "inputs": [ops.zeros(*t) for t in inputs],
            "gradients": [ops.zeros(*t) for t in gradients],
            "waiting_inputs": dims.buffers(inputs, table.waiting_inputs[1]),
            "waiting_gradients": dims.buffers(gradients, table.waiting_gradients[1]),
            "waiting_loss_gradients": dims.buffers(gradients, table.waiting_loss_gradients[1]),
            "kept": dims.buffers(kept, table.kept[1]),
            "stacked": dims.buffers(stacked, table.rounds * table.microbatches),
            "layers": {n: dims.apart(sums[n]) for n in self.layered},
            "shared": {n: sums[n] for n in rest},
        }

    def _total(self, number: int, state: State) -> Tensor:
        """Returns the result of a running sum."""
        if number in self.layered:
            with located(self._line(number)):
                total = self.dims.together(state["layers"][number])
        else:
            total = state["shared"][number]
        return total.transpose(self.parts.sums[number].shape.names)

    def _by_microbatch(self, state: State, stacked: Sequence[Tensor]) -> list[Tensor]:
        """Returns what the loop stacks, in the order of the microbatches."""
        table, dim = self.timetable, self.microbatch
        start = next(phase.start for phase in table.phases if phase.head)
        ticks = np.array([table.head_tick(k) - start for k in range(dim.size)], np.int32)
        rows = _literal(ticks, [dim])
        heads = {
            t: ops.take(x, rows, self.dims.tick) for t, x in zip(self.results, stacked, strict=True)
        }
        late = self._late(heads, state["stacked"]) if self.late.results else {}
        return [(heads | late)[t].transpose([dim.name, *t.shape.names]) for t in self.parts.results]

    def _late(
        self, heads: Mapping[Tensor, Tensor], stacked: Sequence[Tensor]
    ) -> dict[Tensor, Tensor]:
        """Returns the results that need all layers of a microbatch: one microbatch at a time."""
        dims, dim = self.dims, self.microbatch
        layers = []
        for x in stacked:
            rounds = [dims.round] if dims.round.size > 1 else []
            slot = Dimension(dims.slot, dim.size * dims.round.size)
            layers.append(dims.together(ops.split(x, slot.name, [dim, *rounds])))
        given = {t: heads[t] for t in self.late.heads} | dict(
            zip(self.late.stacked, layers, strict=True)
        )

        def one(_: None, values: tuple[list[Tensor], list[Tensor]]) -> tuple[None, list[Tensor]]:
            known = dict(zip(given, values[0], strict=True))
            batch = dict(zip(self.batch, values[1], strict=True))
            every = Values(self.parts, known, lambda t: batch[t] if t in batch else self.fixed[t])
            return None, every.every(self.late.results)

        xs = (list(given.values()), list(self.batch.values()))
        _, results = ops.scan(one, None, xs, dim)
        return dict(zip(self.late.results, results, strict=True))

    # One phase.

    def _loop(self, phase: Phase, state: State) -> tuple[State, list[Tensor]]:
        """Writes the loop of a phase; returns what it passes on, and what its heads return."""
        dims, tick = self.dims, Dimension(self.dims.tick, phase.ticks)
        own, shared = (rows[phase.start : phase.stop] for rows in self.timetable.rows)
        rows = (
            enter(_literal(own, [tick, dims.stage, Dimension(dims.field, len(OWN))]), dims.stage),
            _literal(shared, [tick, Dimension(dims.field, len(SHARED))]),
        )

        def step(changing: State, rows: tuple[Tensor, Tensor]) -> tuple[State, list[Tensor]]:
            fields = self._fields(rows[0], OWN), self._fields(rows[1], SHARED)
            after, results = self._tick(phase, _updated(state, changing), *fields)
            return self._changing(phase, after), results

        after, results = ops.scan(step, self._changing(phase, state), rows, tick)
        return _updated(state, after), results

    def _changing(self, phase: Phase, state: State) -> State:
        """Returns the part of the state that the ticks of a phase change.

        A loop does not pass on the rest: sums that it does not add to may stay partial after it.
        """
        names = ["inputs", "waiting_inputs", "kept", "stacked"] if phase.forward else []
        names += ["waiting_loss_gradients"] if phase.head else []
        names += ["gradients", "waiting_gradients", "layers"] if phase.backward else []
        tails = [on for on, runs in ((False, phase.head), (True, phase.backward)) if runs]
        sums = {number for tail in tails for number, _ in self._terms(tail)}
        shared = {number: state["shared"][number] for number in sorted(sums)}
        return {**{name: state[name] for name in names}, "shared": shared}

    def _fields(self, row: Tensor, names: Sequence[str]) -> _Fields:
        read: dict[str, Tensor] = {}

        def field(name: str) -> Tensor:
            if name not in read:
                read[name] = ops.index(row, self.dims.field, names.index(name))
            return read[name]

        return field

    def _tick(
        self, phase: Phase, state: State, own: _Fields, shared: _Fields
    ) -> tuple[State, list[Tensor]]:
        results: list[Tensor] = []
        loss_gradients: list[Tensor] = []
        if phase.backward:
            with located(self.stack.backward.source):
                state["gradients"] = self._sent(state["gradients"], -1)
        if phase.forward:
            left = self._forward(state, own, shared)
            if phase.head:
                loss_gradients, results = self._head(state, left, shared)
            state["inputs"] = self._sent(left, 1)
        if phase.backward:
            with located(self.stack.backward.source):
                self._backward(state, loss_gradients, own, shared)
                self._tail(state, shared)
        return state, results

    def _sent(self, tensors: Sequence[Tensor], by: int) -> list[Tensor]:
        return [send(t, self.dims.stage, by) for t in tensors]

    # The parts of a tick.

    def _forward(self, state: State, own: _Fields, shared: _Fields) -> list[Tensor]:
        """Runs a chunk's layers; returns what they leave for the next chunk."""
        scan = self.stack.forward
        wanted = carries_of(scan)
        came = self._when_due(state, "inputs", own("store_input"), own("load_input"))
        starts = self._where_due(
            shared("enters"), lambda: self._alike(shared("entering"), {}).every(wanted), wanted
        )
        first = own("first") == 1
        carries = [
            ops.where(first, self._varied(start), rest)
            for start, rest in zip(starts, came, strict=True)
        ]
        outputs = self._run(scan, carries, own("microbatch"), own("round"), {})
        made = dict(zip(scan.outputs, outputs, strict=True))
        for name, tensors, slot in (
            ("kept", self.kept, "keep"),
            ("stacked", self.late.stacked, "result"),
        ):
            rows = zip(state[name], tensors, strict=True)
            state[name] = [self.dims.put(buffer, made[t], own(slot)) for buffer, t in rows]
        return outputs[: len(wanted)]

    def _head(
        self, state: State, left: Sequence[Tensor], shared: _Fields
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Computes loss and gradient of the microbatch that has left the last chunk.

        Returns the gradient, and what heads return.
        """
        gradients, terms = carries_of(self.stack.backward), self._terms(tail=False)
        last, scan = self.dims.stage.size - 1, self.stack.forward

        def compute() -> list[Tensor]:
            ends = zip(scan.outputs, left, strict=False)
            known = {t: of_stage(x, self.dims.stage, last) for t, x in ends}
            values = self._alike(shared("heading"), known)
            summands = [self._finished(values, term) for _, term in terms]
            return [*values.every(gradients), *summands, *values.every(self.results)]

        like = [*gradients, *(_end_of(term) for _, term in terms), *self.results]
        computed = self._where_due(shared("heads"), compute, like)
        count = len(gradients)
        self._add(state, terms, computed[count:], shared("heads"))
        state["waiting_loss_gradients"] = [
            self.dims.put(buffer, x, shared("store_loss_gradient"))
            for buffer, x in zip(state["waiting_loss_gradients"], computed, strict=False)
        ]
        return computed[:count], computed[count + len(terms) :]

    def _backward(
        self, state: State, loss_gradients: Sequence[Tensor], own: _Fields, shared: _Fields
    ) -> None:
        """Runs the backward pass of a chunk, and adds up its layers' gradients."""
        scan, dims = self.stack.backward, self.dims
        carries = self._when_due(state, "gradients", own("store_gradient"), own("load_gradient"))
        last = own("last") == 1
        for number, loss in enumerate(self._of_loss(state, loss_gradients, shared)):
            carries[number] = ops.where(last, self._varied(loss), carries[number])
        buffers = zip(self.kept, state["kept"], strict=True)
        kept = {t: dims.get(buffer, own("kept")) for t, buffer in buffers}
        place = own("backward_round")
        outputs = self._run(scan, carries, own("backward_microbatch"), place, kept)
        state["gradients"] = outputs[: len(carries)]
        made = dict(zip(scan.outputs, outputs, strict=True))
        values = self._own(own("backward_microbatch"), made)
        works = own("backward") == 1
        state["layers"] = dict(state["layers"])
        for number in self.layered:
            for term in self.parts.terms[number]:
                more = self._finished(values, term)
                with located(self._line(number)):
                    sums = state["layers"][number]
                    state["layers"][number] = dims.plus(sums, ops.where(works, more, 0), place)

    def _of_loss(
        self, state: State, at_once: Sequence[Tensor], shared: _Fields
    ) -> Sequence[Tensor]:
        """Returns the loss's gradient that the last chunk reads; none if it reads no one."""
        if not state["waiting_loss_gradients"]:
            return at_once
        slot = shared("load_loss_gradient")
        waited = [self.dims.get(buffer, slot) for buffer in state["waiting_loss_gradients"]]
        if not at_once:
            return waited
        return [ops.where(slot >= 0, a, b) for a, b in zip(waited, at_once, strict=True)]

    def _tail(self, state: State, shared: _Fields) -> None:
        """Adds the gradients of what comes before the layers."""
        scan, terms = self.stack.backward, self._terms(tail=True)
        if not terms:
            return
        ended = list(state["gradients"])

        def compute() -> list[Tensor]:
            ends = zip(scan.outputs, ended, strict=False)
            known = {t: of_stage(x, self.dims.stage, 0) for t, x in ends}
            values = self._alike(shared("leaving"), known)
            return [self._finished(values, term) for _, term in terms]

        like = [_end_of(term) for _, term in terms]
        computed = self._where_due(shared("leaves"), compute, like)
        self._add(state, terms, computed, shared("leaves"))

    # What the parts share.

    def _run(
        self,
        scan: Operation,
        carries: Sequence[Tensor],
        microbatch: Tensor,
        place: Tensor,
        kept: Mapping[Tensor, Tensor],
    ) -> list[Tensor]:
        """Runs a pass over the layers of one chunk."""
        slices = []
        for tensor in slices_of(scan):
            if tensor in kept:
                slices.append(kept[tensor])
            elif tensor in self.stacks:
                slices.append(self.dims.chunk(self.stacks[tensor], place))
            else:
                raise self._not_of_one_stage(tensor, scan)
        consts = self._own(microbatch, {}).every(scan.inputs[: scan.params["consts"]])
        likes = scan.inputs[: len(consts) + len(carries)]
        arguments = [
            x.transpose(like.shape.names)
            for x, like in zip((*consts, *carries), likes, strict=True)
        ]
        arguments += slices
        params = {**scan.params, "dim": self.dims.inside}
        if self.real is not None:
            arguments.append(self.dims.chunk(self.real, place))
            params["body"] = unless_filling(scan)
        with located(scan.source):
            return list(bind(SCAN, arguments, params).outputs)

    def _not_of_one_stage(self, tensor: Tensor, scan: Operation) -> ValueError:
        return ValueError(
            f"`{self.stack.rule}` makes a pipeline of the loop at {scan.source}; it reads {tensor} "
            f"({tensor.source}) of each layer, computed from a microbatch. Compute it in the body "
            "of the loop, from what is the same for all layers"
        )

    def _own(self, microbatch: Tensor, known: Mapping[Tensor, Tensor]) -> Values:
        """Returns what each stage computes for its own microbatch."""

        def given(tensor: Tensor) -> Tensor:
            if tensor in self.fixed:
                return self._varied(self.fixed[tensor])
            return ops.take(self._varied(self.batch[tensor]), microbatch, self.microbatch)

        return Values(self.parts, known, given)

    def _alike(self, microbatch: Tensor, known: Mapping[Tensor, Tensor]) -> Values:
        """Returns what all stages compute for one microbatch."""

        def given(tensor: Tensor) -> Tensor:
            if tensor in self.fixed:
                return self.fixed[tensor]
            return ops.take(self.batch[tensor], microbatch, self.microbatch)

        return Values(self.parts, known, given)

    def _varied(self, x: Tensor) -> Tensor:
        return vary(x)

    def _when_due(self, state: State, name: str, store: Tensor, load: Tensor) -> list[Tensor]:
        """Returns what has arrived, or came earlier and waits in a buffer."""
        arrived, waiting = list(state[name]), f"waiting_{name}"
        rows = zip(state[waiting], arrived, strict=False)
        state[waiting] = [self.dims.put(buffer, x, store) for buffer, x in rows]
        for number, buffer in enumerate(state[waiting]):
            waited = self.dims.get(buffer, load)
            arrived[number] = ops.where(load >= 0, waited, arrived[number])
        return arrived

    def _where_due(
        self, due: Tensor, compute: Callable[[], list[Tensor]], like: Iterable[Tensor]
    ) -> list[Tensor]:
        """Returns what is computed in ticks that have the work, and anything in others.

        With one round, nearly all ticks of a loop have it.
        """
        if self.dims.round.size == 1:
            return compute()

        def idle() -> list[Tensor]:
            return [ops.zeros(t.shape, t.dtype) for t in like]

        computed: list[Tensor] = ops.cond(due == 1, compute, idle)
        return computed

    def _finished(self, values: Values, term: Term) -> Tensor:
        """Returns a summand, with the operations done that its sum has after it."""
        result = values.get(term.tensor)
        for op in term.after:
            varying = {t for t in op.inputs if self.parts.levels[t] is not Level.FIXED}
            arguments = [result if t in varying else values.get(t) for t in op.inputs]
            with located(op.source):
                result = bind_one(op.primitive, arguments, op.params)
        return result

    def _line(self, number: int) -> Source:
        """Returns the line of what is added to a sum, for reports of where that is reduced."""
        return self.parts.body.outputs[number].source

    def _add(
        self,
        state: State,
        terms: Sequence[tuple[int, Term]],
        summands: Sequence[Tensor],
        due: Tensor,
    ) -> None:
        """Adds summands to their sums, in ticks that have the work."""
        state["shared"] = dict(state["shared"])
        for (number, _), summand in zip(terms, summands, strict=False):
            with located(self._line(number)):
                more = ops.where(due == 1, summand, 0)
                state["shared"][number] = state["shared"][number] + more


def _updated(state: State, changed: State) -> State:
    """Returns a state with what has changed."""
    return {**state, **changed, "shared": {**state["shared"], **changed["shared"]}}


def _end_of(term: Term) -> Tensor:
    """Returns the tensor of the body that a summand is in the end."""
    return term.after[-1].outputs[0] if term.after else term.tensor


def _literal(data: np.ndarray, dims: Sequence[Dimension]) -> Tensor:
    return bind_one(LITERAL, (), {"data": data, "shape": Shape(dims)})
