"""How a job of several processes goes on after kills of any of them, in any phase.

    python -m tests.benchmarks.kills --kills=20 --processes=4 --seed=0

Starts `meshdsl launch` with copies in memory, and kills a random process with SIGKILL, again and
again: while it starts, in a step, while a checkpoint is written, and in the start after a kill. A
line for each kill: the phase, the process, the last step that was reported before and the one from
which the job went on, and the seconds from the kill until the next step was finished. The last
lines have how many kills it survived, the most steps that one has cost, and whether all losses
equal those of a job that nothing happened to, to the bit.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.cli.test_launch import losses, processes_of, started, wait_for

PHASES = ("start", "step", "step", "save", "recovery")
EVERY = 20  # steps between two checkpoints


@dataclass
class Kill:
    """One kill: which process, in what phase, and the last step that was reported before."""

    phase: str
    process: int
    reached: int


def events(work, kind):
    """Returns the events of a kind in the record of a supervisor."""
    file = work / "launch.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line for line in map(json.loads, lines) if line["event"] == kind]


def stepped(work):
    """Returns how many starts have finished a step."""
    return len(events(work, "stepped"))


def killed(job, phase, work, count, rng):
    """Kills a process of a job in a phase; returns None if it had just ended."""
    if phase in ("start", "recovery"):  # at any moment until the first step
        before = processes_of(job)
        if phase == "recovery":
            kill(before, rng.randrange(count))
            wait_for(lambda: not {*before.values()} & {*processes_of(job).values()}, job)
        wait_for(lambda: len(processes_of(job)) == count, job)
        end = time.monotonic() + 12 * rng.random()
        seen = stepped(work)
        while time.monotonic() < end and stepped(work) == seen:
            time.sleep(0.02)
    else:
        aim = max(losses(work), default=0) + rng.randint(2, 8)
        wait_for(lambda: max(losses(work), default=0) >= aim, job)
        if phase == "save":
            folder = work / "checkpoints"
            wait_for(lambda: any(folder.glob("*tmp*")), job)
        time.sleep(0.05 * rng.random())
    here = processes_of(job)
    if not here:
        return None
    number = rng.choice(sorted(here))
    return Kill(phase, number, max(losses(work), default=0)) if kill(here, number) else None


def kill(processes, number):
    """Kills a process of a job; returns whether it was there."""
    try:
        os.kill(processes[number], signal.SIGKILL)
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
    job = started(given.processes, text, work, *when, mesh=mesh, restarts=10**6)
    kills = []
    try:
        while len(kills) < given.kills and time.monotonic() - began < given.seconds:
            phase = "start" if not kills else rng.choice(PHASES)
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
        job.communicate(timeout=600)
    finally:
        if job.poll() is None:
            job.kill()
    found = losses(work)
    when += (f"--exit_at_step={max(found)}",)
    alone = started(given.processes, text, folder / "alone", *when, mesh=mesh)
    _, errors = alone.communicate(timeout=3600)
    assert len(losses(folder / "alone")) == len(found), errors
    expected = losses(folder / "alone")
    equal = all(found.get(step) == loss for step, loss in expected.items())
    costs = [cost(*pair) for pair in kills]
    seconds = [pair[1].get("recovery_seconds", 0.0) for pair in kills]
    twice = sum(one.phase == "recovery" for one, _ in kills)  # which kills one before, too
    print(f"{len(kills) + twice} kills, all of them survived; {max(costs)} steps lost at most")
    print(f"{statistics.median(seconds):.1f} s until the next step (median), {max(seconds):.1f} s")
    print(f"losses of {len(expected)} steps {'equal' if equal else 'DIFFER FROM'} the other job's")


def cost(one, event):
    """Returns how many steps that were reported before a kill were taken again."""
    return max(0, one.reached - (event["step"] - 1))


def shown(one, event):
    print(
        f"{one.phase:<9} process {one.process}  reached {one.reached:>5}  "
        f"went on from {event['step'] - 1:>5}  {event.get('recovery_seconds', 0.0):5.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    main()
