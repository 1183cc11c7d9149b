"""The collectives of a program, from the few things that `Links` do.

What a device sends is laid out as rows, one for each device of its group. A joined collective lays
the rows of its tensors side by side, so that they are one of TensorFlow's operations, if they are
as small as `Links.packed` says.
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
        lambda machine, one, x: machine.links.reduce(
            x, axes_of(one), parameters_of(one, AllReduce)["kind"]
        ),
        unflatten,
    ),
    "reduce_scatter": Packing(
        pack_blocks("dim"),
        lambda machine, one, x: machine.links.scatter(x, axes_of(one)),
        unflatten,
    ),
    "all_gather": Packing(
        flatten,
        lambda machine, one, x: machine.links.gather(x, axes_of(one)),
        merge_blocks("dim"),
    ),
    "all_to_all": Packing(
        pack_blocks("split"),
        lambda machine, one, x: machine.links.exchange(x, axes_of(one)),
        merge_blocks("concat"),
    ),
    "permute": Packing(
        flatten,
        lambda machine, one, x: machine.links.permute(x, parameters_of(one, Permute)["pairs"]),
        unflatten,
    ),
}


def _emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    parts = instruction.parts
    if machine.mesh.extent(axes_of(instruction)) == 1:
        return [_alone(part, x) for part, x in zip(parts, inputs, strict=True)]
    limit = machine.links.packed(instruction.op)
    small = [n for n, part in enumerate(parts) if payload_bytes(part, machine.mesh) <= limit]
    groups = [[n] for n in range(len(parts)) if n not in small] + [small] * bool(small)
    found: dict[int, tf.Tensor] = {}
    for group in groups:
        own, arrays = [parts[n] for n in group], [inputs[n] for n in group]
        moved = send_packed(machine, _PACKINGS[instruction.op], own, arrays)
        found |= dict(zip(group, moved, strict=True))
    return [found[n] for n in range(len(parts))]


def _alone(part: Instruction, x: tf.Tensor) -> tf.Tensor:
    """Returns what a device without others would have received: from a permute maybe nothing."""
    if part.op == "permute" and not parameters_of(part, Permute)["pairs"]:
        return tf.zeros_like(x)
    return tf.reshape(x, part.outputs[0].local.sizes)


EMITTERS: Mapping[str, Emitter] = dict.fromkeys(_PACKINGS, _emit)
