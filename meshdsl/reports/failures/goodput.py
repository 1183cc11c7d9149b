"""Goodput: the share of time that a job with failures spends on steps that count.

Failures come at random, at a constant rate (Poisson), also during a restart. A job saves after
every interval of useful steps. The step waits while the state is copied to the host; the file is
complete some time later, and counts from then on. After a failure the job restarts from the last
complete file.

* Young 1974, "A first order approximation to the optimum checkpoint interval", CACM 17(9):
  sqrt(2 save mtbf).
* Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
  Generation Computer Systems 22(3): equation 37 is the interval, equation 20 the time that a job
  takes. `shares` is that time, with the delay of files that are written beside the steps, and with
  failures that are recovered from in place. Without both it is Daly's equation 20.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """The failures of a job, and what saving costs, in seconds.

    Attributes:
        mtbf: the mean time between failures of the job.
        save: for how long a step waits when the state is saved.
        write: after how long a checkpoint is complete.
        restart: from a failure to the first step after it, from a checkpoint.
        in_place: the share of failures that are recovered from without a checkpoint.
        recovery: what such a recovery costs, with the step that it repeats.
    """

    mtbf: float
    save: float
    write: float
    restart: float
    in_place: float = 0.0
    recovery: float = 0.0

    @property
    def lost_rate(self) -> float:
        """Failures per second that only a checkpoint recovers from."""
        return (1 - self.in_place) / self.mtbf

    @property
    def rate(self) -> float:
        """Those, per second without the time of recoveries: they may come during one."""
        recovered = self.in_place / self.mtbf
        return self.lost_rate - recovered * math.expm1(-self.lost_rate * self.recovery)

    @property
    def young(self) -> float:
        """The best interval to first order (Young 1974)."""
        return math.sqrt(2 * self.save / self.rate) if self.rate else math.inf

    @property
    def daly(self) -> float:
        """The best interval to a higher order (Daly 2006, equation 37)."""
        if not self.rate:
            return math.inf
        ratio = self.save * self.rate / 2
        if ratio >= 1:
            return 1 / self.rate
        return self.young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.save

    @property
    def best(self) -> float:
        """The best interval: the zero of the derivative of the goodput, by bisection.

        It is not shorter than the writing of a checkpoint, which the next one waits for.
        """
        if not self.rate:
            return math.inf
        low, high = 0.0, 1 / self.rate  # the zero is where rate * x = 1 - exp(-rate * (x + save))
        for _ in range(100):
            middle = (low + high) / 2
            if self.rate * middle < -math.expm1(-self.rate * (middle + self.save)):
                low = middle
            else:
                high = middle
        return max(high, self.write)


@dataclass(frozen=True)
class Shares:
    """Shares of the time of a job; they add up to 1.

    Attributes:
        useful: steps that count.
        saving: what these waited for saving.
        lost: steps that were taken again from a checkpoint, with what they waited.
        restarting: from a failure to the first step after it.
        recovering: the same without a checkpoint, and the steps repeated then.
    """

    useful: float
    saving: float
    lost: float
    restarting: float
    recovering: float


def shares(faults: Faults, interval: float) -> Shares:
    """Returns how a long job spends its time if it saves after an interval of useful steps.

    Between two failures that need a checkpoint, the job runs for a time that is distributed
    exponentially. The number of intervals that count is the number of checkpoints completed in it.

    Args:
        interval: seconds of steps between two checkpoints.
    """
    period = max(interval, faults.write) + faults.save
    recovered = faults.in_place / faults.mtbf * faults.recovery
    rate = faults.rate
    if not rate:  # all failures are recovered from in place
        running = 1 / (1 + recovered)
        part = running if math.isinf(interval) else interval / period * running
        return Shares(part, running - part, 0.0, 0.0, 1 - running)
    running = faults.lost_rate / rate
    restarting = -math.expm1(-rate * faults.restart)
    # Checkpoints that are completed before a failure, times its rate.
    reached = math.exp(-rate * (faults.restart + faults.write + period))
    counted = rate * reached / -math.expm1(-rate * period)
    useful, saving = interval * counted, (period - interval) * counted
    lost = 1 - restarting - useful - saving
    return Shares(
        running * useful, running * saving, running * lost, running * restarting, 1 - running
    )
