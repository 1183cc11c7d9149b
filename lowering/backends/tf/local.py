"""The user's own operations: functions of TensorFlow's tensors, or of JAX's arrays.

JAX compiles its functions to StableHLO, which TensorFlow runs in one operation. JAX would narrow
64-bit numbers if `jax_enable_x64` is off, so it is on for functions with such operands or results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import jax2tf

from meshdsl.lowering.backends.tf.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.tf.namespace import tf_dtype
from meshdsl.lowering.backends.user_code import call
from meshdsl.lowering.parameters import Local, parameters_of
from meshdsl.lowering.program import Instruction

_WIDE = frozenset(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))
_PLATFORMS = ("cpu", "cuda", "tpu")


def _local(machine: Machine, instruction: Instruction, inputs: Arrays) -> list[tf.Tensor]:
    """Runs the user's function for TensorFlow, or else that for JAX."""
    definition = parameters_of(instruction, Local)["definition"]
    known = dict(definition.emitters)
    if "tf" in known or "jax" not in known:
        return call(instruction, definition.emitter("tf"), inputs)
    # `call` checks results while JAX traces: their dtypes and shapes are numpy's there.
    function = jax2tf.convert(
        lambda *arrays: call(instruction, known["jax"], arrays),
        with_gradient=False,
        native_serialization_platforms=_PLATFORMS,
    )
    values = (*instruction.inputs, *instruction.outputs)
    is_wide = any(value.dtype in _WIDE for value in values)
    with jax.enable_x64(True) if is_wide else contextlib.nullcontext():
        results = function(*inputs)
    rows = zip(results, instruction.outputs, strict=True)
    return [tf.ensure_shape(tf.cast(x, tf_dtype(v.dtype)), v.local.sizes) for x, v in rows]


EMITTERS: Mapping[str, Emitter] = {"local": _local}
