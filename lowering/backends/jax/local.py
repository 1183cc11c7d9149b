"""The user's own operations: functions of JAX arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.user_code import call
from meshdsl.lowering.parameters import Local, parameters_of
from meshdsl.lowering.program import Instruction


def _local(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    function = parameters_of(instruction, Local)["definition"].emitter("jax")
    return call(instruction, function, inputs)


EMITTERS: Mapping[str, Emitter] = {"local": _local}
