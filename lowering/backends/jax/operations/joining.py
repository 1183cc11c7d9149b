"""Shards put together along a dim."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from meshdsl.lowering.backends.jax.machine import Arrays, Emitter, Machine
from meshdsl.lowering.program import Instruction


def _concat(machine: Machine, instruction: Instruction, inputs: Arrays) -> Any:
    at = instruction.outputs[0].local.position(instruction.params["dim"])
    return jnp.concatenate(list(inputs), at)


EMITTERS: Mapping[str, Emitter] = {"concat": _concat}
