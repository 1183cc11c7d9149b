"""Results: what a program returns has zeros in pads, whatever they held inside of it.

Users hand whole arrays to functions of JAX, such as a norm, which add up pads with the rest.

An argument keeps the pads that it was given with, also where parts of it are written: a cache would
be copied in each step of decoding if its pads were set again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from meshdsl.lowering.parameters import Loop, parameters_of
from meshdsl.lowering.program import Instruction, Value
from meshdsl.lowering.writing.builder import BlockBuilder


def without_pads(
    builder: BlockBuilder, arguments: Collection[Value], results: Sequence[Value]
) -> list[Value]:
    """Returns the results of a block with zeros in pads.

    Args:
        arguments: the inputs of the block.
    """
    if not any(_has_pads(builder, value) for value in results):
        return [*results]
    made, zeroed = _makers(builder.instructions), []
    for value in results:
        if _has_pads(builder, value) and not _is_argument(value, arguments, made):
            builder.source = made[value].source
            value = builder.mask_pads(value, value.shape.names, 0)
        zeroed.append(value)
    return zeroed


def _has_pads(builder: BlockBuilder, value: Value) -> bool:
    return any(builder.has_pads(dim, value.layout.axes(dim.name)) for dim in value.shape)


def _makers(instructions: Sequence[Instruction]) -> Mapping[Value, Instruction]:
    return {value: one for one in instructions for value in one.outputs}


def _is_argument(
    value: Value, arguments: Collection[Value], made: Mapping[Value, Instruction]
) -> bool:
    """Whether a value is an argument, or one with parts that were written into it."""
    if value in arguments or value not in made:
        return value in arguments
    maker = made[value]
    if maker.op == "update":
        return _is_argument(maker.inputs[0], arguments, made)
    if maker.op not in ("scan", "while"):
        return False
    loop, at = parameters_of(maker, Loop), maker.outputs.index(value)
    if at >= loop["carries"]:
        return False
    carry, body = loop["consts"] + at, loop["body"]
    same = _is_argument(body.outputs[at], [body.inputs[carry]], _makers(body.instructions))
    return same and _is_argument(maker.inputs[carry], arguments, made)
