"""Operations of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.user_code import checked
from meshdsl.lowering.program import Instruction


def _local(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    function = instruction.params["definition"].emitter("jax")
    return checked(instruction, function(*inputs, **dict(instruction.params["params"])))


EMITTERS: Mapping[str, Emitter] = {"local": _local}
