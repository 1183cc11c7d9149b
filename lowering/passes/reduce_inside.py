"""Reduce inside: a loop reduces its stacked results slice by slice, instead of all after the loop.

The partial gradients of a stack of layers need one reduction after the backward pass. That is the
fewest collectives, but no work is left to hide it. With this pass each iteration reduces its own
slice: the same bytes in as many collectives as there are iterations, which travel beside the work
of the loop where collectives are asynchronous. The summands of each element are the same.

It runs before collectives are joined, so each one has a single tensor. Small slices stay, since
each collective has a latency.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.parameters import Scan, parameters_of
from meshdsl.lowering.passes.blocks import each_block
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value, payload_bytes

_REDUCTIONS = ("all_reduce", "reduce_scatter")


def reduce_inside(program: SpmdProgram, smallest: int = 0) -> SpmdProgram:
    """Returns a program whose loops reduce their results; itself if nothing can be moved.

    Args:
        smallest: the least bytes of payload of one iteration's collective.
    """
    return each_block(program, lambda block: _reduced_inside(block, program.mesh, smallest))


def _reduced_inside(block: Block, mesh: Mesh, smallest: int) -> Block:
    readers: dict[Value, list[Instruction]] = defaultdict(list)
    for instruction in block.instructions:
        for value in instruction.inputs:
            readers[value].append(instruction)
    moved: set[Instruction] = set()
    changed: dict[Instruction, Instruction] = {}
    for instruction in block.instructions:
        if instruction.op == "scan":
            reductions = {
                number: readers[value][0]
                for number, value in enumerate(instruction.outputs)
                if len(readers[value]) == 1
                and value not in block.outputs
                and _can_move(instruction, number, readers[value][0])
                and payload_bytes(readers[value][0], mesh) >= smallest * instruction.runs
            }
            if reductions:
                moved.update(reductions.values())
                changed[instruction] = _with(instruction, reductions)
    if not moved:
        return block
    kept = [one for one in block.instructions if one not in moved]
    return replace(block, instructions=tuple(changed.get(one, one) for one in kept))


def _can_move(scan: Instruction, number: int, reader: Instruction) -> bool:
    """Whether a reduction of a scan's result can be one of each slice."""
    params = parameters_of(scan, Scan)
    if number < params["carries"] or reader.op not in _REDUCTIONS or len(reader.parts) > 1:
        return False
    values = (scan.outputs[number], reader.outputs[0])
    return not any(value.layout.axes(params["dim"]) for value in values)


def _with(scan: Instruction, reductions: dict[int, Instruction]) -> Instruction:
    """Returns a scan whose body reduces some results, by their numbers."""
    params = parameters_of(scan, Scan)
    body, dim = params["body"], params["dim"]
    written: list[Instruction] = []
    inner, outer = list(body.outputs), list(scan.outputs)
    for number, reduction in reductions.items():
        (outer[number],) = reduction.outputs
        whole = outer[number]
        slice_ = replace(inner[number], layout=whole.layout, local=whole.local.without([dim]))
        written.append(replace(reduction, inputs=(inner[number],), outputs=(slice_,)))
        inner[number] = slice_
    changed: Scan = {
        **params,
        "body": Block(body.inputs, (*body.instructions, *written), tuple(inner)),
    }
    return replace(scan, outputs=tuple(outer), params=changed)
