"""Gradients: over which dims of the batch the gradient of each parameter is a sum.

Devices that have different parts of such a dim must add up all of the gradient. A parameter that no
part of the batch reaches, as where a term of the loss is its norm, has no such dim. Neither has a
table of which only the touched rows are updated (see `passes.touched_rows`), or one whose updates
are smaller than itself: devices may send these instead.

Guarantees:
    A dim is in the result only if the program of one device sums over it, by an instruction that
    makes a tensor with the dims of the parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from meshdsl.layouts.layout import matches
from meshdsl.lowering.costs.products import GROUPED
from meshdsl.lowering.instructions import Fusion, kinds_with
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value

_SUMS = frozenset(["einsum", "sum", "convolve", *GROUPED])
_SAME = kinds_with(lambda kind: kind.fusion is Fusion.FUSED)


def summed_dims(program: SpmdProgram) -> Mapping[str, frozenset[str]]:
    """Returns the dims that the gradient of each parameter is summed over, by its path."""
    outputs = dict(zip(program.output_paths, program.block.outputs, strict=True))
    inputs = dict(zip(program.input_paths, program.block.inputs, strict=True))
    states = {
        frozenset(value.shape.names) for path, value in inputs.items() if matches("optimizer", path)
    }
    makers: dict[Value, Instruction] = {}
    _note_makers(program.block, makers)
    dims = {}
    for path, old in inputs.items():
        new = outputs.get(path)
        if new is not None and new is not old and not matches("optimizer", path):
            # Without a state, the touched rows of a table may be all that is updated.
            all_rows = frozenset(old.shape.names) in states
            dims[path] = _summed(new, makers, ("scatter_add",) if all_rows else ())
    return dims


def _note_makers(block: Block, makers: dict[Value, Instruction]) -> None:
    for one in block.instructions:
        makers.update(dict.fromkeys(one.outputs, one))
        for body in one.bodies:
            _note_makers(body, makers)


def _summed(
    new: Value, makers: Mapping[Value, Instruction], others: Collection[str]
) -> frozenset[str]:
    """Returns the dims that are summed over between the batch and a new value.

    Args:
        others: operations that add up besides sums and products, if they add up much.
    """
    summed: set[str] = set()
    waiting, seen = [new], {new}
    while waiting:
        value = waiting.pop()
        maker = makers.get(value)
        if maker is None:
            continue
        names = set(value.shape.names)
        before: list[Value] = []
        if maker.op == "scan":
            before = [maker.bodies[0].outputs[maker.outputs.index(value)]]
        elif maker.op in _SUMS or (maker.op in others and _are_many(maker)):
            summed |= {name for one in maker.inputs for name in one.shape.names} - names
            if maker.op == "sum":  # one dim after another
                before = [one for one in maker.inputs if names < {*one.shape.names}]
        elif maker.op == "rename":
            before = [*maker.inputs]
        elif maker.op == "barrier":
            before = [maker.inputs[maker.outputs.index(value)]]
        elif maker.op in _SAME:
            before = [one for one in maker.inputs if {*one.shape.names} == names]
        new_ones = [one for one in before if one not in seen]
        seen.update(new_ones)
        waiting += new_ones
    return frozenset(summed)


def _are_many(scatter: Instruction) -> bool:
    """Whether it takes longer to send the updates than to add up the table and to send that."""
    return scatter.inputs[0].bytes >= 2 * scatter.outputs[0].bytes
