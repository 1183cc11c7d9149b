"""Reductions over named dims of one shard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.jax.operations.scaling import frexp, out_of_range, product, scaled
from meshdsl.lowering.parameters import AlongDim, Reduction, parameters_of
from meshdsl.lowering.program import Instruction
from meshdsl.tensors.dtypes import is_differentiable


def _reduction(compute: Callable[..., Any]) -> Emitter:
    """Returns the emitter of a reduction over some dims."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        local = instruction.inputs[0].local
        at = tuple(local.position(n) for n in parameters_of(instruction, Reduction)["over"])
        x, dtype = inputs[0], instruction.outputs[0].dtype
        wider = {} if x.dtype == dtype else {"dtype": dtype}
        return compute(x, axis=at, **wider).astype(dtype)

    return emit


def _prod(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    """Returns products; from mantissas and exponents if a partial product may leave the range."""
    x, local = jnp.asarray(inputs[0]), instruction.inputs[0].local
    at = tuple(local.position(n) for n in parameters_of(instruction, Reduction)["over"])
    result = jnp.prod(x, axis=at, dtype=x.dtype)
    if not is_differentiable(x.dtype):
        return result
    return lax.cond(
        out_of_range(result), lambda x: scaled(*product(*frexp(x), at)), lambda x: result, x
    )


def _arg(compute: Callable[..., Any]) -> Emitter:
    """Returns the emitter of argmax or argmin along a dim."""

    def emit(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
        at = instruction.inputs[0].local.position(parameters_of(instruction, AlongDim)["dim"])
        return compute(inputs[0], axis=at).astype(jnp.int32)

    return emit


EMITTERS: Mapping[str, Emitter] = {
    "sum": _reduction(jnp.sum),
    "prod": _prod,
    "argmax": _arg(jnp.argmax),
    "argmin": _arg(jnp.argmin),
    "max": _reduction(jnp.max),
    "min": _reduction(jnp.min),
}
