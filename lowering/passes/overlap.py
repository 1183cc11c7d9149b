"""Overlap: products that need a gather, or end in a reduction, become rings of permutes.

With an `all_gather` before an einsum all devices wait for all shards. In a ring each device
multiplies the shard that it has, while it sends the shard to its neighbour. It writes the product
to the shard's positions in the result, or adds products if the gathered dim is contracted. For a
`reduce_scatter` the sums travel: each device adds its product for a sum's block, while the next
product is computed. A ring sends as many bytes as the collective, (n-1)/n of the payload. Two half
rings run in opposite directions, which uses both directions of the links and halves the steps. Wang
et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models" (ASPLOS), sections 5.1 and 5.4.

A gather is replaced for all einsums that do not need each other's results. Other readers get the
gathered value, assembled from the same shards. So do einsums that contract the gathered dim for a
result that is replicated along the ring: its bits must be the same on all devices. A reduction is
replaced if its operand is an einsum without other readers, or is elementwise of such einsums.

Collectives of dims with pads, and those for which a ring does not pay, are not replaced. With small
shards a ring costs n-1 latencies instead of one. A small product cannot hide the transfer. The
program of a long ring grows with the number of devices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.costs.flops import instruction_flops
from meshdsl.lowering.instructions import kind_of
from meshdsl.lowering.options import Options
from meshdsl.lowering.parameters import LocalPositions, Permute, SplitDim, parameters_of
from meshdsl.lowering.passes.blocks import each_block, in_order
from meshdsl.lowering.program import Block, Instruction, Pairs, SpmdProgram, Value
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tracing.source import Source

SMALLEST = 64 * 1024  # bytes of a shard; 0.7 µs on one link of a TPU v5p, about its latency
LONGEST = 16  # devices in a ring
INTENSITY = 128.0  # flops for each byte sent; on a TPU v5p they take 5 % of the transfer's time


def overlap(program: SpmdProgram, options: Options) -> SpmdProgram:
    """Replaces gathers and reductions beside products by rings where it pays, if `overlap` is set.

    It makes no rings if they would raise the peak above `options.memory`.
    """
    if not options.overlap:
        return program
    with_rings = rings(program)
    if options.memory is not None and with_rings.peak_bytes > max(
        options.memory, program.peak_bytes
    ):
        return program
    return with_rings


def rings(
    program: SpmdProgram, smallest: int = SMALLEST, intensity: float = INTENSITY
) -> SpmdProgram:
    """Returns the program with rings: `rings(f.lower(x), smallest=0, intensity=0)` makes all.

    Args:
        smallest: bytes of a shard; collectives of smaller shards are not replaced.
        intensity: flops per byte sent; collectives with fewer are not replaced.
    """
    return each_block(program, lambda block: _Block(block, program.mesh, smallest, intensity).run())


@dataclass(frozen=True)
class _Ring:
    """The devices along some axes, and a dim that they share equally: `chunk` positions each."""

    mesh: Mesh
    axes: tuple[str, ...]
    dim: str
    chunk: int

    @property
    def size(self) -> int:
        return self.mesh.extent(self.axes)

    def starts(self, shift: int) -> tuple[int, ...]:
        """Returns, by device index, the start of the shard of the device `shift` further."""
        return tuple((index + shift) % self.size * self.chunk for index in range(self.size))

    def small(self, shape: Shape) -> Shape:
        """Returns the shape of a piece: the part of one device along the ring."""
        return Shape(
            Dimension(d.name, d.size // self.size) if d.name == self.dim else d for d in shape
        )

    def loose(self, layout: TensorLayout) -> TensorLayout:
        """Returns the layout of a piece, which differs among the devices of the ring."""
        rest = layout.split(self.dim, [a for a in layout.axes(self.dim) if a not in self.axes])
        rest = rest.drop([axis for axis in self.axes if axis in rest.partial_axes])
        free = [axis for axis in self.axes if axis not in rest.split_axes]
        return rest.add_partial(free, "varying")

    def value(self, shape: Shape, like: Value, layout: TensorLayout) -> Value:
        return Value(shape, like.dtype, layout, layout.local(shape, self.mesh))


@lru_cache(maxsize=256)
def _neighbours(mesh: Mesh, axes: tuple[str, ...], by: int) -> Pairs:
    """Returns the (source, target) pairs of devices if each sends to the device `by` further."""
    return Pairs(
        sorted(
            (device, group[(index + by) % len(group)])
            for group in mesh.groups(*axes)
            for index, device in enumerate(group)
        )
    )


class _Writer:
    """Writes the instructions of one ring, each with the line that it is for."""

    def __init__(self, ring: _Ring) -> None:
        self.ring = ring
        self.instructions: list[Instruction] = []

    def write(
        self,
        op: str,
        inputs: Sequence[Value],
        result: Value,
        source: Source,
        params: Mapping[str, Any] | None = None,
    ) -> Value:
        self.instructions.append(Instruction(op, tuple(inputs), (result,), params or {}, source))
        return result

    def piece(self, shard: Value, source: Source) -> Value:
        """Returns a shard as a piece: the same elements, of a dim of its own size."""
        ring = self.ring
        result = ring.value(ring.small(shard.shape), shard, ring.loose(shard.layout))
        return self.write("reshape", (shard,), result, source)

    def slice_piece(self, value: Value, shift: int, source: Source) -> Value:
        """Returns the piece of a value that belongs to the device `shift` further."""
        ring = self.ring
        if value.shape.find(ring.dim) is None:
            return value
        result = ring.value(ring.small(value.shape), value, ring.loose(value.layout))
        params: LocalPositions = {
            "dim": ring.dim,
            "axes": ring.axes,
            "starts": ring.starts(shift),
        }
        return self.write("local_slice", (value,), result, source, params)

    def send(self, piece: Value, by: int, source: Source) -> Value:
        """Returns the piece that arrives if every device sends its piece `by` devices on."""
        ring = self.ring
        pairs = _neighbours(ring.mesh, ring.axes, by)
        params: Permute = {"axes": ring.axes, "pairs": pairs, "mesh_axes": ring.mesh.names}
        return self.write("permute", (piece,), replace(piece), source, params)

    def add(self, pieces: Sequence[Value], source: Source, result: Value | None = None) -> Value:
        """Returns the sum of pieces; as `result` if that is given."""
        total, *rest = pieces
        for n, piece in enumerate(rest, 1):
            output = result if result is not None and n == len(rest) else replace(piece)
            total = self.write("add", (total, piece), output, source)
        return total


class _Block:
    """The rings of one block."""

    def __init__(self, block: Block, mesh: Mesh, smallest: int, intensity: float) -> None:
        self.block = block
        self.mesh = mesh
        self.smallest = smallest
        self.intensity = intensity
        self.position = {instruction: n for n, instruction in enumerate(block.instructions)}
        self.maker = {
            value: instruction
            for instruction in block.instructions
            for value in instruction.outputs
        }
        self.readers: dict[Value, list[Instruction]] = defaultdict(list)
        for instruction in block.instructions:
            for value in instruction.inputs:
                self.readers[value].append(instruction)
        self.returned = set(block.outputs)
        self.replaced: set[Instruction] = set()
        self.written: list[tuple[float, list[Instruction]]] = []

    def run(self) -> Block:
        for instruction in self.block.instructions:
            if instruction in self.replaced or len(instruction.outputs) != 1:
                continue
            if instruction.op == "all_gather":
                self._gather(instruction)
            elif instruction.op == "reduce_scatter":
                self._reduce(instruction)
        if not self.written:
            return self.block
        instructions_left = [
            instruction
            for instruction in self.block.instructions
            if instruction not in self.replaced
        ]
        priority: dict[Instruction, float] = dict(self.position)
        for position, instructions in self.written:
            priority.update(dict.fromkeys(instructions, position))
            instructions_left += instructions
        instructions_left.sort(key=priority.__getitem__)
        return replace(self.block, instructions=in_order(instructions_left, priority))

    def _ring(self, collective: Instruction, gathered: Value, part: Value) -> _Ring | None:
        """Returns the ring that a collective can be, if its devices share the dim equally."""
        params = parameters_of(collective, SplitDim)
        axes, dim = params["axes"], params["dim"]
        ring = _Ring(self.mesh, axes, dim, part.local.get(dim).size)
        outer = self.mesh.extent(part.layout.axes(dim))
        even = part.shape.get(dim).size == outer * ring.chunk
        even = even and gathered.local.get(dim).size == ring.size * ring.chunk
        small = part.bytes < self.smallest
        return ring if even and not small and 1 < ring.size <= LONGEST else None

    def _pays(self, ring: _Ring, part: Value, products: Iterable[Instruction]) -> bool:
        sent = (ring.size - 1) * part.bytes
        return sum(map(instruction_flops, products)) >= self.intensity * sent

    # A gather before products.

    def _gather(self, gather: Instruction) -> None:
        (part,), (gathered,) = gather.inputs, gather.outputs
        ring = self._ring(gather, gathered, part)
        products = self._products(gather)
        if ring is None or not products or not self._pays(ring, part, products):
            return
        writer = _Writer(ring)
        needs_gathered = gathered in self.returned or len(set(self.readers[gathered])) > len(
            products
        )
        pieces: dict[Instruction, list[Value]] = defaultdict(list)
        shards = [(0, writer.piece(part, gather.source))]
        results: dict[Instruction, Value] = {}
        for step in range(ring.size // 2 + 1):
            following = []
            for shift, piece in shards:  # sent before it is used, so that both overlap
                for by in (1, -1) if step == 0 else (1 if shift < 0 else -1,):
                    last = ring.size // 2 if by == 1 else (ring.size - 1) // 2
                    if step < last:
                        following.append((shift - by, writer.send(piece, by, gather.source)))
            for shift, piece in shards:
                for product in products:
                    made = self._times(writer, product, gathered, piece, shift)
                    self._write_piece(writer, product, made, shift, pieces, results)
                if needs_gathered:
                    self._write_piece(writer, gather, piece, shift, pieces, results)
            shards = following
        for product, terms in pieces.items():
            (out,) = product.outputs
            if terms[0].dtype == out.dtype:
                writer.add(terms, product.source, out)
            else:
                writer.write("cast", (writer.add(terms, product.source),), out, product.source)
        self._finish(
            writer, [gather, *products], min(self.position[instruction] for instruction in products)
        )

    def _products(self, gather: Instruction) -> list[Instruction]:
        """Returns the einsums of a gathered value that need no other value derived from it."""
        (gathered,) = gather.outputs
        derived = {gathered}
        products = []
        last = max(
            (
                self.position[instruction]
                for instruction in self.readers[gathered]
                if instruction.op == "einsum"
            ),
            default=0,
        )
        for instruction in self.block.instructions[self.position[gather] + 1 : last + 1]:
            depends = [value for value in instruction.inputs if value in derived]
            if not depends:
                continue
            fits = (
                instruction.op == "einsum"
                and depends == [gathered]
                and instruction not in self.replaced
            )
            if fits and self._agrees(instruction, gather):
                products.append(instruction)
            derived.update(instruction.outputs)
        return products

    def _agrees(self, product: Instruction, gather: Instruction) -> bool:
        """Whether a replicated product would still have the same bits on all devices.

        It would not if the gathered dim is contracted: each device starts the sum with its own
        shard.
        """
        (out,) = product.outputs
        apart = out.layout.split_axes.union(out.layout.partial_axes)
        params = parameters_of(gather, SplitDim)
        axes = {axis for axis in params["axes"] if self.mesh.sizes[axis] > 1}
        return out.shape.find(params["dim"]) is not None or axes <= apart

    def _times(
        self, writer: _Writer, product: Instruction, gathered: Value, piece: Value, shift: int
    ) -> Value:
        """Returns the product with one shard: a block of the result, or one term of the sum."""
        inputs = [
            piece if value is gathered else writer.slice_piece(value, shift, product.source)
            for value in product.inputs
        ]
        return self._einsum(writer, product, inputs)

    def _einsum(self, writer: _Writer, product: Instruction, inputs: Sequence[Value]) -> Value:
        ring, (out,) = writer.ring, product.outputs
        result = ring.value(ring.small(out.shape), out, ring.loose(out.layout))
        if out.shape.find(ring.dim) is None:  # a term of a sum, which is rounded once
            result = replace(result, dtype=accumulator(out.dtype))
        return writer.write("einsum", inputs, result, product.source, product.params)

    def _write_piece(
        self,
        writer: _Writer,
        product: Instruction,
        piece: Value,
        shift: int,
        pieces: dict[Instruction, list[Value]],
        results: dict[Instruction, Value],
    ) -> None:
        """Writes a piece to its positions in the result, or adds it to the terms of a sum."""
        ring, (out,) = writer.ring, product.outputs
        if out.shape.find(ring.dim) is None:
            pieces[product].append(piece)
            return
        if product not in results:
            blank = replace(out)
            results[product] = writer.write("full", (), blank, product.source, {"value": 0})
        count = pieces.setdefault(product, [])
        count.append(piece)
        last = len(count) == ring.size
        params: LocalPositions = {
            "dim": ring.dim,
            "axes": ring.axes,
            "starts": ring.starts(shift),
        }
        result = out if last else replace(out)
        results[product] = writer.write(
            "local_update", (results[product], piece), result, product.source, params
        )
        if last:
            del pieces[product]

    # A reduction after products.

    def _reduce(self, scatter: Instruction) -> None:
        (unreduced,), (part,) = scatter.inputs, scatter.outputs
        ring = self._ring(scatter, unreduced, part)
        inner = list(self._inner(unreduced, ring.dim)) if ring else []
        products = [instruction for instruction in inner if instruction.op == "einsum"]
        if ring is None or not products or not self._pays(ring, part, products):
            return
        writer = _Writer(ring)
        travelling: dict[int, Value] = {}
        lengths = {1: ring.size // 2, -1: (ring.size - 1) // 2}
        for step in range(ring.size // 2):
            received = {
                by: writer.send(total, by, scatter.source) for by, total in travelling.items()
            }
            for by, length in lengths.items():  # the shorter ring begins one step later
                late = step - (lengths[1] - length)
                if late >= 0:
                    mine = self._chunk(writer, unreduced, by * (length - late), inner)
                    terms = [received[by], mine] if by in received else [mine]
                    travelling[by] = writer.add(terms, scatter.source)
        received = {by: writer.send(total, by, scatter.source) for by, total in travelling.items()}
        own = self._chunk(writer, unreduced, 0, inner)
        total = writer.add([own, *received.values()], scatter.source)
        writer.write("reshape", (total,), part, scatter.source)
        self._finish(writer, [scatter, *inner], self.position[scatter])

    def _inner(self, value: Value, dim: str) -> Iterator[Instruction]:
        """Yields einsums, and elementwise instructions of them, that can run block by block."""
        maker = self.maker.get(value)
        if maker is None or value in self.returned or len(self.readers[value]) > 1:
            return
        if value.shape.find(dim) is None:
            return
        if maker in self.replaced or len(maker.outputs) > 1:
            return
        if maker.op == "einsum":
            yield maker
        elif kind_of(maker.op).elementwise:
            yield maker
            for operand in dict.fromkeys(maker.inputs):
                yield from self._inner(operand, dim)

    def _chunk(
        self, writer: _Writer, value: Value, shift: int, inner: Sequence[Instruction]
    ) -> Value:
        """Returns the block of a value that belongs to the device `shift` further."""
        ring, maker = writer.ring, self.maker.get(value)
        if value.shape.find(ring.dim) is None:
            return value
        if maker is None or maker not in inner:
            source = maker.source if maker else self.readers[value][0].source
            return writer.slice_piece(value, shift, source)
        if maker.op == "einsum":
            inputs = [writer.slice_piece(operand, shift, maker.source) for operand in maker.inputs]
            return self._einsum(writer, maker, inputs)
        inputs = [self._chunk(writer, operand, shift, inner) for operand in maker.inputs]
        (out,) = maker.outputs
        result = ring.value(ring.small(out.shape), out, ring.loose(out.layout))
        return writer.write(maker.op, inputs, result, maker.source, maker.params)

    def _finish(self, writer: _Writer, replaced: Sequence[Instruction], position: float) -> None:
        """Replaces instructions by a ring, at position `at`."""
        self.replaced.update(replaced)
        self.written.append((position, writer.instructions))
