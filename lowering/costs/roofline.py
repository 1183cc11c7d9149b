"""Roofline: the time of one device's own work, instruction by instruction.

The time of an instruction is that of its arithmetic at the hardware's peak, or that of its bytes at
the bandwidth of its memory, whichever is longer (Williams et al. 2009, "Roofline"). Only products
count as arithmetic (einsum, convolution, attention, linear algebra, Fourier transforms);
elementwise work and reductions are assumed to be as fast as memory.

The bytes are those that a fusing compiler must read and write:

* Renaming, reshaping and barriers cost nothing.
* An elementwise result whose readers are elementwise instructions or reductions of the same block
  is fused: it is not written, and its readers read its operands. A costly one (exp, tanh, divide,
  ...) is fused only if it has a single reader; any other, only if no fewer bytes would move if it
  were written.
* A product's result whose only reader is elementwise is fused too: neither written nor read. On
  TPUs the reader is work of the product's kernel, beside it; a library's products are not fused.
* A look-up or a slice reads as many bytes as its result has. An update in place moves only the
  piece.

The compiler for TPU v5e counts 1.2 times these bytes for the step of a transformer with one layer
of 512 features, and 2.5 times for that of a ResNet whose few channels it pads to 128.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import NamedTuple

from meshdsl.layouts.hardware import Hardware, Products
from meshdsl.lowering.costs.flops import instruction_flops
from meshdsl.lowering.instructions import Fusion, kinds_with
from meshdsl.lowering.program import COLLECTIVES, Block, Instruction, Value

_VIEWS = kinds_with(lambda kind: kind.fusion is Fusion.VIEW or kind.effect)
_FUSIBLE = kinds_with(lambda kind: kind.fusion is Fusion.FUSED or kind.constant)
_READING_PART = kinds_with(lambda kind: kind.reads_part)
_REDUCTIONS = kinds_with(lambda kind: kind.fusion is Fusion.REDUCTION)
_PRODUCTS = kinds_with(lambda kind: kind.fusion is Fusion.PRODUCT)
_INTO_PRODUCTS = kinds_with(lambda kind: kind.into_products)
_AS_FAST_AS_MEMORY = kinds_with(lambda kind: kind.as_fast_as_memory)
_IN_PLACE = kinds_with(lambda kind: kind.in_place)
_COSTLY = kinds_with(lambda kind: kind.costly)
_SLICES = ("slice", "local_slice")
_WITHOUT_FLOPS = _FUSIBLE | _AS_FAST_AS_MEMORY
_INTO_SOME = _FUSIBLE | _REDUCTIONS  # what elementwise work fuses with
_INTO_ALL = _INTO_SOME | _PRODUCTS  # what it fuses with if products read its kind
_FUSES = _FUSIBLE | _PRODUCTS | frozenset(_SLICES)


class LocalWork(NamedTuple):
    """The work of one instruction: the flops of products, and the bytes it reads and writes."""

    flops: int
    bytes: int

    def seconds(self, hardware: Hardware, instruction: Instruction) -> tuple[float, str]:
        """Returns the time, and what limits it: `compute` or `memory`."""
        computing = self.flops / hardware.peak(instruction.inputs[0].dtype) if self.flops else 0.0
        moving = self.bytes / hardware.memory_bandwidth
        return (computing, "compute") if computing > moving else (moving, "memory")


_NO_WORK = LocalWork(0, 0)


def local_work(
    block: Block, fused: bool = True, products: Products = "least"
) -> dict[Instruction, LocalWork]:
    """Returns the work of a block's own instructions; collectives and bodies are left out.

    Args:
        fused: whether a compiler fuses elementwise work; if not, every instruction reads its
            operands from memory and writes its results, as in frameworks that run one operation
            after another.
        products: what products of matrices are fused with.
    """
    fusion = _Fusion(block, fused, products)
    work = {}
    for instruction in block.instructions:
        op = instruction.op
        if op in COLLECTIVES or instruction.bodies:
            continue
        flops = 0 if op in _WITHOUT_FLOPS else instruction_flops(instruction)
        moved = fusion.bytes_of(instruction)
        work[instruction] = LocalWork(flops, moved) if flops or moved else _NO_WORK
    for instruction, product in fusion.within.items():
        moved = work[product].bytes + work[instruction].bytes
        work[product] = LocalWork(work[product].flops, moved)
        work[instruction] = _NO_WORK
    return work


def works_alike(block: Block, other: Block) -> bool:
    """Whether the `local_work` of two blocks is the same, as is found without computing it.

    It is so if they differ in transfers and loops alone, none of which is fused with anything, and
    if each value that others may be fused with is read by some of these in both blocks, or in
    neither.
    """
    mine, others = set(block.instructions), set(other.instructions)
    more, fewer = mine - others, others - mine
    if not all([_is_apart(instruction) for one in (more, fewer) for instruction in one]):
        return False
    read = {value for instruction in more for value in instruction.inputs}.union(block.outputs)
    before = {value for instruction in fewer for value in instruction.inputs}.union(other.outputs)
    if changed := read ^ before:
        common = [one for one in mine & others if _is_apart(one)]
        changed.difference_update(*[instruction.inputs for instruction in common])
        # Values that only one of the blocks makes are read by what only this block has.
        made = ({value for one in some for value in one.outputs} for some in (more, fewer))
        if not changed <= set.symmetric_difference(*made):
            return False
    # Work that two products could do is the later one's.
    return _products(block) == _products(other)


def _is_apart(instruction: Instruction) -> bool:
    """Whether an instruction is fused with none that it reads from."""
    return instruction.op in COLLECTIVES or bool(instruction.bodies)


def _products(block: Block) -> list[Instruction]:
    return [instruction for instruction in block.instructions if instruction.op in _PRODUCTS]


def convolution_bytes(
    block: Block, products: Products = "least"
) -> dict[Instruction, tuple[tuple[int, ...], int]]:
    """Returns the least bytes that each convolution reads of each operand, and those it writes.

    An operand that is fused counts with the bytes in memory that are read for it, or with its own:
    whatever is less. What several operands read counts once. Work beside the convolution, in its
    kernel, does not count.
    """
    fusion = _Fusion(block, True, products)
    return {
        instruction: fusion.least_bytes(instruction)
        for instruction in block.instructions
        if instruction.op == "convolve"
    }


class _Fusion:
    """The values of a block that are never written to memory.

    Attributes:
        fused: values that their readers compute from the operands.
        fused_products: results of products that are fused with their only reader.
        within: for elementwise work that a product's kernel does, this product.
        in_place: slices that a product reads where they are, and updates that it writes in place.
        read_instead: the operands that are read instead of a fused value or a view.
        buffers: for some of these values, what of memory is read for them.
    """

    def __init__(self, block: Block, fused: bool, products: Products) -> None:
        self.into_products = products != "alone"
        self.maker: dict[Value, Instruction] = {}
        self.readers: dict[Value, list[Instruction | None]] = collections.defaultdict(list)
        self.read_instead: dict[Value, Sequence[Value]] = {}
        self.buffers: dict[Value, Sequence[Value]] = {}
        for instruction in block.instructions:
            for value in instruction.outputs:
                self.maker[value] = instruction
            for value in instruction.inputs:
                self.readers[value].append(instruction)
            if instruction.op in _VIEWS:
                self._shows(instruction)
        for value in block.outputs:
            self.readers[value].append(None)
        self.fused: set[Value] = set()
        self.fused_products: set[Value] = set()
        self.within: dict[Instruction, Instruction] = {}
        self.in_place: set[Instruction] = set()
        for instruction in reversed(block.instructions) if fused else ():
            op = instruction.op
            if op not in _FUSES or op in _VIEWS:
                continue
            for value in instruction.outputs:
                readers = self._through_views(value)
                if op in _FUSIBLE and self._fuses(instruction, readers):
                    self.fused.add(value)
                    self.read_instead[value] = instruction.inputs
                elif op in _SLICES:
                    if products == "within" and all(r and r.op in _PRODUCTS for r in readers):
                        self.in_place.add(instruction)
                elif op in _PRODUCTS and len(readers) == 1 and self.into_products:
                    if _is_fusible(readers[0]):
                        self.fused_products.add(value)
                    if products == "within":
                        self._does_within(instruction, value, readers[0])
        for instruction in block.instructions:
            self._writes_what_pays(instruction)

    def _writes_what_pays(self, instruction: Instruction) -> None:
        """Writes a fused value if its readers would read more bytes without that.

        A sum of many layers' results, as of a residual stream, is made of all of them. What it is
        made of comes earlier in the block, so that is decided before.
        """
        for value in instruction.outputs:
            readers = self._through_views(value)
            if value not in self.fused or len(readers) < 2:
                continue
            made_of = sum([buffer.bytes for buffer in self._read(value)])
            if len(readers) * made_of > made_of + (1 + len(readers)) * value.bytes:
                self.fused.remove(value)
                del self.read_instead[value], self.buffers[value]

    def _shows(self, view: Instruction) -> None:
        """Notes what a view shows; each result of a barrier shows one operand."""
        if view.op == "barrier":
            shown = zip(view.outputs, view.inputs, strict=True)
            self.read_instead.update((out, (value,)) for out, value in shown)
        else:
            self.read_instead.update(dict.fromkeys(view.outputs, view.inputs))

    def _does_within(self, product: Instruction, value: Value, reader: Instruction | None) -> None:
        """Notes what a product's kernel does with its result, which has a single reader."""
        while reader is not None and _fusible(reader) and reader.outputs[0] in self.fused:
            readers = self._through_views(reader.outputs[0])
            reader = readers[0] if len(readers) == 1 else None
        if reader is None:
            return
        if reader.op in _IN_PLACE and self._behind_views(reader.inputs[1]) is value:
            self.in_place.add(reader)
        elif _fusible(reader):
            self.within.setdefault(reader, product)

    def _behind_views(self, value: Value) -> Value:
        """Returns the value that views show."""
        while (maker := self.maker.get(value)) is not None and maker.op in _VIEWS:
            position = maker.outputs.index(value) if maker.op == "barrier" else 0
            value = maker.inputs[position]
        return value

    def _through_views(self, value: Value) -> list[Instruction | None]:
        """Returns the readers of a value, also through views; None: a reader outside the block."""
        readers = self.readers[value]
        if not any([reader is not None and reader.op in _VIEWS for reader in readers]):
            return readers if len(readers) < 2 else list(dict.fromkeys(readers))
        final_readers: dict[Instruction | None, None] = {}
        for reader in readers:
            if reader is not None and reader.op in _VIEWS:
                position = reader.inputs.index(value) if reader.op == "barrier" else 0
                for out in reader.outputs[position : position + 1]:
                    final_readers.update(dict.fromkeys(self._through_views(out)))
            else:
                final_readers[reader] = None
        return list(final_readers)

    def _fuses(self, maker: Instruction, readers: Sequence[Instruction | None]) -> bool:
        if len(readers) > 1 and maker.op in _COSTLY:
            return False
        kinds = _INTO_ALL if self.into_products and maker.op in _INTO_PRODUCTS else _INTO_SOME
        return all([reader is not None and reader.op in kinds for reader in readers])

    def bytes_of(self, instruction: Instruction) -> int:
        """Returns the bytes that an instruction reads and writes."""
        op, outputs = instruction.op, instruction.outputs
        if outputs[0] in self.fused or op in _VIEWS:
            return 0
        if instruction in self.in_place:
            return 0
        if op in _IN_PLACE:
            return 2 * sum([value.bytes for value in self._read(instruction.inputs[1])])
        total = 0
        for value in outputs:
            if value not in self.fused_products:
                total += value.bytes
        seen: set[Value] = set()
        part = outputs[0].bytes if op in _READING_PART else None  # of the first operand
        for value in instruction.inputs:
            size = 0
            for buffer in self._read(value):
                if buffer not in seen:
                    seen.add(buffer)
                    size += buffer.bytes
            total += size if part is None else min(size, part)
            part = None
        return total

    def least_bytes(self, instruction: Instruction) -> tuple[tuple[int, ...], int]:
        """Returns the least bytes read of each operand, and those written: see above."""
        seen: set[Value] = set()
        read = []
        for value in instruction.inputs:
            buffers = [buffer for buffer in self._read(value) if buffer not in seen]
            seen.update(buffers)
            read.append(min(value.bytes, sum([buffer.bytes for buffer in buffers])))
        written = [value.bytes for value in instruction.outputs if value not in self.fused_products]
        return tuple(read), sum(written)

    def _read(self, value: Value) -> Sequence[Value]:
        """Returns the values in memory that are read for a value, each once."""
        if value not in self.read_instead:
            return () if value in self.fused_products else (value,)
        if value not in self.buffers:
            self.buffers[value] = self._read_through(value)
        return self.buffers[value]

    def _read_through(self, value: Value) -> Sequence[Value]:
        buffers: list[Value] = []
        seen: set[Value] = set()
        front = [value]
        while front:
            value = front.pop()
            if value in seen:
                continue
            seen.add(value)
            if value in self.read_instead:
                front += self.read_instead[value]
            elif value not in self.fused_products:
                buffers.append(value)
        return buffers


def _fusible(instruction: Instruction) -> bool:
    return instruction.op in _FUSIBLE


def _is_fusible(instruction: Instruction | None) -> bool:
    return instruction is not None and _fusible(instruction)
