"""Ends: what comes last in a step, and all that must come before it.

With the state of the optimizer split over the axes of the batch (ZeRO-1), each device updates its
share of a parameter, and the shares are gathered. They are gathered after the new state of the
optimizer is known, and that needs gradients, most often all of them: the norm of all gradients
scales each one. So the gathers travel after the loops, where little is left to hide them.

`ends_of` finds, in the program of one device, what the new state of each parameter needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_

from meshdsl.layouts.layout import matches
from meshdsl.lowering.instructions import kind_of
from meshdsl.lowering.program import Instruction, SpmdProgram, Value

_MOST_ENDS = 4


@dataclass(frozen=True)
class End:
    """Parameters whose new values are known last.

    Attributes:
        paths: the paths of the parameters.
        before: instructions of the program's outer block that come before the new state of the
            optimizer of each of them, with all that is in their loops: the long ones, and what
            these need.
        itemsize: for each path, the least bytes of an element of the parameter and of its state.
    """

    paths: tuple[str, ...]
    before: frozenset[Instruction]
    itemsize: Mapping[str, int]


def ends_of(program: SpmdProgram) -> tuple[End, ...]:
    """Returns the ends of a step on one device; a parameter may be in several.

    A parameter without state of its own dims is in none: its update needs no gather.
    """
    block = program.block
    number = {instruction: at for at, instruction in enumerate(block.instructions)}
    maker = {value: one for one in block.instructions for value in one.outputs}
    needs: list[int] = []  # for each instruction, those that it needs, as bits
    long = 0
    for at, one in enumerate(block.instructions):
        mask = 1 << at
        for value in one.inputs:
            if value in maker:
                mask |= needs[number[maker[value]]]
        needs.append(mask)
        if one.bodies or kind_of(one.op).long:
            long |= 1 << at
    outputs = dict(zip(program.output_paths, block.outputs, strict=True))
    inputs = dict(zip(program.input_paths, block.inputs, strict=True))
    states = {value for path, value in inputs.items() if matches("optimizer", path)}
    masks: dict[str, int] = {}
    itemsize: dict[str, int] = {}
    for path, old in inputs.items():
        new = outputs.get(path)
        if new is None or new is old or matches("optimizer", path) or not matches("params", path):
            continue
        dims = frozenset(new.shape.names)
        mine = {value for value in states if frozenset(value.shape.names) == dims}
        before = [
            needs[number[one]]
            for one in _stateful(new, mine, maker, number)
            if needs[number[one]] & long
        ]
        if before:
            masks[path] = reduce(and_, before) & long
            sizes = [value.dtype.itemsize for value in (old, *mine)]
            itemsize[path] = min(sizes)
    chosen = sorted(set(masks.values()), key=lambda mask: (-mask.bit_count(), mask))
    step = -(-len(chosen) // _MOST_ENDS) or 1
    ends = []
    for mask in chosen[::step]:
        paths = tuple(path for path, own in masks.items() if own & mask == mask)
        all_ = reduce(or_, (row for at, row in enumerate(needs) if mask >> at & 1))
        first = frozenset(one for one, at in number.items() if all_ >> at & 1)
        ends.append(End(paths, first, itemsize))
    return tuple(ends)


def _stateful(
    new: Value,
    states: set[Value],
    maker: Mapping[Value, Instruction],
    number: Mapping[Instruction, int],
) -> Iterator[Instruction]:
    """Yields the instructions between the state of a parameter and its new value."""
    dims, order = frozenset(new.shape.names), list[Instruction]()
    open_, seen = [new], {new}
    while open_:
        value = open_.pop()
        if value not in maker or frozenset(value.shape.names) != dims:
            continue
        order.append(maker[value])
        for other in maker[value].inputs:
            if other not in seen:
                seen.add(other)
                open_.append(other)
    reading: set[Instruction] = set()
    for one in sorted(set(order), key=number.__getitem__):
        makers = (maker.get(value) for value in one.inputs)
        if not states.isdisjoint(one.inputs) or any(other in reading for other in makers):
            reading.add(one)
            yield one
