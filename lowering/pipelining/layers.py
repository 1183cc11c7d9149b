"""Layers: the passes over the chunks of one stack of a pipeline, and the state of a stage.

A pass runs the layers of one chunk in a region (`regions`): each stage has its own layers,
microbatch and activations. A stage reads the numbers of its chunk, microbatch and buffers from the
timetable. If a stage has no work in a tick, it computes on arbitrary data, and the results are not
used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import meshdsl.ops as ops
from meshdsl.lowering.pipelining.chunks import Dims, carries_of, skipping_padding
from meshdsl.lowering.pipelining.finding import NoPipelineError, Stack, slices_of
from meshdsl.lowering.pipelining.parts import BATCH, FIXED, Parts, Term, Values
from meshdsl.lowering.pipelining.regions import enter, send, vary
from meshdsl.lowering.pipelining.timetable import Timetable
from meshdsl.ops.control.scan import SCAN
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Operation
from meshdsl.tracing.source import Source
from meshdsl.tracing.trace import bind, bind_one, located

# The state of a stack between ticks is a tree of tensors:
#   inputs: inputs that the previous stage has sent; then, if rounds turn around, those that the
#       next stage has sent
#   gradients: gradients that the stage sends at the start of the next tick
#   waiting_inputs, waiting_gradients: buffers of those that arrive before the tick of their use
#   starts, loss_gradients: buffers of results of junctions that are not used in the same tick
#   kept: buffers of activations for the backward pass
#   stacked: buffers of other tensors that chunks stack, of all microbatches
#   layers: sums of the gradients of the layers of a stage, by the number of the sum
FORWARD_STATE = ["inputs", "waiting_inputs", "kept", "stacked"]  # changed by forward passes
BACKWARD_STATE = ["gradients", "waiting_gradients", "layers"]  # changed by backward passes
STARTS, LOSS_GRADIENTS = "starts", "loss_gradients"
State: TypeAlias = dict[str, Any]
Fields: TypeAlias = Callable[[str], Tensor]  # the name of a column -> its number: s32[]
OwnValues: TypeAlias = Callable[[Tensor, Mapping[Tensor, Tensor]], Values]


class Layers:
    """Writes the passes over one stack into the present trace.

    Attributes:
        parts: the body of the loop over microbatches.
        number: the number of the stack.
        stack: the stack.
        table: the timetable of the stack.
        dims: the dims of the stack.
        late: the tensors that the forward pass stacks and results of the loop need.
        stacks: the layers of each stage, by the sliced tensor of the body. Those of `varying` also
            have the dim of the microbatches.
        real: whether each position has a layer of the model; None if all have one.
    """

    def __init__(
        self,
        parts: Parts,
        number: int,
        table: Timetable,
        dims: Dims,
        late: Sequence[Tensor],
    ) -> None:
        self.parts = parts
        self.number = number
        self.stack: Stack = parts.stacks[number]
        self.table = table
        self.dims = dims
        stacked = set(self.stack.forward.outputs)
        self.late = [t for t in late if t in stacked]
        self.stacks: dict[Tensor, Tensor] = {}
        self.real: Tensor | None = None

    @cached_property
    def kept(self) -> list[Tensor]:
        """The tensors that the forward pass stacks and the backward pass reads."""
        stacked = set(self.stack.forward.outputs[self.stack.forward.params["carries"] :])
        return [t for t in dict.fromkeys(slices_of(self.stack.backward)) if t in stacked]

    @cached_property
    def varying(self) -> dict[Tensor, None]:
        """The sliced tensors that depend on the data of the microbatch, such as keys of dropout."""
        sliced = [*slices_of(self.stack.forward), *slices_of(self.stack.backward)]
        return dict.fromkeys(t for t in sliced if self.parts.levels[t] == BATCH)

    @cached_property
    def sums(self) -> list[int]:
        """The numbers of the sums of gradients of layers, which the backward pass stacks."""
        numbers = []
        for number, terms in enumerate(self.parts.terms):
            kinds = {self.parts.of_stack(term.tensor) for term in terms}
            if self.number in kinds and len(kinds) > 1:
                line = self.parts.body.outputs[number].source
                raise NoPipelineError(
                    f"`{self.stack.rule}` makes no pipeline of the loop at "
                    f"{self.stack.forward.source}: {line} adds gradients of its layers to other "
                    "gradients of the same parameter, and no stage has both"
                )
            if kinds == {self.number}:
                numbers.append(number)
        return numbers

    def fetch(self, before: Values, varying: Mapping[Tensor, Tensor]) -> None:
        """Sends each stage its layers, before the loops.

        Args:
            before: the fixed tensors.
            varying: the tensors of `varying`, of all microbatches.
        """
        for scan in (self.stack.forward, self.stack.backward):
            for tensor in slices_of(scan):
                if self.parts.levels[tensor] == FIXED and tensor not in self.stacks:
                    self.stacks[tensor] = self.dims.to_stages(before.get(tensor))
        for tensor in self.varying:
            self.stacks[tensor] = self.dims.to_stages(varying[tensor])
        self.real = self.dims.real() if self.dims.pads else None

    def start(self, sums: Sequence[Tensor]) -> State:
        """Returns the state before the first tick."""
        table, dims = self.table, self.dims
        inputs = [(t.shape, t.dtype) for t in carries_of(self.stack.forward)]
        gradients = [(t.shape, t.dtype) for t in carries_of(self.stack.backward)]
        kept = [(dims.chunk_shape(t.shape), t.dtype) for t in self.kept]
        stacked = [(dims.chunk_shape(t.shape), t.dtype) for t in self.late]
        return {
            "inputs": [ops.zeros(*t) for t in (inputs * 2 if dims.turns else inputs)],
            "gradients": [ops.zeros(*t) for t in gradients],
            "waiting_inputs": dims.buffers(inputs, table.waiting_inputs[1]),
            "waiting_gradients": dims.buffers(gradients, table.waiting_gradients[1]),
            STARTS: dims.buffers(inputs, table.waiting_starts[1]),
            LOSS_GRADIENTS: dims.buffers(gradients, table.waiting_loss_gradients[1]),
            "kept": dims.buffers(kept, table.kept[1], dims.kept),
            "stacked": dims.buffers(stacked, table.rounds * table.microbatches),
            "layers": {n: dims.to_stages(sums[n]) for n in self.sums},
        }

    def sent(self, tensors: Sequence[Tensor], by: int) -> list[Tensor]:
        """Returns what arrives from `by` stages before; if rounds turn around, from both sides.

        A round that turns around starts on the stage on which the round before ends. So this stage
        gets its own tensors, where a ring would give it those of the other end.
        """
        stage = self.dims.stage
        if not self.dims.turns:
            return [send(t, stage, by) for t in tensors]
        here, arrived = enter(ops.arange(stage), stage), []
        for shift in (by, -by):
            turns = here == (0 if shift > 0 else stage.size - 1)
            arrived += [ops.where(turns, t, send(t, stage, shift)) for t in tensors]
        return arrived

    def forward(
        self, state: State, starts: Sequence[Tensor], own: Fields, values: OwnValues
    ) -> list[Tensor]:
        """Runs the forward pass of a chunk; returns the inputs of the next chunk.

        Args:
            state: the state of the stack, which this updates.
            starts: the inputs of the first chunk; empty if no microbatch enters in this phase.
            own: the columns of the stack in the timetable.
            values: returns the values of a stage for its microbatch.
        """
        scan = self.stack.forward
        carries = self._arrived(state, "input", own, own("round"))
        first = own("first") == 1
        for number, start in enumerate(starts):
            carries[number] = ops.where(first, vary(start), carries[number])
        outputs = self._run(scan, carries, own("microbatch"), own("round"), {}, values)
        made = dict(zip(scan.outputs, outputs, strict=True))
        for name, tensors, slot in (("kept", self.kept, "keep"), ("stacked", self.late, "result")):
            pairs = zip(state[name], tensors, strict=True)
            state[name] = [self.dims.put(buffer, made[t], own(slot)) for buffer, t in pairs]
        return outputs[: len(carries)]

    def backward(
        self, state: State, loss_gradients: Sequence[Tensor], own: Fields, values: OwnValues
    ) -> None:
        """Runs the backward pass of a chunk, and adds the gradients of its layers to their sums.

        Args:
            state: the state of the stack, which this updates.
            loss_gradients: the gradients that the last chunk reads; empty if no microbatch turns
                back in this phase.
            own: the columns of the stack in the timetable.
            values: returns the values of a stage for its microbatch.
        """
        scan, dims = self.stack.backward, self.dims
        carries = self._arrived(state, "gradient", own, own("backward_round"))
        last = own("last") == 1
        for number, loss in enumerate(loss_gradients):
            carries[number] = ops.where(last, vary(loss), carries[number])
        buffers = zip(self.kept, state["kept"], strict=True)
        kept = {t: dims.get(buffer, own("kept")) for t, buffer in buffers}
        turn = own("backward_round")
        outputs = self._run(scan, carries, own("backward_microbatch"), turn, kept, values)
        state["gradients"] = outputs[: len(carries)]
        made = dict(zip(scan.outputs, outputs, strict=True))
        known = values(own("backward_microbatch"), made)
        works = own("backward") == 1
        state["layers"] = dict(state["layers"])
        for number in self.sums:
            for term in self.parts.terms[number]:
                more = value_of(term, self.parts, known)
                with located(line_of(self.parts, number)):
                    sums = state["layers"][number]
                    state["layers"][number] = dims.plus(sums, ops.where(works, more, 0), turn)

    def _run(
        self,
        scan: Operation,
        carries: Sequence[Tensor],
        microbatch: Tensor,
        turn: Tensor,
        kept: Mapping[Tensor, Tensor],
        values: OwnValues,
    ) -> list[Tensor]:
        """Runs a pass over the layers of one chunk."""
        slices = []
        for tensor in slices_of(scan):
            if tensor in kept:
                slices.append(kept[tensor])
            elif tensor in self.stacks:
                stack = self.stacks[tensor]
                if tensor in self.varying:
                    stack = ops.take(stack, microbatch, self.parts.loop.params["dim"])
                slices.append(self.dims.chunk(stack, turn))
            else:
                raise self._not_of_one_stage(tensor, scan)
        consts = values(microbatch, {}).every(scan.inputs[: scan.params["consts"]])
        likes = scan.inputs[: len(consts) + len(carries)]
        arguments = [
            x.transpose(like.shape.names)
            for x, like in zip((*consts, *carries), likes, strict=True)
        ]
        arguments += slices
        params = {**scan.params, "dim": self.dims.inside}
        if self.real is not None:
            arguments.append(self.dims.chunk(self.real, turn))
            params["body"] = skipping_padding(scan)
        with located(scan.source):
            return list(bind(SCAN, arguments, params).outputs)

    def _not_of_one_stage(self, tensor: Tensor, scan: Operation) -> NoPipelineError:
        return NoPipelineError(
            f"`{self.stack.rule}` makes no pipeline of the loop at {scan.source}: each layer reads "
            f"a slice of {tensor} ({tensor.source}), which depends on results of layers. Compute "
            "it in the body of the loop, from values that are the same for all layers"
        )

    def _arrived(self, state: State, name: str, own: Fields, turn: Tensor) -> list[Tensor]:
        """Returns the tensors of a pass: they have just arrived, or wait in a buffer.

        Args:
            name: `input` or `gradient`.
            turn: the round of the pass.
        """
        arrived, waiting, load = list(state[f"{name}s"]), f"waiting_{name}s", own(f"load_{name}")
        pairs = zip(state[waiting], arrived, strict=False)  # none if nothing ever waits
        state[waiting] = [self.dims.put(b, x, own(f"store_{name}")) for b, x in pairs]
        if self.dims.turns:
            half = len(arrived) // 2
            arrived, turned = arrived[:half], arrived[half:]
            pairs = zip(state[waiting], turned, strict=False)
            store = own(f"store_turned_{name}")
            state[waiting] = [self.dims.put(buffer, x, store) for buffer, x in pairs]
            onward = turn % 2 == 0
            arrived = [ops.where(onward, *t) for t in zip(arrived, turned, strict=True)]
        for number, buffer in enumerate(state[waiting]):
            waited = self.dims.get(buffer, load)
            arrived[number] = ops.where(load >= 0, waited, arrived[number])
        return arrived


def value_of(term: Term, parts: Parts, values: Values) -> Tensor:
    """Returns the value of a term: its tensor, after its linear operations."""
    result = values.get(term.tensor)
    for op in term.after:
        varying = {t for t in op.inputs if parts.levels[t] != FIXED}
        arguments = [result if t in varying else values.get(t) for t in op.inputs]
        with located(op.source):
            result = bind_one(op.primitive, arguments, op.params)
    return result


def line_of(parts: Parts, number: int) -> Source:
    """Returns the line of a sum; reports name it where they list the reduction of the sum."""
    return parts.body.outputs[number].source
