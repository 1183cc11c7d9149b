"""How a job of several processes goes on after kills of any of them, in any phase.

    python -m tests.benchmarks.kills --kills=20 --processes=4 --seed=0

Starts `meshdsl launch` with copies in memory, and kills a random process with SIGKILL, again and
again, in these phases:

    start       at any moment from the start of the job to its first step
    step        at any moment of a step: forward, backward, update or between steps
    collective  while it waits in a collective for another one, which stands still
    copy        while a copy of the state in memory is written
    save        while a checkpoint is written
    recovery    at any moment from the start after a kill to its first step

A line for each kill: the phase, the process, the last step that was reported before and the one
from which the job went on, and the seconds from the kill until the next step was finished. Then a
table of the phases, the most steps that a kill has cost, and whether all losses equal those of a
job that nothing happened to, to the bit.
"""

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from meshdsl.training.launching.events import NAME, events_of
from tests.cli.test_launch import losses, processes_of, started, wait_for

PHASES = ("start", "step", "collective", "copy", "save", "recovery")
CHOSEN = (*PHASES[1:], "step")  # a job starts once
EVERY = 20  # steps between two checkpoints
STEPS = 0.5  # seconds of some steps, over which kills are spread
STANDING = 0.3  # seconds in which the others come to the collective


@dataclass
class Kill:
    """One kill: which process, in what phase, and the last step that was reported before."""

    phase: str
    process: int
    reached: int


def events(work, kind):
    """Returns the events of a kind in the record of a supervisor."""
    file = work / NAME
    return [one for one in events_of(file) if one["event"] == kind] if file.exists() else []


def stepped(work):
    """Returns how many starts have finished a step."""
    return len(events(work, "stepped"))


def killed(job, phase, work, count, rng):
    """Kills a process of a job in a phase; returns None if it had just ended."""
    if phase in ("start", "recovery"):
        before = processes_of(job)
        if phase == "recovery":
            kill(before, rng.randrange(count))
            wait_for(lambda: not {*before.values()} & {*processes_of(job).values()}, job)
        wait_for(lambda: len(processes_of(job)) == count, job)
        end = time.monotonic() + (30 if phase == "start" else 6) * rng.random()
        seen = stepped(work)
        while time.monotonic() < end and stepped(work) == seen:
            time.sleep(0.02)
    else:
        aim = max(losses(work), default=0) + rng.randint(2, 8)
        wait_for(lambda: max(losses(work), default=0) >= aim, job)
        if phase == "save":
            wait_for(lambda: any((work / "checkpoints").glob("*tmp*")), job)
        time.sleep(STEPS * rng.random() if phase == "step" else 0.05 * rng.random())
    here = processes_of(job)
    if len(here) < count:
        return None
    number = rng.choice(sorted(here))
    if phase == "copy" and not copying(work.parent / "copies" / f"process.{number}"):
        return None
    if phase == "collective":
        other = (number + rng.randrange(1, count)) % count
        if not kill(here, other, signal.SIGSTOP):
            return None
        time.sleep(STANDING)
    reached = max(losses(work), default=0)
    done = kill(here, number)
    if phase == "collective":
        kill(here, other, signal.SIGCONT)
    return Kill(phase, number, reached) if done else None


def copying(folder):
    """Waits until a process writes a copy; returns whether it was seen."""
    part, end = f"{folder}/copy.part", time.monotonic() + 10
    while not os.path.exists(part):  # it is there for less than a millisecond
        if time.monotonic() > end:
            return False
    return True


def kill(processes, number, by=signal.SIGKILL):
    """Sends a signal to a process of a job; returns whether it was there."""
    try:
        os.kill(processes[number], by)
    except (KeyError, ProcessLookupError):  # the supervisor was faster
        return False
    return True


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no kill after it")
    given = parser.parse_args()
    rng = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.txt").write_text(
            " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(4000))
        )
        report(given, folder, rng)


def report(given, folder, rng):
    work = folder / "work"
    when = ("--steps=100000", f"--checkpoint_every={EVERY}", f"--host_copies={folder}/copies")
    mesh = f"data:{given.processes}"
    text, began = folder / "text.txt", time.monotonic()
    kills = []
    # Files, since a pipe that nobody reads would stop the job.
    with open(folder / "out.txt", "wb") as out, open(folder / "errors.txt", "wb") as errors:
        streams = {"stdout": out, "stderr": errors}
        job = started(
            given.processes, text, work, *when, mesh=mesh, restarts=10**6, streams=streams
        )
        try:
            while len(kills) < given.kills and time.monotonic() - began < given.seconds:
                phase = "start" if not kills else rng.choice(CHOSEN)
                if (one := killed(job, phase, work, given.processes, rng)) is None:
                    continue
                seen = stepped(work)
                wait_for(lambda seen=seen: stepped(work) > seen, job, 600)
                kills.append((one, events(work, "stepped")[-1]))
                shown(*kills[-1])
            if not kills:
                raise SystemExit("no kill was begun: give more --seconds")
            last = max(losses(work))
            wait_for(lambda: max(losses(work)) > last + 5, job)
            job.send_signal(signal.SIGTERM)
            job.wait(timeout=600)
        except BaseException:
            print((folder / "errors.txt").read_text()[-8000:], flush=True)
            raise
        finally:
            if job.poll() is None:
                job.kill()
        found = losses(work)
        when += (f"--exit_at_step={max(found)}",)
        alone = started(given.processes, text, folder / "alone", *when, mesh=mesh, streams=streams)
        alone.wait(timeout=3600)
    expected = losses(folder / "alone")
    assert len(expected) == len(found), (folder / "errors.txt").read_text()[-8000:]
    differ = [step for step, loss in expected.items() if found.get(step) != loss]
    table(kills)
    twice = sum(one.phase == "recovery" for one, _ in kills)  # which kills one before, too
    most = max(cost(*pair) for pair in kills)
    print(f"{len(kills) + twice} kills, all of them survived; {most} steps lost at most")
    equal = f"DIFFER FROM step {differ[0]} on from" if differ else "equal"
    print(f"losses of {len(expected)} steps {equal} those of a job that nothing happened to")


def cost(one, event):
    """Returns how many steps that were reported before a kill were taken again."""
    return max(0, one.reached - (event["step"] - 1))


def shown(one, event):
    print(
        f"{one.phase:<10} process {one.process}  reached {one.reached:>5}  "
        f"went on from {event['step'] - 1:>5}  {event.get('recovery_seconds', 0.0):5.1f} s",
        flush=True,
    )


def table(kills):
    """Prints what the kills of each phase have cost."""
    print("phase       kills  of process 0  steps lost  seconds (median)  (most)")
    for phase in PHASES:
        of = [(one, event) for one, event in kills if one.phase == phase]
        if of:
            seconds = [event.get("recovery_seconds", 0.0) for _, event in of]
            first = sum(one.process == 0 for one, _ in of)
            lost = max(cost(*pair) for pair in of)
            print(
                f"{phase:<10}  {len(of):>5}  {first:>12}  {lost:>10}  "
                f"{statistics.median(seconds):>16.1f}  {max(seconds):>6.1f}"
            )


if __name__ == "__main__":
    main()
