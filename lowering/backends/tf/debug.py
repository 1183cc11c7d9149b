"""Printing: the first device calls Python, in the order of the program."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.parameters import Print, parameters_of
from meshdsl.lowering.program import Instruction


def _print(machine: Machine, instruction: Instruction, inputs: Arrays) -> tf.Tensor:
    message = parameters_of(instruction, Print)["message"]

    def show(*arrays: np.ndarray) -> np.ndarray:
        print(message.text([np.asarray(array) for array in arrays]), flush=True)
        return np.zeros((), np.int32)

    def call() -> tf.Tensor:
        shown = tf.numpy_function(show, list(inputs), tf.int32)
        return tf.ensure_shape(shown, [])

    if machine.mesh.size == 1:
        return call()
    return tf.cond(machine.device == 0, call, lambda: tf.zeros([], tf.int32))


EMITTERS: Mapping[str, Emitter] = {"print": _print}
