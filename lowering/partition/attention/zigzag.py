"""Zig-zag order: causal ring attention in which all devices compute equally much in every step.

If device i has the i-th block of a causal memory, the last device attends to all blocks and the
first only to its own, and every step waits for the last. Instead, the length is divided into twice
as many chunks as there are devices, and device i gets chunks i and 2n-1-i (as in Llama 3, 2024,
section 3.3.2; Brandon et al. 2023, "Striped attention", is similar).

At a step, device i has the block of device s. Its second chunk attends to the first chunk of s.
Besides, if s < i, its first chunk attends to the first chunk of s; if s > i, its second chunk
attends to the second chunk of s. So each step is two products of chunks without a mask, on every
device: half of what the last device computes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.communication.exchange import Interval, Run, bounds, gather, local_slice
from meshdsl.lowering.partition.attention.operands import Operands, Result, sized
from meshdsl.lowering.partition.attention.ring import HIDDEN, Computed, merged
from meshdsl.lowering.partition.attention.schedule import Schedule, Step
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape


def dealt(devices: int) -> Schedule:
    """Returns the steps. A device is active in one if the block comes from a device before it."""
    steps = [
        Step(shift, "all", active=tuple(device >= shift for device in range(devices)))
        for shift in range(1, devices)
    ]
    return Schedule(Step(0, "shifted"), tuple(steps), (), pads=False, circular=True)


@dataclass(frozen=True)
class Zigzag:
    """The order of one length and a memory of the same size, both split over `axes`."""

    length: Dimension
    memory: Dimension
    axes: tuple[str, ...]
    mesh: Mesh

    @property
    def devices(self) -> int:
        return self.mesh.extent(self.axes)

    @property
    def chunk(self) -> int:
        return -(-self.length.size // (2 * self.devices))

    def _chunks(self, device: int) -> list[Interval]:
        size, last = self.chunk, 2 * self.devices - 1
        return [Interval(c * size, (c + 1) * size) for c in (device, last - device)]

    def _dims(self, value: Value) -> list[Dimension]:
        return [dim for dim in (self.length, self.memory) if value.shape.find(dim.name)]

    def into(self, builder: BlockBuilder, value: Value) -> Value:
        """Writes the exchange of a value into zigzag order; a value with neither dim stays."""
        for dim in self._dims(value):
            runs = [
                [Run(chunk, at * self.chunk) for at, chunk in enumerate(self._chunks(device))]
                for device in range(self.devices)
            ]
            value = gather(builder, [value], dim.name, self.axes, runs, 2 * self.chunk)
        return value

    def back(self, builder: BlockBuilder, value: Value, shape: Shape) -> Value:
        """Writes the exchange of a value of `shape` back into the order of positions."""
        for dim in self._dims(value):
            owned = [[self._chunks(device)[at] for device in range(self.devices)] for at in (0, 1)]
            runs = []
            for shard in bounds(dim.size, self.axes, self.mesh):
                chunks = range(shard.start // self.chunk, -(-shard.stop // self.chunk))
                run = []
                for number in chunks if shard.size else ():
                    chunk = Interval(number * self.chunk, (number + 1) * self.chunk)
                    part = shard.meet(chunk)
                    run.append(Run(part, part.start - shard.start, int(number >= self.devices)))
                runs.append(run)
            halves = self.halves(builder, value)
            block = -(-dim.size // self.devices)
            value = gather(builder, halves, dim.name, self.axes, runs, block, owned=owned)
            value = sized(builder, value, dim.name, self.axes, shape)
        return value

    def halves(self, builder: BlockBuilder, value: Value) -> list[Value]:
        """Writes the first and the second chunk of every device; a value without a length twice."""
        halves = [value, value]
        for dim in self._dims(value):
            half = Dimension(dim.name, self.chunk * self.devices)
            starts = [[at * self.chunk] * self.devices for at in (0, 1)]
            halves = [
                local_slice(builder, value, dim.name, self.axes, start, half) for start in starts
            ]
        return halves

    def whole(self, builder: BlockBuilder, first: Value, second: Value) -> Value:
        """Writes the concatenation of two chunks."""
        (dim,) = self._dims(first)
        both = Dimension(dim.name, 2 * self.chunk * self.devices)
        shape = Shape(both if d.name == dim.name else d for d in first.shape)
        inputs = (first, second)
        return builder.one("concat", inputs, shape, first.dtype, first.layout, dim=dim.name)

    def dealt(self, builder: BlockBuilder, operands: Operands) -> Operands:
        """Writes the exchange of all operands into zigzag order."""
        values = {name: self.into(builder, v) for name, v in operands.values.items()}
        gradient_inputs = [self.into(builder, v) for v in operands.gradient_inputs]
        return replace(operands, values=values, gradient_inputs=gradient_inputs)

    def shape(self, shape: Shape, chunks: int) -> Shape:
        """Returns a shape with `chunks` chunks per device."""
        sizes = {d.name: chunks * self.chunk * self.devices for d in (self.length, self.memory)}
        return Shape(Dimension(d.name, sizes.get(d.name, d.size)) for d in shape)

    def result(self, result: Result, chunks: int) -> Result:
        shape, dtype, layout = result
        return self.shape(shape, chunks), dtype, layout

    def attended(
        self, builder: BlockBuilder, operands: Operands, op: str, results: Sequence[Result]
    ) -> tuple[list[Value], list[Value], Value] | list[Value]:
        """Writes one step.

        Returns:
            The results of the device's own block. For another block: the results of the second
            chunk with the first of the block, those of the other pair of chunks, and whether that
            is the pair of first chunks.
        """
        pick = operands.values.get("active")
        if pick is None:
            return operands.attend(builder, op, [self.result(r, 2) for r in results])
        rest = {name: v for name, v in operands.values.items() if name != "active"}
        halves = {name: self.halves(builder, v) for name, v in rest.items()}
        gradient_inputs = [self.halves(builder, v) for v in operands.gradient_inputs]
        firsts = [name for name, v in rest.items() if v.shape.find(self.memory.name)]
        crossed = {name: pair[0 if name in firsts else 1] for name, pair in halves.items()}
        chosen = {name: _select(builder, pick, *pair) for name, pair in halves.items()}
        computed = []
        for values, part in (
            (crossed, [second for _, second in gradient_inputs]),
            (chosen, [_select(builder, pick, *pair) for pair in gradient_inputs]),
        ):
            one = Operands(values, operands.params, part)
            computed.append(one.attend(builder, op, [self.result(r, 1) for r in results]))
        return computed[0], computed[1], pick

    def forward(self, results: Sequence[Result]) -> Callable[[BlockBuilder, Operands], Computed]:
        """Returns the function that writes a step of attention."""

        def compute(builder: BlockBuilder, operands: Operands) -> Computed:
            computed = self.attended(builder, operands, "attention", results)
            if isinstance(computed, list):
                return Computed(computed)
            crossed, (mixed, sums), pick = computed
            nothing = [builder.number(x, sums.dtype) for x in (0, HIDDEN)]
            pairs = list(zip((mixed, sums), nothing, strict=True))
            first = [_select(builder, pick, one, none) for one, none in pairs]
            other = [_select(builder, pick, none, one) for one, none in pairs]
            second = merged(builder, crossed, other)
            return Computed(
                [self.whole(builder, *pair) for pair in zip(first, second, strict=True)]
            )

        return compute

    def backward(
        self, results: Sequence[Result], stay: Sequence[int], travel: Sequence[int]
    ) -> Callable[[BlockBuilder, Operands], Computed]:
        """Returns the function that writes a step of the gradient.

        Args:
            stay, travel: the numbers of the results that belong to the queries, and to the block.
        """

        def compute(builder: BlockBuilder, operands: Operands) -> Computed:
            computed = self.attended(builder, operands, "attention_gradient", results)
            if not isinstance(computed, list):
                crossed, chosen, pick = computed
                pairs = zip(crossed, chosen, strict=True)
                computed = [self._joined(builder, *pair, pick) for pair in pairs]
            return Computed([computed[i] for i in stay], [computed[i] for i in travel])

        return compute

    def _joined(self, builder: BlockBuilder, crossed: Value, chosen: Value, pick: Value) -> Value:
        """Returns the gradient of both chunks of an operand, from those of two pairs of chunks."""

        def plus(other: Value) -> Value:
            return builder.one("add", (crossed, other), other.shape, other.dtype, other.layout)

        if not self._dims(chosen):
            return plus(chosen)
        zero = builder.number(0, chosen.dtype)
        first = _select(builder, pick, chosen, zero)
        second = _select(builder, pick, zero, chosen)
        if chosen.shape.find(self.memory.name):
            return self.whole(builder, plus(first), second)
        return self.whole(builder, first, plus(second))


def _select(builder: BlockBuilder, pick: Value, one: Value, other: Value) -> Value:
    like = one if one.shape else other
    if one is other:
        return one
    return builder.one("select", (pick, one, other), like.shape, like.dtype, like.layout)
