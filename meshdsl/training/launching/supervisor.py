"""A supervisor: starts the processes of a job, and all of them again when one fails.

Collectives of JAX do not survive a lost process: on CPUs one that is left may stay blocked for half
a minute, and the end of process 0 aborts the others. So the supervisor kills those that are left,
and all go on from the last checkpoint.

Guarantees:
    A process that fails is named once, with its signal or exit code and its last lines.
    What would end alike is not started again: see `FINAL` of `exit_codes`.
    SIGTERM, SIGINT and a notice, SIGUSR1, reach every process, so that the run saves its state and
    ends. Where other hosts can go on, only this one leaves the job, and another one leads it.
    No process outlives its supervisor, but for one that SIGKILL does not end, which is reported:
    its host takes no further part.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshdsl.training.checkpointing.copies.together import Together, of_no_use, together_with
from meshdsl.training.exit_codes import (
    DONE,
    FAILED,
    FINAL,
    INTERRUPTED,
    MISTAKE,
    NOTICE,
    TERMINATED,
    UNFINISHED,
)
from meshdsl.training.launching.crew import Crew, Missing, Process
from meshdsl.training.launching.events import (
    NAME,
    Events,
    Losses,
    first_step,
    newest,
    repeated_seconds,
)
from meshdsl.training.launching.job_time import START
from meshdsl.training.launching.signals import handled
from meshdsl.training.processes.meeting import listed

_PARTING = 90.0  # seconds in which the others end after the first has ended as it should
_FIRST_DELAY = 1.0  # seconds before a restart without a checkpoint since the last; doubles then
_LONGEST_DELAY = 60.0  # seconds before any restart
# Exit codes of a start that ends so that another one can begin: schedulers may send SIGTERM to all
# processes of a host, and some do not listen to signals yet.
_SAVED = (UNFINISHED, TERMINATED, INTERRUPTED, -signal.SIGTERM, -signal.SIGINT, -(NOTICE or 0))
_GROWS = "more processes have come: all save their state and start again, with them"
_POLL = 0.5  # seconds between two looks at the time
_OUT_OF_MEMORY = "; if nobody killed it, the host may have run out of memory (see dmesg)"


@dataclass(frozen=True)
class Launch:
    """What to start, and how often again.

    Attributes:
        crew: the processes, wherever they run.
        workdir: the folder of the run.
        max_restarts: how often all are started again within `window` seconds.
        report: takes each line that the supervisor writes.
        host_copies: the folder of copies in memory that the processes were given, if any.
    """

    crew: Crew
    workdir: Path
    max_restarts: int
    window: float
    report: Callable[[str], None]
    host_copies: Path | None = None


@dataclass
class Supervisor:
    """Runs a job to its end: `Supervisor(launch).run()` returns the exit code.

    Attributes:
        has_unkillable: whether SIGKILL has not ended a process of this host.
    """

    launch: Launch
    processes: Sequence[Process] = ()
    start: int = 0
    has_unkillable: bool = False
    _signal: int | None = None  # the signal that ends the job
    _leaving: int | None = None  # the signal that ends this host's part of it
    _needed: str = ""  # why the job ends with this host
    _renewing: bool = False
    _rehearsed: int = 0  # the start for which programs were compiled ahead
    _left: bool = False
    _last_signal: int | None = None  # the last signal that was passed on
    _wakes: threading.Event = field(default_factory=threading.Event)
    _restarts: deque[float] = field(default_factory=deque)
    _in_vain: int = 0  # failures in a row without a checkpoint between them
    _seen: float = 0.0  # when the end of a start was seen, by `time.monotonic`
    _losses: Losses = field(default_factory=Losses)

    def run(self) -> int:
        """Starts the processes until they end as they should, or restarts are of no use.

        Returns:
            The exit code of the process that decided it; 128 and its number for a signal.

        Raises:
            ValueError: the processes cannot be started on this host.
        """
        code = FAILED
        try:
            with handled(self._come, self._kill):
                code = self._run()
            if self._needed:
                self.launch.report(self._needed)
        finally:
            self.launch.crew.close(code, self._left)
        return code

    def _run(self) -> int:
        events = Events(self.launch.workdir / NAME)
        began = time.monotonic()
        down_since: float | None = None
        while True:
            self._renewing = False
            try:
                processes = self.launch.crew.assemble(self)
            except Missing as missing:
                if self.start == 0:
                    raise ValueError(str(missing)) from None
                self.launch.report(str(missing))
                return FAILED
            if self._signal is not None:
                return self._exit_code(-self._signal)
            if self._leaving is not None:
                return self._leave()
            reached = newest(self.launch.workdir, self._copies())
            first = self._started(processes, events, reached, down_since)
            down_since = first.ended_at
            assert first.code is not None
            if self._renewing and first.code in _SAVED and self._signal is None:
                events.write("renewed", start=self.start)
                down_since = None
                if self.has_unkillable:
                    return self._step_aside()
                if self._leaving is not None:
                    return self._leave()
                continue
            if self._is_final(first.code):
                events.write("ended", start=self.start, code=first.code)
                self._recovered(first_step(events.file, self.start))
                self._conclude(first, time.monotonic() - began)
                return self._exit_code(first.code)
            again = self._failed(first, events, reached)
            if self.has_unkillable:
                return self._step_aside()
            if not again or self._signal is not None:
                return self._exit_code(first.code)
            if self._leaving is not None:
                return self._leave()

    @property
    def ending(self) -> bool:
        """Whether a signal has ended the job, or this host's part of it."""
        return self._signal is not None or self._leaving is not None

    def _come(self, number: int) -> None:
        """Takes a signal to this host: the job goes on without it, or ends."""
        if self._leaving is not None:  # a notice before was the first one
            return
        needed = None if self._signal is not None else self.launch.crew.leave()
        if self._signal is None and needed is None and NOTICE is not None:
            self._leaving = number
            self._wakes.set()
            self.renew()
            return
        if needed:
            name = signal.Signals(number).name
            self._needed = f"{name} to this host has ended the job: {needed}"
        self.pass_on(number)

    def _leave(self) -> int:
        """Returns the exit code of this host's part of the job, which goes on without it."""
        assert self._leaving is not None
        self._left = True
        self.launch.report(
            f"{signal.Signals(self._leaving).name} takes this host away: the others go on, and one "
            "of them leads the job"
        )
        return UNFINISHED if self._leaving == NOTICE else 128 + self._leaving

    def _step_aside(self) -> int:
        """Lets the others go on without this host, on which SIGKILL did not end a process."""
        needed = None if self._leaving is not None else self.launch.crew.leave()
        self._left = needed is None
        self._needed = f"the job ends with this host: {needed}" if needed else ""
        return FAILED

    def pass_on(self, number: int) -> None:
        """Passes a signal on to every process, so that the job ends.

        A scheduler sends it to every host. A process that gets two of them exits without saving.
        """
        if self._last_signal in (None, NOTICE) and number != self._last_signal:
            self._signal, self._last_signal = self._signal or number, number
            self._wakes.set()
            again = self._renewing and number == NOTICE  # they save already
            for process in () if again else self.processes:
                process.send(number)

    def renew(self) -> None:
        """Has all processes save their state and end, so that others can start."""
        if not self._renewing and NOTICE is not None and self._signal is None:
            self._renewing = True
            for process in self.processes:
                process.send(NOTICE)

    def _started(
        self,
        processes: Sequence[Process],
        events: Events,
        reached: tuple[int, float] | None,
        down_since: float | None,
    ) -> Process:
        """Starts all processes and waits; returns the one whose end decides what comes next."""
        exits: queue.SimpleQueue[Process] = queue.SimpleQueue()
        self.start += 1
        numbers = [process.number for process in processes]
        facts: dict[str, Any] = {"processes": numbers, "step": _step(reached)}
        if down_since is not None:
            down = time.monotonic() - down_since
            facts["down_seconds"] = round(down, 3)
            self._losses = _sum(self._losses, Losses(0, 0.0, down))
        events.write("started", start=self.start, **facts)
        self.processes, variables = processes, {START: str(self.start)}
        try:
            for process in processes:
                self.launch.crew.begin(process, variables, exits.put)
            came = self._last_signal or (NOTICE if self._renewing else None)
            if came is not None:  # while they were started
                for process in processes:
                    process.send(came)
            first = self._first_to_decide(exits)
            self._seen = time.monotonic()
            return first
        except OSError as error:
            raise ValueError(
                f"process {process.number} cannot be started on this host: {error.strerror}"
            ) from error
        finally:
            for process in processes:
                process.stop()
            for process in processes:
                if not process.kill():
                    self.has_unkillable = True
                    self.launch.report(process.unkillable)

    def _first_to_decide(self, exits: queue.SimpleQueue[Process]) -> Process:
        """Returns the first process that failed; else the first one that ended not as done."""
        ended: list[Process] = []
        deadline = float("inf")
        while len(ended) < len(self.processes) and time.monotonic() < deadline:
            try:
                process = exits.get(timeout=_POLL)
            except queue.Empty:
                self._grow()
                self._rehearse()
                continue
            assert process.code is not None
            if not self._is_final(process.code):
                return process
            ended.append(process)
            deadline = min(deadline, time.monotonic() + _PARTING)
        return next((process for process in ended if process.code != DONE), ended[0])

    def _grow(self) -> None:
        """Starts anew with more processes, once the ones that run have taken a step."""
        if self._renewing or self._signal is not None or not self.launch.crew.grows():
            return
        if first_step(self.launch.workdir / NAME, self.start) is not None:
            self.launch.report(_GROWS)
            self.renew()

    def _rehearse(self) -> None:
        """Has programs compiled ahead, once the processes of a start have taken a step."""
        crew = self.launch.crew
        if self._rehearsed == self.start or self._renewing or self._signal is not None:
            return
        try:
            if crew.rehearses() and first_step(self.launch.workdir / NAME, self.start) is not None:
                self._rehearsed = self.start
                crew.rehearse()
        except (OSError, ValueError) as error:
            self._rehearsed = self.start  # else it would be reported twice a second
            self.launch.report(f"nothing is compiled ahead, and the job goes on: {error}")

    def _is_final(self, code: int) -> bool:
        """Whether a start that ended with this code is the last one."""
        if self._signal is not None:
            return True
        if code == MISTAKE:  # a command that has run before is no mistake; others may be missing
            return self.start == 1
        return code in FINAL or code in (-signal.SIGTERM, -signal.SIGINT)

    def _failed(self, first: Process, events: Events, before: tuple[int, float] | None) -> bool:
        """Reports a failure and waits before the next start; returns whether there is one."""
        launch, now = self.launch, time.monotonic()
        copies = self._copies()
        reached = newest(launch.workdir, copies)
        ran, since = first.ended_at - first.began, time.time() - (now - first.ended_at)
        stepped = first_step(events.file, self.start)
        self._recovered(stepped)
        fresh = reached is not None and (before is None or reached[0] != before[0])
        repeated = repeated_seconds(since, ran, stepped, reached if fresh else None)
        self._losses = _sum(self._losses, Losses(1, repeated, 0.0))
        events.write(
            "failed",
            time=round(since, 3),
            start=self.start,
            process=first.number,
            host=first.host,
            code=first.code,
            cause=first.end(),
            step=_step(reached),
            seen_seconds=round(self._seen - first.ended_at, 3),
            ran_seconds=round(ran, 3),
            repeated_seconds=round(repeated, 3),
        )
        others = len(self.processes) - 1
        stopped = f"; the other{'s' * (others > 1)} had to be stopped" if others else ""
        why = _OUT_OF_MEMORY if first.code == -signal.SIGKILL else ""
        launch.report(f"process {first.number} {first.end()} after {ran:.0f} s{stopped}{why}")
        self._show_lines(first)
        self._in_vain = 0 if fresh else self._in_vain + 1
        if self.has_unkillable:
            return False
        launch.crew.note_failure(first, fresh)
        while self._restarts and now - self._restarts[0] > launch.window:
            self._restarts.popleft()
        if len(self._restarts) >= launch.max_restarts:
            launch.report(
                f"it is not started again: {len(self._restarts)} restarts within "
                f"{launch.window:g} s are as many as --max_restarts and --restart_window allow. "
                "The same command goes on from the last checkpoint"
            )
            return False
        self._restarts.append(now)
        doubled = _FIRST_DELAY * 2.0 ** (self._in_vain - 1)
        delay = min(_LONGEST_DELAY, doubled) if self._in_vain else 0.0
        where = f"step {reached[0]:,}" if reached else "the beginning: there is no checkpoint yet"
        wait = f" in {delay:g} s" if delay else ""
        launch.report(
            f"restart {len(self._restarts)} of at most {launch.max_restarts} within "
            f"{launch.window:g} s{wait}, from {where}"
        )
        lost = of_no_use(copies, reached[0] if reached else 0)
        if lost is not None:
            launch.report(
                f"copies in memory of step {lost.step:,} lack what {listed(lost.lacking)} had: "
                "they are of use only if that host comes back with its memory"
            )
        self._wakes.wait(delay)
        return True

    def _copies(self) -> list[Together]:
        """Returns what the hosts that are there hold together of each step."""
        launch = self.launch
        return together_with(launch.workdir, launch.host_copies, launch.crew.copies())

    def _recovered(self, stepped: tuple[float, float] | None) -> None:
        """Counts the recovery that the first step of a start ended."""
        if stepped is not None:
            self._losses = _sum(self._losses, Losses(recovery_seconds=stepped[1]))

    def _show_lines(self, first: Process) -> None:
        """Shows the last lines of a process whose output was not shown, but for equal ones."""
        if first.shown:
            return
        seen = {line for one in self.processes if one.shown for line in one.lines()}
        for line in first.lines():
            if line not in seen:
                self.launch.report(f"process {first.number}: {line}")

    def _conclude(self, first: Process, seconds: float) -> None:
        """Reports what a start that is the last one leaves to be said."""
        assert first.code is not None
        if first.code not in (DONE, UNFINISHED):
            self._show_lines(first)
        if self._signal is not None and newest(self.launch.workdir, self._copies()) is None:
            name = signal.Signals(self._signal).name
            self.launch.report(
                f"{name} came before there was a checkpoint in {self.launch.workdir}"
            )
        lost = self._losses
        if lost.failures:
            self.launch.report(
                f"of {seconds:.0f} s, {lost.failures} failure{'s' * (lost.failures > 1)} cost "
                f"{lost.repeated_seconds:.1f} s of steps that were taken again and "
                + (
                    f"{lost.recovery_seconds:.1f} s until the first step after each"
                    if lost.recovery_seconds
                    else f"{lost.down_seconds:.1f} s without processes, besides starting again"
                )
            )

    def _exit_code(self, code: int) -> int:
        """Returns an exit code as shells count it: 128 and the number of a signal."""
        if code >= 0 and (self._signal is None or code not in _SAVED):
            return code
        if self._signal == NOTICE:
            return UNFINISHED
        return 128 + (self._signal or -code)

    def _kill(self) -> None:
        for process in self.processes:
            process.send(signal.SIGKILL)


def _sum(one: Losses, other: Losses) -> Losses:
    return Losses(
        one.failures + other.failures,
        one.repeated_seconds + other.repeated_seconds,
        one.down_seconds + other.down_seconds,
        one.recovery_seconds + other.recovery_seconds,
    )


def _step(reached: tuple[int, float] | None) -> int | None:
    return None if reached is None else reached[0]
