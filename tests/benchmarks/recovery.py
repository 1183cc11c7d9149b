"""How long a job stands still when a host is lost, and when it comes again.

    python -m tests.benchmarks.recovery --hosts=4 --rounds=3 [--spare]

Each host is a supervisor with one process, all on this machine. In a round the last host is killed
with its process. The others go on without it after `--shrink_after=1s`, and then the host is
started again. A line for each: the seconds from the last step before until the first one after, and
for a loss those until a supervisor has seen it. The medians are without the first round: the loss
there compiles, unless the programs were compiled ahead, for which `--ahead=1200` waits so many
seconds. With `--spare` one host more waits, and takes the place of the lost one; each round is a
job of its own, as a machine has one spare host of a job. On a machine that others fill it takes
long.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from meshdsl.training.launching.events import NAME, events_of
from tests.benchmarks.kills import stepped
from tests.cli.test_launch import losses, processes_of, started, wait_for

STEPS = 8  # steps between two changes
PARTING = 60  # seconds in which hosts end
IMPORTING = 30  # seconds in which a spare host imports what its processes need


class Hosts:
    """The hosts of a job, on this machine."""

    def __init__(self, count, folder, spare=False):
        rng = random.Random(0)
        self.folder, self.work, self.count = folder, folder / "work", count
        self.fewer = [] if spare else ["--elastic_axis=data"]  # lets fewer hosts go on
        folder.mkdir(exist_ok=True)
        self.text = folder / "text.txt"
        self.text.write_text(" ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(4000)))
        with socket.create_server(("localhost", 0)) as listener:
            self.where = f"--coordinator=localhost:{listener.getsockname()[1]}"
        others = [self.start(number) for number in range(1, count)]
        self.hosts = [self.start(0), *others]  # last, so that it does not begin without others
        wait_for(lambda: self.reached() > 0, self.hosts[0], 600)
        self.waiting = [self.start(count, spare=True)] if spare else []
        time.sleep(IMPORTING if spare else 0)

    def start(self, number, spare=False):
        own = [self.where, f"--num_processes={self.count}", "--steps=1000000"]
        own += [f"--host_copies={self.folder}/copies.{number}", "--checkpoint_every=100000"]
        own += ["--batch_size=24", "--layout=batch:data"]
        launch = ["--spare"] if spare else [f"--first_process={number}"]
        launch += ["--shrink_after=1s", *self.fewer]
        with open(self.folder / f"out.{number}.txt", "ab") as out:
            return started(
                *(1, self.text, self.work, *own),
                launch=launch,
                mesh=f"data:{self.count}",
                restarts=10**6,
                streams={"stdout": out, "stderr": out},
            )

    def reached(self):
        return max(losses(self.work), default=0)

    def ahead(self):
        """Whether what the first loss needs is compiled."""
        return any(e["event"] == "compiled_ahead" for e in events_of(self.work / NAME))

    def seen(self, since):
        """Returns the seconds from a time until a supervisor saw a failure; None if none did."""
        failed = [e for e in events_of(self.work / NAME) if e["event"] == "failed"]
        times = [e["time"] + e["seen_seconds"] for e in failed]
        return next((time - since for time in times if time >= since), None)

    def stands_still(self, change):
        """Makes a change; returns for how many seconds no step was finished, and `seen`."""
        first = self.reached()
        wait_for(lambda: self.reached() >= first + STEPS, self.hosts[0], 600)
        starts, before, last = stepped(self.work), self.reached(), time.monotonic()
        since = time.time()
        change()
        while stepped(self.work) == starts:
            assert self.hosts[0].poll() is None, self.folder
            if (step := self.reached()) > before:
                before, last = step, time.monotonic()
            time.sleep(0.01)
        return time.monotonic() - last, self.seen(since)

    def lose(self):
        """Kills the last host, with its process."""
        for process in processes_of(self.hosts[-1]).values():
            os.kill(process, signal.SIGKILL)
        self.hosts[-1].kill()
        self.hosts[-1].wait()

    def come_again(self):
        self.hosts[-1] = self.start(self.count - 1)

    def end(self):
        for host in (*self.hosts, *self.waiting):
            host.send_signal(signal.SIGTERM)
        for host in (*self.hosts, *self.waiting):
            try:
                host.wait(PARTING)
            except subprocess.TimeoutExpired:
                host.kill()


def with_fewer(given, name):
    """Yields kinds of changes, the seconds that each takes, and those until it is seen."""
    hosts = Hosts(given.hosts, Path(name))
    try:
        end = time.monotonic() + given.ahead
        while time.monotonic() < end and not hosts.ahead():
            time.sleep(0.5)
        print("programs for the first loss are there" if hosts.ahead() else "it will compile")
        for _ in range(given.rounds + 1):
            yield "lost", *hosts.stands_still(hosts.lose)
            yield "back", *hosts.stands_still(hosts.come_again)
    finally:
        hosts.end()


def with_spare(given, name):
    """Yields the same of jobs in which a spare host takes the place of the lost one."""
    for number in range(given.rounds + 1):
        hosts = Hosts(given.hosts, Path(name, str(number)), spare=True)
        try:
            yield "replaced", *hosts.stands_still(hosts.lose)
        finally:
            hosts.end()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ahead", type=int, default=0)
    parser.add_argument("--spare", action="store_true")
    given = parser.parse_args()
    taken, saw = {}, []
    with tempfile.TemporaryDirectory() as name:
        for kind, seconds, seen in (with_spare if given.spare else with_fewer)(given, name):
            found = taken.setdefault(kind, [])
            after = "" if seen is None else f", seen after {seen:.2f} s"
            print(f"round {len(found)}  host {kind:8s} {seconds:5.1f} s{after}", flush=True)
            found.append(seconds)
            saw += [] if seen is None else [seen]
    print(f"a loss is seen after {statistics.median(saw):.2f} s (median), {max(saw):.2f} s")
    for kind, (_, *seconds) in taken.items():
        print(f"host {kind}: {statistics.median(seconds):.1f} s (median), {max(seconds):.1f} s")


if __name__ == "__main__":
    main()
