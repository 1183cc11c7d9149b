"""One run: its steps, and what happens between them.

Guarantees:
    Between two reports the host does not wait for the device, except that it stays at most
    `_AHEAD` steps ahead, so that batches do not pile up.
    A run always ends between two steps. All reported metrics are then written and, where the run
    saves, the state after the last step is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np

from meshdsl.tensors.named_array import NamedArray
from meshdsl.training.checkpointing.checkpoints import Checkpoints
from meshdsl.training.checkpointing.grace import Grace
from meshdsl.training.checkpointing.saving import DATA, Saving
from meshdsl.training.data.feeding import Feed, Named
from meshdsl.training.health.hanging import HangWatch
from meshdsl.training.health.replicas import ReplicaCheck
from meshdsl.training.health.stragglers import StragglerWatch
from meshdsl.training.launching.job_time import JobTime
from meshdsl.training.nonfinite import FiniteCheck, NotFinite, RecentBatches, origin_of
from meshdsl.training.processes.agreement import SECONDS, Agreement
from meshdsl.training.programs import Programs
from meshdsl.training.reporting.meters import Meters
from meshdsl.training.reporting.pending import Pending
from meshdsl.training.reporting.profiling import Profiler
from meshdsl.training.reporting.time_shares import TimeShares
from meshdsl.training.state import TrainState
from meshdsl.training.stopping import Stopping

Sink: TypeAlias = Callable[[int, Mapping[str, Any]], None]  # (step, metrics) of each report
_AHEAD = 2  # steps that may wait for the device


@dataclass
class Run:
    """One run, between its first step and its last.

    Attributes:
        held_out: the batches of evaluations: `eval`, and `test` after the last step.
        begun: how many steps earlier runs have taken.
        evaluated: whether an earlier run took the last step and evaluated after it.
        reported: how many times earlier runs have reported metrics; None: unknown.
        done: how many steps have been taken.
        first_seconds: how long the first call took, if a supervisor has started this process.
        interrupted: whether a signal in any process ends the run.
        failure: why metrics could not be written.
        overdue: whether the processes have agreed that it is time for a checkpoint.
        saved_at: when the last checkpoint was saved, or the run began, by the clock of `shares`.
    """

    programs: Programs
    state: TrainState
    feed: Feed
    held_out: Mapping[str, Named]
    begun: int
    evaluated: bool
    reported: int | None
    steps: int
    at_once: int
    log_every: int
    eval_every: int
    meters: Meters
    finite_check: FiniteCheck
    replica_check: ReplicaCheck
    stragglers: StragglerWatch
    watch: HangWatch
    stopping: Stopping
    grace: Grace
    profiler: Profiler
    saving: Saving | None
    checkpoints: Checkpoints | None
    sinks: list[Sink]
    shares: TimeShares
    recent: RecentBatches
    job_time: JobTime | None = None
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)
    done: int = 0
    interrupted: bool = False
    first_seconds: float = 0.0
    failure: ValueError | None = None
    overdue: bool = False
    saved_at: float = 0.0

    def run(self) -> None:
        """Takes the remaining steps, unless something ends the run earlier.

        Raises:
            ValueError: the data ends early, a step was not finite and stops the run, or what it
                reports cannot be written; the state is saved.
            ReplicasDiffer: devices hold different replicas of the state, which is not saved.
        """
        jax.block_until_ready([array.data for array in _arrays(self.state)])
        self.done = self.begun
        self.saved_at = self.shares.clock()
        self.shares.begin_steps()
        self.stragglers.begin(self.begun)
        agreement = Agreement(self.begun)
        if self.stopping.stops.grace is not None:  # all must hear of a signal within it
            agreement.seconds = min(SECONDS, self.stopping.stops.grace / 4)
        pending = Pending(self.shares.clock)
        if self.begun >= self.steps and not self.evaluated:
            self._tell(self.begun, self._evaluate("eval") | self._evaluate("test"))
        for number in self._numbers():
            self._step(number, pending)
            if self.job_time is not None and number == self.begun + self.at_once:
                jax.block_until_ready(pending.metrics[-1]["loss"].data)
                self.job_time.stepped(number)
                self.first_seconds = self.shares.seconds()["steps"]
            if self.replica_check.due(number):
                self.replica_check.check(number, self.state)
            stops = self._stops(number, agreement, pending)
            last = number == self.steps or stops
            due = number == self.steps or number % self.eval_every == 0
            evaluates = due and not self.interrupted
            eval_loss = None
            if last or evaluates or number % self.log_every == 0:
                eval_loss = self._report(number, pending, evaluates)
                pending = Pending(self.shares.clock)
            self._save(number, eval_loss, last, evaluates and not self.interrupted)
            if stops:
                break
        if self.failure is not None:
            raise self.failure

    def _numbers(self) -> range:
        """Returns the number of the last step of each remaining call."""
        end = 0 if self.stopping.reached(self.begun) else self.steps + 1
        return range(self.begun + self.at_once, end, self.at_once)

    def _step(self, number: int, pending: Pending) -> None:
        """Takes the steps of one call, `number` the last of them.

        Raises:
            ValueError: the data has ended.
        """
        began = self.shares.clock()
        self.watch.at(None)  # compiling
        with self.shares.spent("compiling"):
            step, share = self.programs.compiled(self.feed.size), self.feed.share()
        pending.started += self.shares.clock() - began  # compiling a step is not taking it
        self.watch.at(f"waiting for the data of step {number}")
        with pending.waiting():
            batch = next(self.feed, None)
        if batch is None:
            self._report(self.done, pending)
            if self.done > self.begun:
                self._save(self.done, None, last=True)
            raise ValueError(
                f"the data ended after {self.done} of {self.steps} steps; give batches "
                "without end (itertools.cycle repeats a list), or fewer steps"
            )
        self.profiler.before(self.done + 1, number)
        pending.dispatching()
        self.watch.at(f"in step {number}")
        self.state, metrics = step(self.state, batch)
        if self.finite_check.stops and self.at_once == 1:
            self.recent.keep(number, batch)
        self.done = number
        pending.metrics.append(metrics)
        pending.shares.append(share)
        if len(pending.metrics) > _AHEAD:
            jax.block_until_ready(pending.metrics[-1 - _AHEAD]["loss"].data)
        if self.profiler.ends(number):
            jax.block_until_ready(metrics["loss"].data)
            self.profiler.close()

    def _stops(self, number: int, agreement: Agreement, pending: Pending) -> bool:
        """Whether the run ends early, after this step; the processes agree on it."""
        last = number == self.steps
        if not (self.stopping.reached(number) or last or agreement.due(number)):
            return False
        stops = self.stopping.due(number) or self.failure is not None
        look = self._look(number, pending) if self.stragglers.due() else None
        seconds = self.shares.clock() - self.saved_at
        saves = self.saving is not None and self.saving.overdue(seconds)
        signal = self.stopping.signal
        stops, signal, self.overdue = agreement.settle(number, stops, signal, look, saves)
        if look is not None:
            self.stragglers.compare(number, agreement.notes)
        self.interrupted = signal is not None
        if self.interrupted:
            self.grace.begin()
        self.stopping.signal = signal or self.stopping.signal
        return stops and (not last or self.interrupted)

    def _look(self, number: int, pending: Pending) -> Any:
        """Returns the times of this process, to be compared with those of others."""
        jax.block_until_ready(pending.metrics[-1]["loss"].data)
        self.shares.add("data", pending.settle())
        return self.stragglers.look(number)

    def _save(
        self, number: int, eval_loss: float | None, last: bool, evaluated: bool = False
    ) -> None:
        """Saves the state after a step, if it is time to; copies it in any case, if asked to."""
        if self.saving is None or self.checkpoints is None:
            return
        shared = last or self.overdue or self.saving.due(number)
        local = not shared and self.saving.due_locally(number)
        copies = self.saving.host_copies is not None
        if not (shared or local or copies):
            return
        position = {"feed": self.feed.position(), "evaluated": evaluated}
        if self.reported is not None:
            position["reports"] = self.reported + len(self.history)
        if self.saving.data is not None:
            position[DATA] = self.saving.data.state()
        self.watch.at(f"saving step {number}")
        # Saving waits for the steps that still run. Waiting before counts that as time of steps.
        jax.block_until_ready([array.data for array in _arrays(self.state)])
        if copies:
            with self.shares.spent("saving"):
                self.checkpoints.copy(number, self.state, position)
        if not (shared or local):
            return
        if self.interrupted:
            self.grace.saving(number, partial(self.checkpoints.seconds_to_save, self.state))
        self.replica_check.check(number, self.state)  # what is saved is equal everywhere
        with self.shares.spent("saving"):
            if local:
                self.checkpoints.save(number, self.state, position, local=True)
            else:
                self.checkpoints.save(number, self.state, position, eval_loss)
                self.overdue, self.saved_at = False, self.shares.clock()

    def _report(self, number: int, pending: Pending, evaluates: bool = False) -> float | None:
        """Fetches the metrics of the steps since the last report, and reports them.

        Returns:
            The loss of the held-out batches, if they were evaluated.

        Raises:
            ValueError: a step was not finite, and stops the run.
        """
        if not pending.metrics:
            return None
        names = ("loss", "first_nonfinite")
        fetched = jax.device_get([[m[name].data for m in pending.metrics] for name in names])
        self.shares.add("data", pending.settle())
        losses, firsts = ([float(v) for vs in metric for v in np.ravel(vs)] for metric in fetched)
        self.losses += losses
        seconds = (self.shares.clock() - pending.started) / (len(pending.metrics) * self.at_once)
        line = {name: float(np.ravel(value)[-1]) for name, value in pending.metrics[-1].items()}
        del line["first_nonfinite"]  # a number for `finite_check`, which reports the name
        line |= self.feed.counts()
        line |= self.meters.read(seconds, float(np.mean(pending.shares)))
        line |= self.stragglers.metrics
        if evaluates:
            line |= self._evaluate("eval")
            line |= self._evaluate("test") if number == self.steps else {}
        self._tell(number, line | self.shares.read() | self._of_job())
        try:
            self.finite_check.look(number - len(losses) + 1, losses, firsts)
        except NotFinite as error:
            self._save(number, None, last=True)
            batch = self.recent.of(error.step)
            self.watch.at(None)  # compiling
            origin = batch and origin_of(self.programs.checked_step(), self.state, batch)
            raise error.explained(origin) if origin else error from None
        self.recent.clear()
        return line.get("eval_loss")

    def _of_job(self) -> dict[str, float]:
        """Returns the shares of the time of the whole job, if a supervisor has started this."""
        if self.job_time is None:
            return {}
        return self.job_time.shares(self.done, self.step_seconds())

    def step_seconds(self) -> float:
        """Returns how long a step of this process took on average, without its first call.

        After the first call alone that one counts, which also connects the devices.
        """
        seconds, taken = self.shares.seconds()["steps"], self.done - self.begun
        if taken <= self.at_once:
            return seconds / max(taken, 1)
        return (seconds - self.first_seconds) / (taken - self.at_once)

    def _tell(self, number: int, line: dict[str, float]) -> None:
        """Passes metrics to the sinks; if one fails, the run ends as soon as all agree."""
        self.history.append({"step": number, **line})
        for sink in self.sinks if self.failure is None else ():
            try:
                sink(number, line)
            except ValueError as error:
                self.failure = error

    def _evaluate(self, name: str) -> dict[str, float]:
        """Returns the metrics of held-out batches, averaged over the batches: `eval_loss`, ..."""
        if name not in self.held_out:
            return {}
        with self.shares.spent("evaluating"):
            return self._evaluated(name)

    def _evaluated(self, name: str) -> dict[str, float]:
        self.watch.at(None)  # compiling
        evaluate = self.programs.compiled(name)
        metrics = []
        for batch in self.held_out[name]:
            self.watch.at("evaluating")
            metrics.append(evaluate(self.state.params, batch))
            if len(metrics) > _AHEAD:
                jax.block_until_ready(metrics[-1 - _AHEAD]["loss"].data)
            if self.stopping.signalled and jax.process_count() == 1:
                self.interrupted = True
                return {}  # an average over some of the batches would look like one over all
        return {
            f"{name}_{m}": float(np.mean([float(one[m]) for one in metrics])) for m in metrics[0]
        }


def _arrays(tree: Any) -> list[NamedArray]:
    return jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, NamedArray))
