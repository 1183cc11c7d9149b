"""The processes of a job on JAX: they join, agree on what they run, and tell who is gone.

JAX's own runtime connects them; each then listens on a port of its own, so that the others can see
whether it is still there.

Guarantees:
    When a process has died, the others end within a minute, whatever they wait for, and name it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

_HEARTBEAT = 30  # seconds without a sign of life after which JAX ends a job
_SECONDS = 2.0  # in which a process that lives answers
_AT_ONCE = 64  # processes that are asked at a time
_EVERY = 4.0  # seconds between two looks at the others
_MISSES = 3  # looks in a row in which one that is gone is not there
_GRACE = 8.0  # seconds in which processes may end by themselves, with reasons of their own
_PARTING = 60.0  # seconds in which the others are waited for at the end
_LEFT = threading.Event()
# How messages of JAX's runtime begin.
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
FAILED = 1  # the exit code of a process that others have left alone
AUTOMATIC = "auto"


def join(coordinator: str, processes: int | None = None, index: int | None = None) -> None:
    """Joins the other processes of a job; JAX must not be in use yet.

    Args:
        coordinator: `host:port` of the first process, or "auto" where a TPU pod, GKE, Slurm or MPI
            tell JAX all of this.
        processes: how many there are.
        index: which of them this is.

    Raises:
        ValueError: the job cannot be found out, or the others did not come.
    """
    automatic = coordinator == AUTOMATIC
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    jax.config.update("jax_enable_recoverability", True)  # we end the others, and tell why
    try:
        jax.distributed.initialize(
            None if automatic else coordinator,
            processes,
            index,
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except (ValueError, RuntimeError) as error:
        known = "what the environment tells" if automatic else f"coordinator {coordinator}"
        raise ValueError(f"cannot join the processes of the job by {known}: {error}") from error
    threading.Thread(target=_watch, args=(job(),), daemon=True).start()


class Deserted(RuntimeError):
    """Other processes of the job have ended, and this one cannot go on without them."""


@contextmanager
def joined(
    coordinator: str = AUTOMATIC, processes: int | None = None, index: int | None = None
) -> Iterator[None]:
    """Runs its block as one of the processes of a job: `with joined(): train(...)`.

    At the end all wait for each other. One that fails does not wait, and the others are told of it
    as soon as they miss it.

    Arguments and errors are those of `join`.

    Raises:
        Deserted: what has failed here is that others are gone; they are named.
    """
    join(coordinator, processes, index)
    try:
        yield
        everywhere(True)
    except BaseException as error:
        if _of_devices(error) and (gone := job().gone()):
            raise Deserted(told_gone(gone)) from error  # JAX may hang as it leaves: see `_watch`
        _part(_GRACE)
        raise
    _LEFT.set()
    _part(_PARTING)


def _of_devices(error: BaseException) -> bool:
    """Whether an error is one of JAX's runtime, which raises some of its own as ValueErrors."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, RuntimeError)


def _part(seconds: float) -> None:
    """Parts from the other processes; for so long the first, which the rest needs, lets them go."""
    if jax.process_index() == 0:
        others, end = list(range(1, jax.process_count())), time.monotonic() + seconds
        while len(job().absent(others)) < len(others) and time.monotonic() < end:
            time.sleep(0.05)
    jax.distributed.shutdown()
    _LEFT.set()
    job().close()


def everywhere(true: bool) -> bool:
    """Returns whether something holds in every process; all of them must ask."""
    if jax.process_count() == 1:
        return true
    return all(json.loads(text) for text in gathered(json.dumps(bool(true))))


def gathered(text: str) -> list[str]:
    """Returns the texts of all processes, in their order; all of them must ask."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental import multihost_utils

    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(data.size, np.int32)).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


@contextmanager
def together() -> Iterator[None]:
    """Runs its block in every process; what is wrong in one of them ends all.

    Raises:
        ValueError: of the block, if it raises one here; else what it has raised elsewhere.
    """
    problem: ValueError | None = None
    try:
        yield
    except ValueError as error:
        problem = error
    told: list[str | None] = []
    if jax.process_count() > 1:
        told = [json.loads(text) for text in gathered(json.dumps(problem and str(problem)))]
    if problem is not None:
        raise problem
    wrong = [f"process {number}: {text}" for number, text in enumerate(told) if text is not None]
    if wrong:
        raise ValueError("\n".join(wrong))


def check_agreement(facts: Callable[[], Mapping[str, str]]) -> None:
    """Checks that all processes run the same job.

    Args:
        facts: returns what has to be the same, by name; asked only if there are several.

    Raises:
        ValueError: in every process, with each difference and the process that has it.
    """
    if jax.process_count() == 1:
        return
    first, *others = [json.loads(text) for text in gathered(json.dumps(dict(facts())))]
    told = [
        f"process {number}: {name} is {other.get(name)}, in process 0 {first.get(name)}"
        for number, other in enumerate(others, 1)
        for name in sorted({*first, *other})
        if first.get(name) != other.get(name)
    ]
    if told:
        raise ValueError("\n  ".join(["the processes of the job do not run the same", *told]))


def code_version() -> str:
    """Returns a short name for the code of this package, that differs where a file does."""
    folder = Path(__file__).resolve().parents[1]
    total = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        total.update(str(file.relative_to(folder)).encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


@dataclass(frozen=True)
class Job:
    """The processes of a job.

    Attributes:
        hosts: by which names or addresses the host of each may be reached.
        ports: on which port of it each listens.
        listening: the socket of this one, which is open as long as the process lives.
        watched: the processes that this one looks after, since they answer it.
    """

    hosts: tuple[tuple[str, ...], ...]
    ports: tuple[int, ...]
    listening: socket.socket
    watched: tuple[int, ...] = ()

    def gone(self) -> list[str]:
        """Returns the processes that are not there any more, as they are to be told."""
        return [f"process {n} on {self.hosts[n][-1]}" for n in self.absent(self.watched)]

    def absent(self, numbers: Sequence[int]) -> list[int]:
        """Returns those of some processes that do not answer."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            there = pool.map(self._answers, numbers)
            return [number for number, alive in zip(numbers, there, strict=True) if not alive]

    def _answers(self, number: int) -> bool:
        return any(_listens((host, self.ports[number])) for host in self.hosts[number])

    def neighbours(self) -> list[int]:
        """Returns the processes to look after: of many, those 1, 2, 4, 8 ... places on."""
        count, own = len(self.ports), jax.process_index()
        steps = range(1, count) if count <= _AT_ONCE else [2**n for n in range(count.bit_length())]
        return sorted({(own + step) % count for step in steps} - {own})

    def answer(self) -> None:
        """Answers those who look whether this process is there, until it is closed."""
        with contextlib.suppress(OSError):
            while True:
                self.listening.accept()[0].close()

    def close(self) -> None:
        """Answers no more."""
        with contextlib.suppress(OSError):
            self.listening.shutdown(socket.SHUT_RDWR)  # wakes the thread that answers
        self.listening.close()


@functools.cache
def job() -> Job:
    """Returns the processes of the job; all of them must ask, the first time."""
    own = socket.socket()
    own.bind(("", 0))
    own.listen()
    told = [_address(), socket.gethostname()], own.getsockname()[1]
    found = [json.loads(text) for text in gathered(json.dumps(told))]
    hosts = tuple(tuple(filter(None, names)) for names, _ in found)
    made = Job(hosts, tuple(int(port) for _, port in found), own)
    threading.Thread(target=made.answer, daemon=True).start()
    everywhere(True)  # all of them answer
    neighbours = made.neighbours()
    silent = made.absent(neighbours)
    if silent:
        listed = ", ".join(f"{n} on {hosts[n][-1]}" for n in silent)
        warnings.warn(
            f"processes that this one cannot reach on ports of their own: {listed}. If one of them "
            f"dies, only JAX's runtime tells, after {_HEARTBEAT} s and without its name",
            stacklevel=2,
        )
    return replace(made, watched=tuple(n for n in neighbours if n not in silent))


def _address() -> str:
    """Returns the address of this host in the network that most others are in, if there is one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # kept for examples (RFC 5737); nothing is sent
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def told_gone(gone: Sequence[str]) -> str:
    """Returns what to tell when other processes are gone."""
    return (
        f"{', '.join(gone)} of the job has ended, and the others cannot go on. Start all of them "
        "again: with a --workdir they go on from the last checkpoint"
    )


def _watch(job: Job) -> None:
    """Ends this process once another has died, if it does not end by itself."""
    misses = 0
    while not _LEFT.wait(_EVERY):
        misses = misses + 1 if job.absent(job.watched) else 0
        if misses >= _MISSES and not _LEFT.wait(_GRACE):
            os.write(2, f"meshdsl train: {told_gone(job.gone())}\n".encode())
            os._exit(FAILED)


def _listens(address: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(address, _SECONDS):
            return True
    except OSError:
        return False
