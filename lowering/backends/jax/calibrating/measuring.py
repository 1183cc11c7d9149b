"""Measuring: a calibration of the devices at hand, family by family.

`measured` yields the calibration after each family, so that a caller can write it to disk. Families
that a calibration has already are not measured again: one that was interrupted goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax

from meshdsl.layouts.calibration import Calibration
from meshdsl.layouts.costs import Sizes
from meshdsl.layouts.hardware import COLLECTIVES
from meshdsl.layouts.machine import Machine
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.backends.jax.calibrating.ranges import FLOAT32, Ranges
from meshdsl.lowering.backends.jax.calibrating.samples import (
    GROUP,
    beside,
    families,
    product,
    samples,
)
from meshdsl.lowering.backends.jax.calibrating.timing import Clock, Loop, dispatch_seconds
from meshdsl.lowering.program import Block, Instruction, Value
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import as_dtype

DISPATCH = "dispatch"
_TARGET = 0.02  # seconds of a call that is timed
_ARRAYS = (1, 8, 32, 128)
_REPEATED = 8  # runs of a block in an iteration
_LEAST = 1e-8  # seconds: no operation is free
_OVERLAPPED = 2**21  # bytes of a collective beside a product
_BESIDE = (256, 256, 256)  # that product


@dataclass(frozen=True)
class Progress:
    """One family has been measured, or a part of one: what it is, and how many are left."""

    family: str
    calibration: Calibration
    left: int


def machine_of(devices: Sequence[jax.Device]) -> Machine:
    """Returns the machine of some devices."""
    return Machine.here(devices[0].platform, devices[0].device_kind, len(devices))


def begun(devices: Sequence[jax.Device]) -> Calibration:
    """Returns a calibration without any measurement."""
    machine = machine_of(devices)
    clock = Clock.of(devices, machine.cores)
    return Calibration(machine, time.strftime("%Y-%m-%d"), clock.name, _memory(devices))


def missing(calibration: Calibration) -> list[str]:
    """Returns the families that a calibration lacks; `overlap/all_gather` is a family here."""
    devices, ranges = calibration.machine.devices, Ranges.of(calibration.machine.platform)
    names = [name for name in families(devices, ranges) if name not in calibration.seconds]
    names += [DISPATCH] if DISPATCH not in calibration.seconds else []
    if devices > 1:
        names += [f"overlap/{kind}" for kind in COLLECTIVES if kind not in calibration.overlap]
    return names


def measured(
    calibration: Calibration,
    devices: Sequence[jax.Device],
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Progress]:
    """Measures what a calibration lacks; yields it after each family.

    Args:
        is_over: whether the time is over; asked before each family.
    """
    names, ranges = missing(calibration), Ranges.of(calibration.machine.platform)
    clock = Clock.of(devices, calibration.machine.cores)
    idle = _idle(devices, clock) if names else 0.0
    for number, name in enumerate(names):
        if is_over():
            return
        kind, _, rest = name.partition("/")
        rows: dict[Sizes, float]
        if name == DISPATCH:
            rows = {(n,): dispatch_seconds(n, devices, clock) for n in _ARRAYS}
            calibration = calibration.with_family(name, rows)
        elif kind == "overlap":
            share = _overlap(rest, devices, clock)
            calibration = replace(calibration, overlap={**calibration.overlap, rest: share})
        else:
            rows = {
                sample.sizes: _seconds(sample.block, sample.mesh, devices, clock, idle)
                for sample in samples(name, len(devices), ranges)
            }
            calibration = calibration.with_family(name, rows)
        yield Progress(name, calibration, len(names) - number - 1)


def _idle(devices: Sequence[jax.Device], clock: Clock) -> float:
    """Returns the seconds of a run that does next to nothing, to be taken from those of others.

    It has one small kernel, as the one that makes a run depend on the run before. On CPUs that
    takes no time that counts.
    """
    if devices[0].platform == "cpu":
        return 0.0
    one, result = (Value(Shape(), as_dtype(FLOAT32), TensorLayout(), Shape()) for _ in range(2))
    block = Block((one,), (Instruction("exp", (one,), (result,)),), (result,))
    return _seconds(block, Mesh.parse(f"all:{len(devices)}"), devices, clock)


def _seconds(
    block: Block, mesh: Mesh, devices: Sequence[jax.Device], clock: Clock, idle: float = 0.0
) -> float:
    # Fewer devices than cores do not fill them: their processor time says nothing.
    if mesh.size < clock.cores:
        clock = Clock(False, clock.cores)
    repeated = 1 if devices[0].platform == "cpu" else _REPEATED
    return max(Loop.of(block, mesh, devices, repeated).seconds(clock, _TARGET) - idle, _LEAST)


def _overlap(kind: str, devices: Sequence[jax.Device], clock: Clock) -> float:
    """Returns the share of a collective that passes beside a product, from 0 to 1."""
    mesh = Mesh.parse(f"others:1,{GROUP}:{len(devices)}")
    work = product(FLOAT32, "rows", 1, *_BESIDE)
    both = beside(kind, mesh, _OVERLAPPED, work)
    collective = both.instructions[0]
    alone = [Block(one.inputs, (one,), one.outputs) for one in (collective, work)]
    together, *apart = (_seconds(block, mesh, devices, clock) for block in (both, *alone))
    return min(1.0, max(0.0, (sum(apart) - together) / min(apart)))


def _memory(devices: Sequence[jax.Device]) -> int:
    """Returns the bytes of one device; CPU devices share those of the machine."""
    facts = devices[0].memory_stats() or {}
    if "bytes_limit" in facts:
        return int(facts["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
