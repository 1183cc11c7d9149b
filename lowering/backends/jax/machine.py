"""Machine: emits blocks of a program as JAX operations on one device's arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from meshdsl.lowering.backends.common.machine import OneDeviceMachine
from meshdsl.lowering.backends.common.namespace import OneDevice
from meshdsl.lowering.backends.jax import namespace
from meshdsl.lowering.parameters import Loop, parameters_of
from meshdsl.lowering.program import Block, Instruction, Value

Arrays = Sequence[jax.Array]
Emitter = Callable[["Machine", Instruction, Arrays], Any]


@dataclass(frozen=True)
class Machine(OneDeviceMachine):
    """One device of a mesh, inside `jax.shard_map`.

    Attributes:
        platform: whose fused kernels are used.
        torus: whether the devices are TPUs; see `steps`.
        token: what the last effect returned (an s32 scalar), if there was one: the next takes it,
            and so comes after it. A machine is there for one trace of JAX's.
    """

    backend = "jax"
    xp: ClassVar[OneDevice] = namespace

    platform: str = "cpu"
    torus: bool = False
    token: list[Any] = field(default_factory=list)

    def index(self, axes: Sequence[str]) -> Any:
        return device_index(axes)

    def run(self, block: Block, inputs: Arrays) -> list[jax.Array]:
        """Emits a block on one device's arrays."""
        held: dict[Value, Any] = dict(zip(block.inputs, inputs, strict=True))
        early = _early(block) if self.torus else {}
        for instruction in block.instructions:
            if instruction in early:
                tied = early[instruction]
                fixed = lax.optimization_barrier(tuple(held[v] for v in tied))
                held.update(zip(tied, fixed, strict=True))
            arguments = [held[v] for v in instruction.inputs]
            with jax.named_scope(_scope(instruction)):
                results = self.emitter(instruction)(self, instruction, arguments)
            if len(instruction.outputs) == 1 and not isinstance(results, list | tuple):
                results = (results,)
            held.update(zip(instruction.outputs, results, strict=True))
        return [held[v] for v in block.outputs]

    def last_effect(self) -> Any:
        """Returns the token."""
        return self.token[-1] if self.token else jnp.int32(0)

    def ordered(self, blocks: Sequence[Block]) -> tuple[list[jax.Array], Callable]:
        """Passes the token through a loop or a branch, if it has effects.

        Returns:
            The token, in a list that is empty where nothing has effects; and `run` for the blocks,
            which takes and returns their arrays with the token behind them.
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
        """Takes the token from behind the results of a loop or a branch, if it has one."""
        results = list(results)
        if token:
            self.token[:] = [results.pop()]
        return results


def _scope(instruction: Instruction) -> str:
    """Returns what profiles and HLO show an instruction as: `backward/Attention.query/einsum`."""
    source = instruction.source
    parts = ["backward" if source.backward else "", source.layer, instruction.op]
    return "/".join(filter(None, parts))


def _early(block: Block) -> dict[Instruction, list[Value]]:
    """Returns what loops of the backward pass wait for, with the starts of their carries.

    Those are gradients that come before a loop, and are read after it. XLA:TPU would compute them
    after it, and hold what they are made of while it runs: the logits, for that of an embedding.
    """
    last = {v: place for place, one in enumerate(block.instructions) for v in one.inputs}
    last |= dict.fromkeys(block.outputs, len(block.instructions))
    gradients: list[Value] = []
    found: dict[Instruction, list[Value]] = {}
    for place, one in enumerate(block.instructions):
        if not one.source.backward:
            continue
        if one.op == "scan":
            params = parameters_of(one, Loop)
            first = params["consts"]
            starts = one.inputs[first : first + params["carries"]]
            late = [v for v in gradients if last.get(v, -1) > place]
            if starts and late:
                found[one] = list(dict.fromkeys([*starts, *late]))
        gradients += one.outputs
    return found


def device_index(axes: Sequence[str]) -> Any:
    """Returns this device's index along some axes, major first: an s32 scalar."""
    found = jnp.int32(0)
    for axis in axes:
        found = found * lax.axis_size(axis) + lax.axis_index(axis)
    return found.astype(jnp.int32)
