"""Chunks: the layers of a stack, divided among the stages of a pipeline.

Chunk c of p v has the layers from c K on, K = ceil(L / (p v)); the last chunks may be filled up
with layers that the model does not have, which leave everything as it comes. Stage s has the chunks
s, s + p, ... The rule `layers:pipe` stores neighbouring layers on a device. With one chunk per
stage, these are its chunk. With more, the chunks are dealt to the stages before the loops, and
collected after them: once per step, each device sends its layers on, and the sums of their
gradients back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

import meshdsl.ops as ops
from meshdsl.lowering.pipelining.regions import collect, deal, enter
from meshdsl.ops.indexing import overwrite
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Graph, Operation
from meshdsl.tracing.trace import Trace, bind, current, located, tracing


@dataclass(frozen=True)
class Dims:
    """The dims that a pipeline adds to a program; their names occur nowhere else in it.

    Attributes:
        layers: the dim of the stack.
        stage: the stages; split over `axes`.
        round: the chunks of a stage.
        inside: the layers of a chunk.
        tick, field, slot, part: ticks; columns of timetables; buffers; one position of a buffer.
        axes: the axes of the pipeline.
    """

    layers: Dimension
    stage: Dimension
    round: Dimension
    inside: Dimension
    tick: str
    field: str
    slot: str
    part: str
    axes: tuple[str, ...]

    @staticmethod
    def of(
        layers: Dimension, stages: int, rounds: int, axes: tuple[str, ...], used: Iterable[str]
    ) -> Dims:
        """Returns the dims of a pipeline, for a program that uses some names already."""
        taken = set(used)

        def fresh(name: str) -> str:
            while name in taken:
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
            fresh("slot"),
            fresh("part"),
            axes,
        )

    @property
    def filled(self) -> Dimension:
        """The layers with those that fill the chunks up."""
        return Dimension(self.layers.name, self.stage.size * self.round.size * self.inside.size)

    @property
    def fills(self) -> bool:
        """Whether chunks are filled up with layers that the model does not have."""
        return self.filled.size > self.layers.size

    def chunk_shape(self, shape: Shape) -> Shape:
        """Returns the dims of a chunk's part of a stack."""
        return Shape(self.inside if d.name == self.layers.name else d for d in shape)

    def apart(self, x: Tensor) -> Tensor:
        """Returns each stage's own part of a stack of layers: [(round,) inside, ...]."""
        x = ops.pad(x, self.layers.name, 0, self.filled.size - self.layers.size)
        return deal(x, self.filled, self._own, self.axes)

    def together(self, x: Tensor) -> Tensor:
        """Returns the stack of all layers, of each stage's own part."""
        x = collect(x, self.filled, self._own, self.axes)
        return ops.slice(x, self.layers.name, 0, self.layers.size)

    @property
    def _rounds(self) -> list[Dimension]:
        return [self.round] if self.round.size > 1 else []

    @property
    def _own(self) -> Shape:
        return Shape([*self._rounds, self.inside])

    def real(self) -> Tensor:
        """Returns which layers of each chunk the model has: bool[(round,) inside]."""
        number = ops.arange(Dimension(self.layers.name, self.filled.size))
        number = ops.split(number, self.layers.name, [*self._rounds, self.stage, self.inside])
        return enter(number, self.stage) < self.layers.size

    # Each stage's own stacks and buffers.

    def chunk(self, stack: Tensor, place: Tensor) -> Tensor:
        """Returns one chunk of a stage's own stack."""
        return stack if self.round.size == 1 else ops.take(stack, place, self.round)

    def plus(self, sums: Tensor, more: Tensor, place: Tensor) -> Tensor:
        """Returns a stage's own stack of sums, with those of one chunk increased."""
        if self.round.size == 1:
            return sums + more
        piece = self.chunk(sums, place) + more
        piece = ops.broadcast(piece, [Dimension(self.part, 1), *piece.shape])
        return overwrite(sums, piece, place, self.round.name, self.part)

    def buffers(self, shapes: Iterable[tuple[Shape, object]], count: int) -> list[Tensor]:
        """Returns `count` empty buffers for each tensor, stacked; none at all if it is 0."""
        slot = Dimension(self.slot, max(count, 1))
        return [ops.zeros([slot, *shape], dtype) for shape, dtype in shapes] if count else []

    def put(self, buffer: Tensor, x: Tensor, slot: Tensor) -> Tensor:
        """Returns buffers with x in one of them; in none if the number is negative."""
        piece = ops.broadcast(x, [Dimension(self.part, 1), *x.shape])
        return overwrite(buffer, piece, slot, self.slot, self.part)

    def get(self, buffer: Tensor, slot: Tensor) -> Tensor:
        """Returns what is in a buffer."""
        return ops.take(buffer, slot, self.slot)


def carries_of(scan: Operation) -> tuple[Tensor, ...]:
    """Returns the operands that the first iteration of a loop reads as its carries."""
    return scan.inputs[scan.params["consts"] : scan.params["consts"] + scan.params["carries"]]


def unless_filling(scan: Operation) -> Graph:
    """Returns a loop's body with one more slice: unless that is true, carries do not change."""
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
