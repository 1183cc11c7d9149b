"""The collectives of a program, from the few things that `Links` do.

What a device sends is laid out as rows, one for each device of its group. A joined collective lays
the rows of its tensors side by side, so that they are one of TensorFlow's operations, if they are
as small as `Links.packed` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from meshdsl.lowering.backends.tf import namespace as xp
from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction, payload_bytes
from meshdsl.tensors.cuts import cut, join


class _Packing(NamedTuple):
    """How tensors travel in one buffer, side by side along its last axis."""

    pack: Callable[[Machine, Instruction, tf.Tensor], tf.Tensor]
    send: Callable[[Machine, Instruction, tf.Tensor], tf.Tensor]
    unpack: Callable[[Machine, Instruction, tf.Tensor], tf.Tensor]


def _at(part: Instruction, dim: str) -> int:
    return part.inputs[0].local.position(part.params[dim])


def _flat(machine: Machine, part: Instruction, x: tf.Tensor) -> tf.Tensor:
    return tf.reshape(x, [-1])


def _shaped(machine: Machine, part: Instruction, sent: tf.Tensor) -> tf.Tensor:
    return tf.reshape(sent, part.outputs[0].local.sizes)


def _blocks(dim: str) -> Callable[[Machine, Instruction, tf.Tensor], tf.Tensor]:
    """Returns what lays out, one row for each device, the blocks that a dim is cut into."""

    def pack(machine: Machine, part: Instruction, x: tf.Tensor) -> tf.Tensor:
        at, counts = _at(part, dim), machine.counts(part.params["axes"])
        x, devices = cut(tf, x, at, counts), math.prod(counts)
        sizes = x.shape.as_list()
        x = tf.reshape(x, [*sizes[:at], devices, sizes[at] // devices, *sizes[at + 1 :]])
        return tf.reshape(xp.moveaxis(x, at, 0), [devices, math.prod(sizes) // devices])

    return pack


def _merged(dim: str) -> Callable[[Machine, Instruction, tf.Tensor], tf.Tensor]:
    """Returns what joins blocks that came from each device, one row each, along a dim."""

    def unpack(machine: Machine, part: Instruction, rows: tf.Tensor) -> tf.Tensor:
        at, sizes = _at(part, dim), list(part.inputs[0].local.sizes)
        counts = machine.counts(part.params["axes"])
        if part.op == "all_to_all":
            split = _at(part, "split")
            sizes[split] = part.outputs[0].local[split].size
        blocks = xp.moveaxis(tf.reshape(rows, [rows.shape[0], *sizes]), 0, at)
        sizes[at] *= rows.shape[0]
        whole = part.outputs[0].local[at].size
        return join(tf, tf.reshape(blocks, sizes), at, counts, whole)

    return unpack


_PACKINGS = {
    "all_reduce": _Packing(
        _flat,
        lambda machine, one, x: machine.links.reduce(x, one.params["axes"], one.params["kind"]),
        _shaped,
    ),
    "reduce_scatter": _Packing(
        _blocks("dim"),
        lambda machine, one, x: machine.links.scatter(x, one.params["axes"]),
        _shaped,
    ),
    "all_gather": _Packing(
        _flat,
        lambda machine, one, x: machine.links.gather(x, one.params["axes"]),
        _merged("dim"),
    ),
    "all_to_all": _Packing(
        _blocks("split"),
        lambda machine, one, x: machine.links.exchange(x, one.params["axes"]),
        _merged("concat"),
    ),
    "permute": _Packing(
        _flat,
        lambda machine, one, x: machine.links.permute(x, one.params["pairs"]),
        _shaped,
    ),
}


def _emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    parts = instruction.parts
    if machine.mesh.extent(instruction.params["axes"]) == 1:
        return [_alone(part, x) for part, x in zip(parts, inputs, strict=True)]
    limit = machine.links.packed(instruction.op)
    small = [n for n, part in enumerate(parts) if payload_bytes(part, machine.mesh) <= limit]
    groups = [[n] for n in range(len(parts)) if n not in small] + [small] * bool(small)
    found: dict[int, tf.Tensor] = {}
    for group in groups:
        chosen = [(parts[n], inputs[n]) for n in group]
        found |= dict(zip(group, _together(machine, *zip(*chosen, strict=True)), strict=True))
    return [found[n] for n in range(len(parts))]


def _together(machine: Machine, parts: Sequence[Instruction], inputs: Arrays) -> list[tf.Tensor]:
    """Moves some tensors in one buffer."""
    packing = _PACKINGS[parts[0].op]
    packed = [packing.pack(machine, part, x) for part, x in zip(parts, inputs, strict=True)]
    moved = packing.send(
        machine, parts[0], packed[0] if len(packed) == 1 else tf.concat(packed, -1)
    )
    pieces: Sequence[tf.Tensor] = [moved]
    if len(packed) > 1:
        pieces = tf.split(moved, [one.shape[-1] for one in packed], -1)
    return [packing.unpack(machine, part, piece) for part, piece in zip(parts, pieces, strict=True)]


def _alone(part: Instruction, x: tf.Tensor) -> tf.Tensor:
    """Returns what a device without others would have received: from a permute maybe nothing."""
    if part.op == "permute" and not part.params["pairs"]:
        return tf.zeros_like(x)
    return tf.reshape(x, part.outputs[0].local.sizes)


EMITTERS: Mapping[str, Emitter] = dict.fromkeys(_PACKINGS, _emit)
