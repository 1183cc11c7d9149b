"""Chunks: the layers of a stack, divided among the stages of a pipeline.

There are L layers, p stages and v rounds. So there are p v chunks of K = ceil(L / (p v)) layers.
Chunk c starts at layer c K. The last chunks may have positions without a layer of the model. At
such a position, the activations do not change.

Stage s has the chunks s, s + p, s + 2p, ..., or every second round goes through the stages in
reverse (`timetable.placement`). The rule `layers:pipe` stores consecutive layers on a
device. With one chunk per stage, these layers are the chunk. With several chunks, each device sends
layers to the stages of their chunks before the loops. After the loops, it sends the gradients of
the layers back. Both happen once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

import meshdsl.ops as ops
from meshdsl.lowering.pipelining.regions import collect, deal, enter
from meshdsl.lowering.pipelining.timetable import Timetable, placement
from meshdsl.ops.creation import FULL
from meshdsl.ops.indexing import overwrite
from meshdsl.ops.literal import LITERAL
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.trace import Trace, bind, bind_one, current, located, tracing


@dataclass(frozen=True)
class Dims:
    """The dims of one stack of a pipeline. The names of the dims that it adds are unique.

    Attributes:
        layers: the dim of the layers of the model.
        stage: the dim of the stages; it is split over `axes`.
        round: the dim of the chunks of a stage.
        inside: the dim of the layers of a chunk.
        tick: the name of the dim of the ticks of a loop.
        field: the name of the dim of the columns of a timetable.
        kept: the name of the dim of buffers of activations; each stack has a name of its own.
        slot: the name of the dim of other buffers.
        part: the name of the dim, of size 1, of a value that is written to a buffer.
        axes: the axes of the pipeline.
        placement: the stage of each chunk.
    """

    layers: Dimension
    stage: Dimension
    round: Dimension
    inside: Dimension
    tick: str
    field: str
    kept: str
    slot: str
    part: str
    axes: tuple[str, ...]
    placement: tuple[int, ...]

    @staticmethod
    def of(layers: Dimension, table: Timetable, axes: tuple[str, ...], used: Iterable[str]) -> Dims:
        """Returns the dims of a stack.

        Args:
            layers: the dim of the layers of the model.
            table: the timetable of the stack.
            axes: the axes of the pipeline.
            used: the names of dims of the program.
        """
        names, stages, rounds = set(used), table.stages, table.rounds

        def fresh(name: str) -> str:
            while name in names:
                name += "_"
            return name

        inside = -(-layers.size // (stages * rounds))
        return Dims(
            layers,
            Dimension(fresh("stage"), stages),
            Dimension(fresh("round"), rounds),
            Dimension(fresh(f"{layers.name}_of_chunk"), inside),
            fresh("tick"),
            fresh("field"),
            fresh("kept"),
            fresh("slot"),
            fresh("part"),
            axes,
            table.placement,
        )

    @property
    def padded(self) -> Dimension:
        """The layers, with the positions that fill up the last chunks."""
        return Dimension(self.layers.name, self.stage.size * self.round.size * self.inside.size)

    @property
    def pads(self) -> bool:
        """Whether some positions of chunks have no layer of the model."""
        return self.padded.size > self.layers.size

    def chunk_shape(self, shape: Shape) -> Shape:
        """Returns the shape of one chunk of a tensor with the dim `layers`."""
        return Shape(self.inside if d.name == self.layers.name else d for d in shape)

    def to_stages(self, x: Tensor) -> Tensor:
        """Returns the layers of each stage, of a stack of all layers: [(round,) inside, ...]."""
        maker = current().makers.get(x)
        if maker is not None and maker.primitive is FULL and not maker.params["value"]:
            # Sums of gradients start as zeros, which no stage needs to send.
            at = x.shape.position(self.layers.name)
            return ops.zeros([*x.shape[:at], *self._own, *x.shape[at + 1 :]], x.dtype)
        x = ops.pad(x, self.layers.name, 0, self.padded.size - self.layers.size)
        return deal(x, self.padded, self._own, self.axes, self.placement)

    def from_stages(self, x: Tensor) -> Tensor:
        """Returns the stack of all layers, of the layers of each stage. Inverts `to_stages`."""
        x = collect(x, self.padded, self._own, self.axes, self.placement)
        return ops.slice(x, self.layers.name, 0, self.layers.size)

    @property
    def _rounds(self) -> list[Dimension]:
        return [self.round] if self.round.size > 1 else []

    @property
    def _own(self) -> Shape:
        return Shape([*self._rounds, self.inside])

    def real(self) -> Tensor:
        """Returns whether each position has a layer of the model: bool[(round,) inside]."""
        if self.turns:
            sizes = (self.round.size, self.stage.size, self.inside.size)
            number = np.arange(self.padded.size, dtype=np.int32).reshape(sizes)
            number[1::2] = number[1::2, ::-1]
            shape = Shape([*self._rounds, self.stage, self.inside])
            numbers = bind_one(LITERAL, (), {"data": number, "shape": shape})
        else:
            numbers = ops.arange(self.padded)
            numbers = ops.split(numbers, self.layers.name, [*self._rounds, self.stage, self.inside])
        return enter(numbers, self.stage) < self.layers.size

    @property
    def turns(self) -> bool:
        """Whether every second round goes through the stages in reverse."""
        return self.placement != placement(self.stage.size, self.round.size, turns=False)

    # Operations on the stacks and buffers of a stage.

    def chunk(self, stack: Tensor, turn: Tensor) -> Tensor:
        """Returns the chunk of round `turn` of a stack of a stage."""
        return stack if self.round.size == 1 else ops.take(stack, turn, self.round)

    def plus(self, sums: Tensor, more: Tensor, turn: Tensor) -> Tensor:
        """Returns a stack of sums of a stage, with `more` added to the chunk of round `turn`."""
        if self.round.size == 1:
            return sums + more
        piece = self.chunk(sums, turn) + more
        piece = ops.broadcast(piece, [Dimension(self.part, 1), *piece.shape])
        return overwrite(sums, piece, turn, self.round.name, self.part)

    def buffers(
        self, shapes: Iterable[tuple[Shape, object]], count: int, dim: str = ""
    ) -> list[Tensor]:
        """Returns `count` buffers of zeros for each shape, stacked; no tensors if `count` is 0.

        Args:
            dim: the name of the dim along which they are stacked; by default `slot`.
        """
        slot = Dimension(dim or self.slot, max(count, 1))
        return [ops.zeros([slot, *shape], dtype) for shape, dtype in shapes] if count else []

    def put(self, buffer: Tensor, x: Tensor, slot: Tensor) -> Tensor:
        """Returns the buffers with x written to number `slot`; unchanged if `slot` is negative."""
        piece = ops.broadcast(x, [Dimension(self.part, 1), *x.shape])
        return overwrite(buffer, piece, slot, self._dim_of(buffer), self.part)

    def get(self, buffer: Tensor, slot: Tensor) -> Tensor:
        """Returns the content of buffer number `slot`."""
        return ops.take(buffer, slot, self._dim_of(buffer))

    def _dim_of(self, buffer: Tensor) -> str:
        return self.slot if buffer.shape.find(self.kept) is None else self.kept


def carries_of(scan: Operation) -> tuple[Tensor, ...]:
    """Returns the operands that are the initial carries of a loop."""
    return scan.inputs[scan.params["consts"] : scan.params["consts"] + scan.params["carries"]]


def skipping_padding(scan: Operation) -> Graph:
    """Returns the body of a loop with one more slice: if it is false, carries do not change."""
    body: Graph = scan.params["body"]
    consts, carries = scan.params["consts"], scan.params["carries"]
    inner = Trace(current())
    with tracing(inner), located(scan.source):
        inputs = [inner.input(t.shape, t.dtype, t.source) for t in body.inputs]
        real = inner.input(Shape(), np.dtype("bool"))
        outputs = _run(body, inputs)
        starts = inputs[consts : consts + carries]
        kept = [
            ops.where(real, end, start).transpose(start.shape.names)
            for end, start in zip(outputs, starts, strict=False)
        ]
        graph, captured = inner.finish([*kept, *outputs[carries:]])
    assert not captured
    return graph


def _run(graph: Graph, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Writes the operations of a graph into the present trace; returns its results."""
    values = dict(zip(graph.inputs, inputs, strict=True))
    for op in graph.operations:
        with located(op.source):
            outputs = bind(op.primitive, [values[t] for t in op.inputs], op.params).outputs
        values.update(zip(op.outputs, outputs, strict=True))
    return [values[t] for t in graph.outputs]
