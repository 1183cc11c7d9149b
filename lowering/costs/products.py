"""Products: the sizes of the product of matrices that an instruction is on one device."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.lowering.costs.flops import instruction_flops
from meshdsl.lowering.parameters import AlongDim, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dims import Shape

GROUPED = ("grouped_einsum", "grouped_outer")


def product_sizes(instruction: Instruction) -> tuple[int, int, int, int]:
    """Returns batch, rows, inner and columns of the product that an instruction is on one device.

    The batch of a grouped product is its groups, which are as large as each other.
    """
    if instruction.op in GROUPED:
        return _grouped_sizes(instruction)
    first, *others = (value.local for value in instruction.inputs)
    second = others[0] if others else first
    result = instruction.outputs[0].local
    sizes: Mapping[str, int] = {d.name: d.size for shape in (first, second) for d in shape}
    batch = rows = inner = columns = 1
    for name, size in sizes.items():
        kept, left, right = name in result.names, name in first.names, name in second.names
        if left and right:
            batch, inner = (batch * size, inner) if kept else (batch, inner * size)
        elif left:
            rows *= size
        else:
            columns *= size
    return batch, rows, inner, columns


def _grouped_sizes(instruction: Instruction) -> tuple[int, int, int, int]:
    x, y, group = (value.local for value in instruction.inputs)
    dim = parameters_of(instruction, AlongDim)["dim"]
    owner = y if instruction.op == "grouped_einsum" else instruction.outputs[0].local
    rest = owner.without([dim, *group.names])
    batch = owner.volume // rest.volume
    from_x = Shape(each for each in rest if x.find(each.name)).volume
    columns = rest.volume // from_x
    others = max(1, instruction_flops(instruction) // (2 * batch * rest.volume))
    if owner is y:
        return batch, others, from_x, columns
    return batch, from_x, others, columns
