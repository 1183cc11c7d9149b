"""Machine: emits the blocks of a program as JAX operations on one device's arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.lowering.backends.common.machine import OneDeviceMachine
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.backends.compiler_flags import GPUS
from meshdsl.lowering.backends.jax import namespace
from meshdsl.lowering.backends.jax.operations.products import padded_einsum
from meshdsl.lowering.parameters import Loop, parameters_of
from meshdsl.lowering.program import Block, Instruction, Value

Arrays = Sequence[jax.Array]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


@dataclass(frozen=True)
class Machine(OneDeviceMachine):
    """Emits the instructions of one device of a mesh, inside `jax.shard_map`.

    A machine lives as long as one trace of JAX's.

    Attributes:
        platform: the platform whose fused kernels are used.
        torus: whether the devices are TPUs; see `torus_moves.steps`.
        unfilled: whether a loop's stacks of results begin uninitialised, instead of with zeros. JAX
            cannot differentiate such a loop without a copy of its stacks in every iteration.
        in_place: whether a loop writes to stacks where they are. JAX cannot differentiate such a
            loop without a copy of them in every iteration either.
        token: the result of the last effect, an s32 scalar; empty: there was none. The next effect
            has it as an operand, and so runs after it.
    """

    backend = "jax"
    xp: ClassVar[OneDevice] = namespace

    platform: str = "cpu"
    torus: bool = False
    unfilled: bool = False
    in_place: bool = False
    token: list[Any] = field(default_factory=list)

    def index(self, axes: Sequence[str]) -> Any:
        return device_index(axes)

    def product(self, equation: str, factors: Sequence[Any], dtype: np.dtype) -> Any:
        einsum = padded_einsum if self.platform in GPUS else self.xp.einsum
        return einsum(equation, factors, dtype)

    def run(self, block: Block, inputs: Arrays) -> list[jax.Array]:
        """Emits a block on one device's arrays."""
        arrays: dict[Value, Any] = dict(zip(block.inputs, inputs, strict=True))
        early = _early(block) if self.torus else {}
        for instruction in block.instructions:
            if instruction in early:
                tied = early[instruction]
                fixed = lax.optimization_barrier(tuple(arrays[v] for v in tied))
                arrays.update(zip(tied, fixed, strict=True))
            arguments = [arrays[v] for v in instruction.inputs]
            with jax.named_scope(_scope(instruction)):
                results = self.emitter(instruction)(self, instruction, arguments)
            if len(instruction.outputs) == 1 and not isinstance(results, list | tuple):
                results = (results,)
            arrays.update(zip(instruction.outputs, results, strict=True))
        return [arrays[v] for v in block.outputs]

    def last_effect(self) -> Any:
        """Returns the token."""
        return self.token[-1] if self.token else jnp.int32(0)

    def ordered(self, blocks: Sequence[Block]) -> tuple[list[jax.Array], Callable]:
        """Passes the token through a loop or a branch, if that has effects.

        Returns:
            The token in a list, which is empty without effects; and `run` for the blocks, whose
            arrays and results end with the token.
        """
        effects = any(block.has_effect for block in blocks)

        def run(block: Block, inputs: Arrays) -> list[jax.Array]:
            if not effects:
                return [jnp.asarray(array) for array in self.run(block, inputs)]
            outside, self.token[:] = self.token[:], inputs[-1:]
            results = [jnp.asarray(array) for array in self.run(block, inputs[:-1])]
            inside, self.token[:] = self.last_effect(), outside
            return [*results, inside]

        return [self.last_effect()] if effects else [], run

    def resume(self, results: Arrays, token: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the results of a loop or a branch without their token, which is kept."""
        results = list(results)
        if token:
            self.token[:] = [results.pop()]
        return results


def _scope(instruction: Instruction) -> str:
    """Returns the name of an instruction in profiles and HLO, with the user's file and line.

    For example `backward/Attention.query/einsum~transformer.py-88`; `backends.hlo` reads it.
    XLA drops everything after an `@`.
    """
    source = instruction.source
    line = f"{instruction.op}~{os.path.basename(source.file)}-{source.line}"
    parts = ["backward" if source.backward else "", source.layer, line]
    return "/".join(filter(None, parts))


def _early(block: Block) -> dict[Instruction, list[Value]]:
    """Returns the values behind a barrier before each loop of the backward pass.

    They are the starts of the loop's carries, and gradients that come before the loop but are read
    after it.
    """
    # XLA:TPU would compute such gradients after the loop, and keep their operands in memory while
    # it runs: for the gradient of an embedding, the logits.
    last = {v: n for n, instruction in enumerate(block.instructions) for v in instruction.inputs}
    last |= dict.fromkeys(block.outputs, len(block.instructions))
    gradients: list[Value] = []
    values: dict[Instruction, list[Value]] = {}
    for number, instruction in enumerate(block.instructions):
        if not instruction.source.backward:
            continue
        if instruction.op == "scan":
            params = parameters_of(instruction, Loop)
            first = params["consts"]
            starts = instruction.inputs[first : first + params["carries"]]
            late = [v for v in gradients if last.get(v, -1) > number]
            if starts and late:
                values[instruction] = list(dict.fromkeys([*starts, *late]))
        gradients += instruction.outputs
    return values


def device_index(axes: Sequence[str]) -> Any:
    """Returns this device's index along some axes, major first: an s32 scalar."""
    index = jnp.int32(0)
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index.astype(jnp.int32)
