"""Waits: sums over split dims that a step needs one after another, and what may run beside them.

The mean of a norm over a split dim is added up over devices, and what is normalised with it waits
for it; the next norm needs that. `chain_of` finds such sums in a block of one device's program:
each needs the one before. Work that a sum needs, or that needs it, cannot run beside it. Only the
rest can hide how long the sum travels.

Two halves of a dim may be computed side by side (`lowering.passes.halves`). Then half of the work
may run beside a sum that has this dim, but each sum travels twice. `bounds.py` takes the better of
both. The halves of a dim that is summed, reshaped or renamed need each other.

A sum that only linear operations read may be delayed: it counts from where an operation cannot read
parts of it, since it is not linear, or since its result is split over the same axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.search.roles import Role

_NOT_LINEAR = frozenset(["rsqrt", "sqrt", "square", "exp", "log", "tanh", "less_equal", "maximum"])


@dataclass(frozen=True)
class Crossing:
    """A sum over dims that axes split.

    Attributes:
        dims: for the number of each role that splits a dim of the sum, this dim and its size.
    """

    dims: tuple[tuple[int, str, int], ...]


@dataclass(frozen=True)
class Chain:
    """Sums of a block that need each other, in order.

    Attributes:
        kept: for each sum, the dims, with their sizes, that it and what reads it have.
        beside: for each sum, the instructions that may run beside it or a later one, but need all
            sums before it.
    """

    crossings: tuple[Crossing, ...]
    kept: tuple[tuple[tuple[str, int], ...], ...]
    beside: tuple[tuple[Instruction, ...], ...]


def chain_of(block: Block, roles: Sequence[Role]) -> Chain:
    """Returns the longest chain of sums that the axes of some roles split.

    Args:
        roles: those of all axes; only those of the batch and of its other dims count.
    """
    finder = _Finder(block, roles)
    chosen = finder.longest()
    crossings = tuple(finder.crossings[sum_] for sum_ in chosen)
    return Chain(crossings, *finder.beside(chosen))


class _Finder:
    """Finds the chain of a block.

    Attributes:
        crossings: the sums over split dims.
    """

    def __init__(self, block: Block, roles: Sequence[Role]) -> None:
        self.block, self.roles = block, roles
        found = ((instruction, self._crossing(instruction)) for instruction in block.instructions)
        self.crossings = {instruction: row for instruction, row in found if row is not None}

    def _crossing(self, instruction: Instruction) -> Crossing | None:
        if instruction.op != "sum":
            return None
        sizes = {dim.name: dim.size for dim in instruction.inputs[0].shape}
        kept = set(instruction.outputs[0].shape.names)
        rows = []
        for number, role in enumerate(self.roles):
            mine = [dim for dim in role.dims if dim in sizes]
            counts = role.kind in ("data", "context") and len(mine) == 1
            if counts and mine[0] in role.splits and mine[0] not in kept:
                rows.append((number, mine[0], sizes[mine[0]]))
        return Crossing(tuple(rows)) if rows else None

    def _needs(self, reader: Instruction, value: Value, sum_: Instruction) -> bool:
        """Whether an instruction cannot read parts of a sum, which a value is linear in."""
        if reader.op in _NOT_LINEAR or (reader.op == "divide" and reader.inputs[-1] is value):
            return True
        names = {dim.name for result in reader.outputs for dim in result.shape}
        return any(
            not names.isdisjoint(self.roles[number].splits)
            for number, _, _ in self.crossings[sum_].dims
        )

    def longest(self) -> list[Instruction]:
        """Returns the sums of the longest chain."""
        none: tuple[int, Instruction | None] = (0, None)
        ended: dict[Value, tuple[int, Instruction | None]] = {}  # the sums that a value needs
        open_: dict[Value, Instruction] = {}  # the sum that a value may be a part of
        before: dict[Instruction, tuple[int, Instruction | None]] = {}
        for instruction in self.block.instructions:
            need, rest = none, None
            for value in instruction.inputs:
                row, sum_ = ended.get(value, none), open_.get(value)
                if sum_ is not None and self._needs(instruction, value, sum_):
                    row = max(row, (before[sum_][0] + 1, sum_), key=_count)
                elif sum_ is not None and (rest is None or before[rest][0] < before[sum_][0]):
                    rest = sum_
                need = max(need, row, key=_count)
            if instruction in self.crossings:
                before[instruction] = need
                rest = instruction
            for value in instruction.outputs:
                ended[value] = need
                if rest is not None:
                    open_[value] = rest
        chain: list[Instruction] = []
        last = max(ended.values(), key=_count, default=none)[1]
        while last is not None:
            chain.append(last)
            last = before[last][1]
        return chain[::-1]

    def beside(
        self, chain: Sequence[Instruction]
    ) -> tuple[tuple[tuple[tuple[str, int], ...], ...], tuple[tuple[Instruction, ...], ...]]:
        """Returns what sums of a chain keep, and what may run beside them: see `Chain`."""
        number = {sum_: at + 1 for at, sum_ in enumerate(chain)}
        after: dict[Value, int] = {}  # the last sum that a value needs
        open_: dict[Value, dict[int, frozenset[str]]] = {}  # sums, and the dims kept on the way
        kept: list[frozenset[str]] = [frozenset() for _ in chain]
        needed: dict[Instruction, int] = {}
        for instruction in self.block.instructions:
            need, rest = 0, dict[int, frozenset[str]]()
            for value in instruction.inputs:
                need = max(need, after.get(value, 0))
                for at, names in open_.get(value, {}).items():
                    if self._needs(instruction, value, chain[at - 1]):
                        need = max(need, at)
                        kept[at - 1] |= names
                    else:
                        rest[at] = rest.get(at, frozenset()) | names
            needed[instruction] = need
            if instruction in number:
                rest[number[instruction]] = frozenset(instruction.outputs[0].shape.names)
            for value in instruction.outputs:
                after[value] = need
                if rest:
                    names = frozenset(value.shape.names)
                    open_[value] = {at: known & names for at, known in rest.items()}
        first: dict[Value, int] = {}  # the first sum that needs a value
        found: list[list[Instruction]] = [[] for _ in chain]
        for instruction in reversed(self.block.instructions):
            none = len(chain) + 1
            own = number.get(instruction, none)
            least = min([own, *(first.get(value, none) for value in instruction.outputs)])
            for value in instruction.inputs:
                first[value] = min(least, first.get(value, none))
            if needed[instruction] < len(chain) and least > needed[instruction] + 1:
                found[needed[instruction]].append(instruction)
        sizes = [{dim.name: dim.size for dim in sum_.outputs[0].shape} for sum_ in chain]
        return tuple(
            tuple((name, size) for name, size in row.items() if name in names)
            for row, names in zip(sizes, kept, strict=True)
        ), tuple(tuple(rows) for rows in found)


def _count(row: tuple[int, Instruction | None]) -> int:
    return row[0]
