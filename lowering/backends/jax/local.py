"""Operations of a user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.backends.user_code import call
from meshdsl.lowering.program import Instruction


def _local(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    function = instruction.params["definition"].emitter("jax")
    return call(instruction, function, inputs)


EMITTERS: Mapping[str, Emitter] = {"local": _local}
