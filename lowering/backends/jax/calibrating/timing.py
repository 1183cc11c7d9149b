"""Timing: how long a block of instructions takes when all devices run it at once.

The block runs in a loop on the devices. Each iteration changes one element of an operand by the
last result, so no compiler can take the block out of the loop. The time of a call without
iterations is subtracted. Operands are donated and returned, so that no call copies them.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends.compiler_flags import recommended
from meshdsl.lowering.backends.jax.emitters import EMITTERS
from meshdsl.lowering.backends.jax.machine import Machine
from meshdsl.lowering.program import Block, Value

_ROUNDS = 5
_MOST = 2**20  # iterations of a call
_STARTS = 4  # a call takes at least so many times what it takes without iterations
_DRAWN = 2**20 + 1  # numbers; odd, so that rows differ
_ROWS = 1024  # that an index may name; see `samples`


@dataclass(frozen=True)
class Clock:
    """A clock for work on some devices.

    Attributes:
        processor: whether it counts the processor time of all threads, instead of wall time.
        cores: over how many cores that time is spread.
    """

    processor: bool
    cores: int

    @staticmethod
    def of(devices: Sequence[jax.Device], cores: int) -> Clock:
        """Returns the clock for devices; see `layouts.calibration`."""
        return Clock(devices[0].platform == "cpu" and len(devices) >= cores, cores)

    @property
    def name(self) -> str:
        return "processor" if self.processor else "wall"

    def time(self, call: Callable[[], Any]) -> float:
        """Returns the seconds of a call, with all that it starts on the devices."""
        count = time.process_time if self.processor else time.perf_counter
        start = count()
        jax.block_until_ready(call())
        return (count() - start) / (self.cores if self.processor else 1)


@dataclass
class Loop:
    """A block that is compiled to run in a loop, with operands on all devices of a mesh.

    Attributes:
        repeated: how often an iteration runs the block. The host of a GPU waits for each iteration
            before it starts the next one; several runs hide that.
    """

    run: Callable[..., Any]
    operands: list[jax.Array]
    repeated: int = 1

    @staticmethod
    def of(block: Block, mesh: Mesh, devices: Sequence[jax.Device], repeated: int = 1) -> Loop:
        """Compiles a block for as many devices as the mesh has.

        The first operand of each instruction that reads operands of the block is one that changes.

        Args:
            mesh: the axes that collectives of the block name.
            repeated: as of a `Loop`.
        """
        inputs = list(block.inputs)
        firsts = {one.inputs[0] for one in block.instructions if one.inputs[0] in inputs}
        changing = [n for n, value in enumerate(inputs) if value in firsts]
        sizes = tuple(size for _, size in mesh.axes)
        placed = jax.sharding.Mesh(
            np.array(devices[: mesh.size]).reshape(sizes), mesh.names, axis_types=_auto(sizes)
        )
        split = P(mesh.names)
        platform = devices[0].platform
        machine = Machine(mesh, EMITTERS, platform, torus=platform == "tpu")

        def local(count: Any, *stacked: jax.Array) -> Any:
            start = [array[0] for array in stacked]
            results = [jnp.zeros(v.local.sizes, v.dtype) for v in block.outputs]

            def once(carry: tuple[list[jax.Array], list[jax.Array]], _: Any) -> Any:
                operands, before = carry
                # Behind a barrier, all of a result is needed: not only the element that is read.
                before = lax.optimization_barrier(before)
                touched = [_touched(operands[n], before[0]) for n in changing]
                touched, _ = lax.optimization_barrier((touched, before))
                for number, array in zip(changing, touched, strict=True):
                    operands = [*operands[:number], array, *operands[number + 1 :]]
                return operands, [jnp.asarray(x) for x in machine.run(block, operands)]

            def body(_: Any, carry: tuple[list[jax.Array], list[jax.Array]]) -> Any:
                return functools.reduce(once, range(repeated), carry)

            operands, results = lax.fori_loop(0, count, body, (start, results))
            # Of the results, one element each: enough for them to be needed.
            some = [x.reshape(-1)[:1] for x in results]
            return jax.tree.map(lambda array: array[None], (operands, some))

        specs = (P(), *[split] * len(inputs))
        jitted = jax.jit(
            jax.shard_map(local, mesh=placed, in_specs=specs, out_specs=split, check_vma=False),
            donate_argnums=tuple(range(1, len(specs))),
        )
        rng = np.random.default_rng(0)
        operands = [
            jax.device_put(_data(rng, value, mesh.size), NamedSharding(placed, split))
            for value in inputs
        ]
        options: Any = dict(recommended(devices[0].device_kind, platform, False))
        compiled = jitted.lower(jnp.int32(1), *operands).compile(options or None)
        return Loop(compiled, operands, repeated)

    def seconds(self, clock: Clock, target: float) -> float:
        """Returns the seconds of one run: the median of some calls of about `target`."""

        def once(count: int) -> Any:
            self.operands, some = self.run(jnp.int32(count), *self.operands)
            return some

        def call(count: int) -> float:
            return clock.time(lambda: once(count))

        def median(count: int) -> float:
            return statistics.median(call(count) for _ in range(_ROUNDS))

        call(1)
        start = median(0)
        target = max(target, _STARTS * start)
        count, spent = 1, call(1)
        while spent - start < target / 8 and count < _MOST:
            count *= 4
            spent = call(count)
        count = max(1, min(_MOST, round(count * target / max(spent - start, 1e-9))))
        spent = median(count)
        while spent - start < target / 8 and count < _MOST:
            # Another job has disturbed what came before, and the difference would be noise.
            count = min(2 * count, _MOST)
            start, spent = median(0), median(count)
        return (spent - start if spent > start else spent) / count / self.repeated


def dispatch_seconds(arrays: int, devices: Sequence[jax.Device], clock: Clock) -> float:
    """Returns the seconds of a call of a program that does next to nothing to some arrays."""
    mesh = jax.sharding.Mesh(np.array(devices), ("all",), axis_types=_auto((len(devices),)))
    sharding = NamedSharding(mesh, P("all"))
    state = [jax.device_put(jnp.ones(len(devices)), sharding) for _ in range(arrays)]
    step = jax.jit(lambda values: [value + 1 for value in values], donate_argnums=0)

    def once() -> list[jax.Array]:
        nonlocal state
        state = step(state)
        return state

    return statistics.median([clock.time(once) for _ in range(12 * _ROUNDS)][_ROUNDS:])


def _touched(operand: jax.Array, result: jax.Array) -> jax.Array:
    """Returns an operand with one element that depends on a result."""
    element = result.reshape(-1)[:1].astype(operand.dtype).reshape((1,) * operand.ndim)
    return lax.dynamic_update_slice(operand, element, (0,) * operand.ndim)


def _data(rng: np.random.Generator, value: Value, devices: int) -> np.ndarray:
    """Returns an operand of all devices: numbers around one, or indices.

    Some are drawn, and repeated: to draw as many as a GPU works on takes longer than the work.
    """
    sizes = (devices, *value.local.sizes)
    count = min(math.prod(sizes), _DRAWN)
    whole = value.dtype.kind == "i"
    drawn: Any = rng.integers(0, _ROWS, count) if whole else rng.uniform(0.5, 1.5, count)
    return np.resize(drawn.astype(value.dtype), sizes)


def _auto(sizes: Sequence[int]) -> tuple[AxisType, ...]:
    return (AxisType.Auto,) * len(sizes)
