"""Printing: the first device calls Python, in the order of the program.

A call waits for the previous call: its operand is the token that the previous call returned. Loops
and branches that print pass the token on (`Machine.ordered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine, device_index
from meshdsl.lowering.parameters import Print, parameters_of
from meshdsl.lowering.program import Instruction


def _print(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    message = parameters_of(instruction, Print)["message"]

    def show(token: Any, *arrays: Any) -> np.ndarray:
        print(message.text([np.asarray(array) for array in arrays]), flush=True)
        return np.asarray(token)

    def call(token: Any) -> Any:
        return io_callback(show, jax.ShapeDtypeStruct((), np.int32), token, *inputs)

    token = machine.last_effect()
    if machine.mesh.size > 1:
        first = device_index(machine.mesh.names) == 0
        token = lax.cond(first, call, lambda token: token, token)
    else:
        token = call(token)
    machine.token[:] = [token]
    return token


EMITTERS: Mapping[str, Emitter] = {"print": _print}
