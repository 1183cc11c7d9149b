"""The program of one replica of a TPU job, as a concrete function of its number and shards."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.tf.emit import run, specs
from meshdsl.lowering.backends.tf.tpus.links import TpuLinks
from meshdsl.lowering.program import EFFECTS, SpmdProgram


def refuse_effects(program: SpmdProgram) -> None:
    """Checks that a program needs no Python on the host.

    Raises:
        ValueError: the program prints; the message lists all lines.
    """
    sources = [i.source for i, _ in program.block.walk() if i.op in EFFECTS]
    if sources:
        lines = [f"  at {source}  {source.code}".rstrip() for source in dict.fromkeys(sources)]
        raise ValueError(
            "\n".join(
                [
                    f"{program.name} prints, which a program on a TPU cannot: return the values "
                    "as results, or run it on hosts, without --tpu and TPU_NAME",
                    *lines,
                ]
            )
        )


def replica(program: SpmdProgram) -> Any:
    """Returns `replica(device, *shards) -> shards`, the same for all devices of the mesh.

    `device` is the number of the device in the mesh, an s32 scalar; `shards` are that device's.
    """

    def function(device: tf.Tensor, *shards: tf.Tensor) -> list[tf.Tensor]:
        return run(program, TpuLinks(program.mesh), device, shards, [])

    signature = [tf.TensorSpec([], tf.int32), *specs(program.block.inputs)]
    return tf.function(function, input_signature=signature, autograph=False).get_concrete_function()
