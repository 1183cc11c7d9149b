"""Stragglers: processes and devices that are slower than the others, which wait for them.

Collectives keep the processes of a job in step, so that the times of their steps are equal. What
differs is measured beside the steps: the time in which a process's devices wait for its data, and
the time that each device takes for a product of matrices on its own.

Guarantees:
    All processes look after the same step, about every `SECONDS`, when their devices are idle.
    A process is reported once, until it has been as fast as the others again.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.training.processes.agreement import SECONDS
from meshdsl.training.processes.watching import report
from meshdsl.training.reporting.time_shares import TimeShares

ALONE = (
    "straggler_factor: one device of one process has no others to be compared with; leave it out, "
    "or train on more"
)
_POLL = 1e-4  # seconds between two looks at whether a device is ready
# Size and number of the products, and their dtype: some milliseconds of a device of each kind.
_ON_CPUS, _ON_OTHERS = (256, 16, "float32"), (2048, 64, "bfloat16")


@dataclass
class StragglerWatch:
    """Compares the processes and devices of a run: `StragglerWatch(1.5, 20, shares)`.

    Attributes:
        factor: how many times as long as the median of the others a slow one takes; None: nothing
            is compared.
        steps: the steps for which it is slow before it is reported.
        shares: the times of this process.
        measures: returns the seconds of a product on each device of this process, by its number.
        says: takes each line that is reported; None: this process reports nothing.
    """

    factor: float | None
    steps: int
    shares: TimeShares
    measures: Callable[[], Mapping[int, float]] = field(default_factory=lambda: DeviceTimes())
    says: Callable[[str], None] | None = report
    metrics: dict[str, float] = field(default_factory=dict)
    _step: int = 0
    _seconds: Mapping[str, float] = field(default_factory=dict)
    _looked: float = float("-inf")
    _since: dict[int, int] = field(default_factory=dict)  # the step of the first of its slow looks
    _reported: set[int] = field(default_factory=set)

    def begin(self, step: int) -> None:
        """Says that the steps after `step` begin."""
        self._step, self._seconds = step, self.shares.seconds()

    def due(self) -> bool:
        """Whether this process looks when the processes agree; one alone agrees at every step."""
        if self.factor is None:
            return False
        return jax.process_count() > 1 or time.monotonic() - self._looked >= SECONDS

    def look(self, step: int) -> dict[str, Any]:
        """Returns this process's times since its last look, for `compare`.

        Its devices must have finished the step.
        """
        now, steps = self.shares.seconds(), max(step - self._step, 1)
        spent = {name: (now[name] - self._seconds.get(name, 0.0)) / steps for name in now}
        times = {str(number): seconds for number, seconds in self.measures().items()}
        self._step, self._seconds, self._looked = step, self.shares.seconds(), time.monotonic()
        return {
            "host": socket.gethostname(),
            "steps": spent["steps"],
            "data": spent["data"],
            "devices": times,
        }

    def compare(self, step: int, looks: Sequence[Mapping[str, Any] | None]) -> None:
        """Compares the looks of all processes after a step, and reports who is slow for long."""
        assert self.factor is not None
        slowest = _slowest([look for look in looks if look is not None])
        if not slowest:
            return
        self.metrics = dict(
            zip(("slowest_ratio", "slowest_process"), _greatest(slowest), strict=True)
        )
        for process, (ratio, what) in slowest.items():
            if ratio <= self.factor:
                self._since.pop(process, None)
                if process in self._reported:
                    self._reported.remove(process)
                    self._say(f"process {process} is as fast as the others again, at step {step:,}")
                continue
            since = self._since.setdefault(process, step)
            if process not in self._reported and step - since >= self.steps:
                self._reported.add(process)
                self._say(f"{what}, at every look from step {since:,} to {step:,}; all wait for it")

    def _say(self, text: str) -> None:
        if self.says is not None:
            self.says(text)


def _slowest(looks: Sequence[Mapping[str, Any]]) -> dict[int, tuple[float, str]]:
    """Returns, by process, by how many times it is slower than the others, and a sentence of it."""
    # A step takes the others' time and the longest wait for data, whichever process it is of.
    least = max(min((look["steps"] for look in looks), default=0.0), 0.0)
    own = [least + look["data"] for look in looks]
    devices = [(p, n, s) for p, look in enumerate(looks) for n, s in look["devices"].items()]
    found: dict[int, tuple[float, str]] = {}
    for process, seconds in enumerate(own):
        ratio, median = _against(seconds, own)
        if ratio is not None:
            name = f"process {process} on {looks[process]['host']}"
            found[process] = (
                ratio,
                f"{name} is slow: a step takes it {_shown(seconds)}, the others {_shown(median)} "
                "(median), as its devices wait for data",
            )
    times = [seconds for *_, seconds in devices]
    for process, number, seconds in devices:
        ratio, median = _against(seconds, times)
        if ratio is not None and (process not in found or ratio > found[process][0]):
            name = f"device {number} of process {process} on {looks[process]['host']}"
            found[process] = (
                ratio,
                f"{name} is slow: it takes {_shown(seconds)} for a product of matrices, the others "
                f"{_shown(median)} (median)",
            )
    return found


def _against(seconds: float, all_of_them: Sequence[float]) -> tuple[float | None, float]:
    """Returns the ratio of one time to the median of the others, and that; None: there is none."""
    others = [*all_of_them]
    others.remove(seconds)
    median = statistics.median(others) if others else 0.0
    return (seconds / median if median > 0 else None), median


def _greatest(slowest: Mapping[int, tuple[float, str]]) -> tuple[float, float]:
    ratio, process = max((ratio, process) for process, (ratio, _) in slowest.items())
    return ratio, float(process)


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


class DeviceTimes:
    """Measures how long each device of this process takes for some products: `DeviceTimes()()`."""

    def __init__(self) -> None:
        self._program: Callable[[Any], Any] | None = None
        self._x: Any = None

    def __call__(self) -> dict[int, float]:
        """Returns the seconds by the device's number, the shorter of two tries."""
        if self._program is None:
            self._program, self._x = _products()
            self._measured()  # compiles it
        first, second = self._measured(), self._measured()
        return {number: min(seconds, second[number]) for number, seconds in first.items()}

    def _measured(self) -> dict[int, float]:
        assert self._program is not None
        began = time.perf_counter()
        shards = self._program(self._x).addressable_shards
        waiting, found = {shard.device.id: shard.data for shard in shards}, {}
        while waiting:
            ready = [number for number, data in waiting.items() if data.is_ready()]
            now = time.perf_counter()
            for number in ready:
                jax.block_until_ready(waiting.pop(number))  # raises what the device reports
                found[number] = now - began
            if waiting and not ready:
                time.sleep(_POLL)
        return dict(sorted(found.items()))


def _products() -> tuple[Callable[[Any], Any], Any]:
    """Returns a program of products on each device of this process, and its argument."""
    devices = jax.local_devices()
    size, count, dtype = _ON_CPUS if devices[0].platform == "cpu" else _ON_OTHERS
    mesh = jax.sharding.Mesh(np.array(devices), ["device"])
    each = PartitionSpec("device")

    def products(x: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, y: y @ y / size, x)  # of ones: stays so

    sharding = NamedSharding(mesh, each)
    parts = [jax.device_put(jnp.ones((1, size, size), dtype), device) for device in devices]
    shape = (len(devices), size, size)
    x = jax.make_array_from_single_device_arrays(shape, sharding, parts)
    return jax.jit(jax.shard_map(products, mesh=mesh, in_specs=each, out_specs=each)), x
