"""The program of one replica of a TPU job, as a concrete function of its number and shards."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from meshdsl.lowering.backends.tf.emit import run, specs
from meshdsl.lowering.backends.tf.tpu_links import TpuLinks
from meshdsl.lowering.program import SpmdProgram


def replica(program: SpmdProgram) -> Any:
    """Returns `replica(device, *shards) -> shards`, the same for all devices of the mesh.

    Args of the function: the number of the device in the mesh, an s32 scalar; the device's shards.
    """

    def function(device: tf.Tensor, *shards: tf.Tensor) -> list[tf.Tensor]:
        return run(program, TpuLinks(program.mesh), device, shards, [])

    signature = [tf.TensorSpec([], tf.int32), *specs(program.block.inputs)]
    return tf.function(function, input_signature=signature, autograph=False).get_concrete_function()
