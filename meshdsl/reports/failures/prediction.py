"""What failures cost a training job: how often to save, and the share of time that is useful.

Each host writes the shards that it holds of the state, each once, at the storage's bandwidth. The
step waits while they are copied from the devices to the host; writing goes on beside the next
steps, as `train` does it. A restart ends with reading the same bytes.

A host whose shards are all on other hosts can get them from there. What that gains is a prediction
for such a recovery without a restart: `train` restarts, with `--host_copies` from copies in the
hosts' memory, else from checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshdsl.layouts.hardware import Hardware
from meshdsl.reports.failures.goodput import Faults, Shares, shares
from meshdsl.reports.failures.states import Failures

COPY_BANDWIDTH = 15.75e9  # bytes per second, from a device to its host: PCIe 3.0 with 16 lanes
RECONNECTING = 5.0  # seconds in which hosts notice a failure and connect again


@dataclass(frozen=True)
class Costs:
    """What the user says of the machine.

    Attributes:
        mtbf: seconds between two failures of one host, on average.
        storage: bytes per second that one host writes to and reads from checkpoints.
        restart: seconds from a failure until processes run and compiled programs are there.
    """

    mtbf: float
    storage: float
    restart: float


@dataclass(frozen=True)
class Way:
    """How a job goes on after failures.

    Attributes:
        steps: the steps between two checkpoints; None: none is needed.
        shares: how it spends its time then.
        given: the same at the number of steps that the user has chosen, if any.
    """

    faults: Faults
    steps: int | None
    shares: Shares
    given: Shares | None


@dataclass(frozen=True)
class Prediction:
    """The goodput of a job.

    Attributes:
        step: seconds of a step.
        every: the steps between two checkpoints that the user has chosen; None: not chosen.
        checkpoints: every failure restarts from a checkpoint.
        replicas: where other hosts hold what is lost, the state comes from them; None: every host
            holds what no other does.
        transfer: seconds in which a host gets its shards from others.
    """

    costs: Costs
    step: float
    every: int | None
    checkpoints: Way
    replicas: Way | None
    transfer: float

    @property
    def failures_per_day(self) -> float:
        """Failures of the whole job in a day."""
        return 86_400 / self.checkpoints.faults.mtbf


def predict(
    report: Failures, step: float, hardware: Hardware, costs: Costs, every: int | None = None
) -> Prediction:
    """Returns the goodput of a job.

    Args:
        report: who holds its state.
        step: seconds of a step.
        hardware: the devices, whose slow network carries shards between hosts.
        every: steps between two checkpoints, to compare with the best number.
    """
    hosts = report.domains.count
    storage = report.bytes_of_host / costs.storage
    faults = Faults(
        mtbf=costs.mtbf / hosts,
        save=report.bytes_of_device / COPY_BANDWIDTH,
        write=storage,
        restart=costs.restart + storage,
    )
    devices = min(report.devices_per_host, report.mesh.size)
    transfer = report.bytes_of_host / (hardware.network_bandwidth * devices)
    replicas = None
    if single := report.together.single_share:
        recovery = RECONNECTING + transfer + step
        # Another host may be lost before the first is back.
        second = (hosts - 1) / costs.mtbf * recovery * (1 - report.together.pair_share)
        in_place = single * math.exp(-second)
        recovered = Faults(
            faults.mtbf, faults.save, faults.write, faults.restart, in_place, recovery
        )
        replicas = _way(recovered, step, every)
    return Prediction(costs, step, every, _way(faults, step, every), replicas, transfer)


def _way(faults: Faults, step: float, every: int | None) -> Way:
    best = faults.best
    steps = None if math.isinf(best) else max(1, math.ceil(best / step))
    return Way(
        faults,
        steps,
        shares(faults, best if steps is None else steps * step),
        None if every is None else shares(faults, every * step),
    )
