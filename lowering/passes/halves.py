"""Halves: a program that computes two halves of a dim side by side.

A layer that is split over devices waits for its collectives: its products need the gathered
operand, and the next layer needs the reduced result. The two halves of a batch do not need each
other. So the collectives of one half can travel beside the work of the other one, and the numbers
stay the same. Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via Generic
Tensor Slicing and Overlapping" (arXiv 2409.15241), section 4, splits the batch in this way by hand.

`in_halves` rewrites a program for any dim. The halves are those of each device's own shard, so
nothing is sent for them:

* An instruction that works on each position of the dim by itself (`Kind.positionwise`) runs once
  for each half. So does a collective that moves other dims.
* One that sums over the dim, such as the product for the gradient of a weight, runs once for each
  half, and the results are added (`Kind.combined`).
* Operands of any other instruction are put together, and its results are divided again.
* A loop carries, reads and writes halves instead of the values that have the dim.

Weights lack the dim, so they are gathered once, and their gradients are reduced once. Nothing is
divided that has pads, or an odd number of positions on a device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.flops import instruction_flops
from meshdsl.lowering.instructions import kind_of
from meshdsl.lowering.parameters import AlongDim, LocalPositions, Scan, parameters_of
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tracing.source import UNKNOWN, Source

Halves = tuple[Value, Value]
_CANDIDATES = 2


def in_halves(program: SpmdProgram, dim: str) -> SpmdProgram:
    """Returns a program that computes the halves of a dim side by side; see above.

    It is the program itself if no value of it can be divided.

        in_halves(f.lower(tokens), "batch")
    """
    whole = [False] * len(program.block.inputs), [False] * len(program.block.outputs)
    block = _Writer(dim, program.mesh).block(program.block, *whole)
    if len(block.instructions) == len(program.block.instructions):
        return program
    return replace(program, block=block)


def candidates(program: SpmdProgram) -> list[str]:
    """Returns the dims whose halves may be worth it: those of most products come first.

    A collective has such a dim, and does not move it; so have the results of products.
    """
    travelling: set[str] = set()
    flops: dict[str, float] = defaultdict(float)
    for instruction, times in program.block.walk():
        if instruction.is_collective:
            for part in instruction.parts:
                names = {d.name for d in part.inputs[0].local if d.size > 1}
                travelling |= names - _named(part.params)
        elif kind_of(instruction.op).long and not instruction.bodies:
            for name in {d.name for d in instruction.outputs[0].local if d.size > 1}:
                flops[name] += times * instruction_flops(instruction)
    known = sorted(travelling & flops.keys(), key=lambda name: (-flops[name], name))
    return known[:_CANDIDATES]


class _Writer:
    """Writes one block in halves.

    Attributes:
        halves: the halves of the values that have been divided.
        whole: the values that are known whole.
    """

    def __init__(self, dim: str, mesh: Mesh) -> None:
        self.dim = dim
        self.mesh = mesh
        self.halves: dict[Value, Halves] = {}
        self.whole: set[Value] = set()
        self.written: list[Instruction] = []

    def block(self, block: Block, divided: Sequence[bool], wanted: Sequence[bool]) -> Block:
        """Returns a block in halves.

        Args:
            divided: for each input, whether the new block has its halves as two inputs.
            wanted: for each output, whether the new block returns its halves.
        """
        inputs: list[Value] = []
        for value, is_divided in zip(block.inputs, divided, strict=True):
            if is_divided:
                self.halves[value] = self._half(value), self._half(value)
                inputs += self.halves[value]
            else:
                self.whole.add(value)
                inputs.append(value)
        for instruction in block.instructions:
            self._write(instruction)
        outputs: list[Value] = []
        sources = {v: i.source for i in block.instructions for v in i.outputs}
        for value, is_wanted in zip(block.outputs, wanted, strict=True):
            source = sources.get(value, UNKNOWN)
            if is_wanted:
                outputs += self._divided(value, source)
            else:
                outputs.append(self._joined(value, source))
        return Block(tuple(inputs), tuple(self.written), tuple(outputs))

    def fits(self, value: Value) -> bool:
        """Whether a value can be divided: its shards have an even number of positions, no pads."""
        local, shape = value.local.find(self.dim), value.shape.find(self.dim)
        if local is None or shape is None or local.size % 2:
            return False
        return local.size * self.mesh.extent(value.layout.axes(self.dim)) == shape.size

    def _write(self, instruction: Instruction) -> None:
        values = (*instruction.inputs, *instruction.outputs)
        if not any([_has(value.local, self.dim) for value in values]):
            self._as_it_is(instruction)
        elif instruction.op == "scan" and self._loop(instruction):
            return
        elif instruction.op == "barrier":
            self._barrier(instruction)
        elif self._is_positionwise(instruction):
            self._twice(instruction)
        elif self._is_combined(instruction):
            self._combine(instruction)
        elif len(instruction.parts) > 1:  # a joined collective of tensors with and without the dim
            for part in instruction.parts:
                self._write(part)
        else:
            self._as_it_is(instruction)

    # Which instructions can be divided.

    def _is_positionwise(self, instruction: Instruction) -> bool:
        """Whether the halves of all results can be computed by the same instruction."""
        if not all(map(self.fits, instruction.outputs)):
            return False
        with_dim = [v for v in instruction.inputs if v.local.find(self.dim)]
        sizes = {v.local.get(self.dim).size for v in (*with_dim, *instruction.outputs)}
        if len(sizes) > 1 or not all(map(self.fits, with_dim)):
            return False
        if instruction.op == "reshape":
            return _keeps(self.dim, instruction)
        if instruction.op in ("take", "scatter_add") and self.dim in instruction.params["pairs"]:
            return len(with_dim) == len(instruction.inputs)
        return kind_of(instruction.op).positionwise and self.dim not in _named(instruction.params)

    def _is_combined(self, instruction: Instruction) -> bool:
        """Whether the results lack the dim and can be combined from those of both halves."""
        if any(value.local.find(self.dim) for value in instruction.outputs):
            return False
        with_dim = [v for v in instruction.inputs if v.local.find(self.dim)]
        if len({v.local.get(self.dim).size for v in with_dim}) > 1:
            return False
        named = {k: v for k, v in instruction.params.items() if k != "over"}
        combined = kind_of(instruction.op).combined and self.dim not in _named(named)
        return bool(combined) and all(map(self.fits, with_dim))

    # How they are written.

    def _as_it_is(self, instruction: Instruction) -> None:
        inputs = tuple(self._joined(v, instruction.source) for v in instruction.inputs)
        if inputs != instruction.inputs:
            instruction = replace(instruction, inputs=inputs)
        self.written.append(instruction)
        self.whole.update(instruction.outputs)

    def _twice(self, instruction: Instruction) -> None:
        operands = [self._operand(v, instruction.source) for v in instruction.inputs]
        # Without such an operand both halves are equal: a constant, or a broadcast.
        count = 2 if any(one is not two for one, two in operands) else 1
        results = []
        for number in range(count):
            inputs = tuple(pair[number] for pair in operands)
            outputs = tuple(map(self._half, instruction.outputs))
            params, source = instruction.params, instruction.source
            self.written.append(Instruction(instruction.op, inputs, outputs, params, source))
            results.append(outputs)
        self.halves.update(
            zip(instruction.outputs, zip(results[0], results[-1], strict=True), strict=True)
        )

    def _combine(self, instruction: Instruction) -> None:
        operands = [self._operand(v, instruction.source) for v in instruction.inputs]
        (result,) = instruction.outputs
        combined = kind_of(instruction.op).combined
        # Sums of half precision over the dim are rounded once.
        dtype = accumulator(result.dtype) if combined == "add" else result.dtype
        wide = dtype != result.dtype
        part = replace(result, dtype=dtype)
        parts = []
        for number in range(2):
            inputs = tuple(pair[number] for pair in operands)
            parts.append(replace(part))
            self.written.append(replace(instruction, inputs=inputs, outputs=(parts[-1],)))
        total = replace(part) if wide else result
        source = instruction.source
        self.written.append(Instruction(combined, tuple(parts), (total,), {}, source))
        if wide:
            self.written.append(Instruction("cast", (total,), (result,), {}, source))
        self.whole.add(result)

    def _barrier(self, barrier: Instruction) -> None:
        """Writes a barrier of all halves together."""
        inputs: list[Value] = []
        outputs: list[Value] = []
        for value, result in zip(barrier.inputs, barrier.outputs, strict=True):
            if value in self.halves and self.fits(result):
                inputs += self.halves[value]
                self.halves[result] = self._half(result), self._half(result)
                outputs += self.halves[result]
            else:
                inputs.append(self._joined(value, barrier.source))
                self.whole.add(result)
                outputs.append(result)
        self.written.append(replace(barrier, inputs=tuple(inputs), outputs=tuple(outputs)))

    def _loop(self, scan: Instruction) -> bool:
        """Writes a loop in halves; returns False if nothing of it can be divided."""
        params = parameters_of(scan, Scan)
        body, consts, carries = params["body"], params["consts"], params["carries"]
        if params["dim"] == self.dim:
            return False
        inner = _Writer(self.dim, self.mesh)
        divided = [
            self.fits(value) and self.fits(outer)
            for value, outer in zip(body.inputs, scan.inputs, strict=True)
        ]
        wanted = [
            self.fits(value) and self.fits(outer)
            for value, outer in zip(body.outputs, scan.outputs, strict=True)
        ]
        for number in range(carries):  # a carry is divided at the start, in the body and at the end
            both = divided[consts + number] and wanted[number]
            divided[consts + number] = wanted[number] = both
        if not any(divided) and not any(wanted):
            return False
        inputs: list[Value] = []
        outputs: list[Value] = []
        for value, is_divided in zip(scan.inputs, divided, strict=True):
            if is_divided:
                inputs += self._divided(value, scan.source)
            else:
                inputs.append(self._joined(value, scan.source))
        for value, is_wanted in zip(scan.outputs, wanted, strict=True):
            if is_wanted:
                self.halves[value] = self._half(value), self._half(value)
                outputs += self.halves[value]
            else:
                self.whole.add(value)
                outputs.append(value)
        changed: Scan = {
            **params,
            "body": inner.block(body, divided, wanted),
            "consts": consts + sum(divided[:consts]),
            "carries": carries + sum(wanted[:carries]),
        }
        if "ahead" in params:
            changed["ahead"] = _renumbered(params["ahead"], divided[consts + carries :])
        self.written.append(
            replace(scan, inputs=tuple(inputs), outputs=tuple(outputs), params=changed)
        )
        return True

    # Values, divided and put together.

    def _half(self, value: Value) -> Value:
        shape, local = _halved(value.shape, self.dim), _halved(value.local, self.dim)
        return Value(shape, value.dtype, value.layout, local)

    def _operand(self, value: Value, source: Source) -> Halves:
        """Returns what each half reads: the halves, or twice a value without the dim."""
        if value.local.find(self.dim) is None:
            return value, value
        return self._divided(value, source)

    def _divided(self, value: Value, source: Source) -> Halves:
        """Returns the halves of a value; writes them if it is only known whole."""
        if value not in self.halves:
            one, two = self._half(value), self._half(value)
            size = one.local.get(self.dim).size
            for half, start in ((one, 0), (two, size)):
                params: LocalPositions = {"dim": self.dim, "axes": (), "starts": (start,)}
                self.written.append(Instruction("local_slice", (value,), (half,), params, source))
            self.halves[value] = one, two
        return self.halves[value]

    def _joined(self, value: Value, source: Source) -> Value:
        """Returns a value whole; puts it together if only its halves are known."""
        if value not in self.whole and value in self.halves:
            params: AlongDim = {"dim": self.dim}
            self.written.append(Instruction("concat", self.halves[value], (value,), params, source))
            self.whole.add(value)
        return value


def _renumbered(numbers: Collection[int], is_divided: Sequence[bool]) -> tuple[int, ...]:
    """Returns the numbers that some values of a list have once it has halves for divided ones."""
    old = [n for n, two in enumerate(is_divided) for _ in range(1 + two)]
    return tuple(at for at, n in enumerate(old) if n in numbers)


@lru_cache(maxsize=1 << 10)
def _halved(shape: Shape, dim: str) -> Shape:
    return Shape(Dimension(d.name, d.size // 2) if d.name == dim else d for d in shape)


@lru_cache(maxsize=1 << 10)
def _has(shape: Shape, dim: str) -> bool:
    return shape.find(dim) is not None


def _keeps(dim: str, reshape: Instruction) -> bool:
    """Whether a reshape leaves each position of a dim as it is."""
    (value,), (result,) = reshape.inputs, reshape.outputs
    before, after = value.local, result.local
    if before.find(dim) is None:
        return False
    rows = [
        int(np.prod(shape.sizes[: shape.position(dim)], dtype=np.int64))
        for shape in (before, after)
    ]
    return before.get(dim) == after.get(dim) and rows[0] == rows[1]


def _named(parameter: Any) -> set[str]:
    """Returns the names in parameters: of dims, axes and whatever else."""
    return set(_names(parameter))


def _names(parameter: Any) -> Iterator[str]:
    if isinstance(parameter, str):
        yield parameter
    elif isinstance(parameter, dict):
        for value in parameter.values():
            yield from _names(value)
    elif isinstance(parameter, tuple):
        for value in parameter:
            yield from _names(value)
    elif is_dataclass(parameter):
        for each in fields(parameter):
            yield from _names(getattr(parameter, each.name))
