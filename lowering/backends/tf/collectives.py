"""The collectives of a program, on top of the operations of `Links`.

The data that a device sends is rows, one for each device of its group. A joined collective
concatenates the rows of its tensors, so that TensorFlow runs one operation, if the tensors are at
most as large as `Links.packed` says.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from meshdsl.lowering.backends.common.packing import (
    Packing,
    flatten,
    merge_blocks,
    pack_blocks,
    send_packed,
    unflatten,
)
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import AllReduce, Permute, axes_of, parameters_of
from meshdsl.lowering.program import Instruction, payload_bytes

_PACKINGS = {
    "all_reduce": Packing(
        flatten,
        lambda machine, part, x: machine.links.reduce(
            x, axes_of(part), parameters_of(part, AllReduce)["kind"]
        ),
        unflatten,
    ),
    "reduce_scatter": Packing(
        pack_blocks("dim"),
        lambda machine, part, x: machine.links.scatter(x, axes_of(part)),
        unflatten,
    ),
    "all_gather": Packing(
        flatten,
        lambda machine, part, x: machine.links.gather(x, axes_of(part)),
        merge_blocks("dim"),
    ),
    "all_to_all": Packing(
        pack_blocks("split"),
        lambda machine, part, x: machine.links.exchange(x, axes_of(part)),
        merge_blocks("concat"),
    ),
    "permute": Packing(
        flatten,
        lambda machine, part, x: machine.links.permute(x, parameters_of(part, Permute)["pairs"]),
        unflatten,
    ),
}


def _emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    """Emits a collective; its small tensors are packed into one buffer."""
    parts = instruction.parts
    if machine.mesh.extent(axes_of(instruction)) == 1:
        return [_without_group(part, x) for part, x in zip(parts, inputs, strict=True)]
    limit = machine.links.packed(instruction.op)
    small = [n for n, part in enumerate(parts) if payload_bytes(part, machine.mesh) <= limit]
    groups = [[n] for n in range(len(parts)) if n not in small] + [small] * bool(small)
    results: dict[int, tf.Tensor] = {}
    for group in groups:
        group_parts, arrays = [parts[n] for n in group], [inputs[n] for n in group]
        received = send_packed(machine, _PACKINGS[instruction.op], group_parts, arrays)
        results |= dict(zip(group, received, strict=True))
    return [results[n] for n in range(len(parts))]


def _without_group(part: Instruction, x: tf.Tensor) -> tf.Tensor:
    """Returns the result of a collective in groups of one device; of a permute maybe zeros."""
    if part.op == "permute" and not parameters_of(part, Permute)["pairs"]:
        return tf.zeros_like(x)
    return tf.reshape(x, part.outputs[0].local.sizes)


EMITTERS: Mapping[str, Emitter] = dict.fromkeys(_PACKINGS, _emit)
