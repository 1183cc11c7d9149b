"""The processes of a job on JAX: they join, agree on what they run, and part.

They meet (`meeting`), then JAX's own runtime connects them, through a `relay`. Each watches others
(`watching`) from the meeting on, also while JAX connects them.

Guarantees:
    If processes do not come within the time to join, the others end and name them.
    When a process has ended, the others end, whatever they wait for, and name it: up to 64 of them
    within a minute, where its host still answers.
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshdsl.training.exit_codes import FAILED
from meshdsl.training.processes.meeting import Meeting, address_of, no_free_port
from meshdsl.training.processes.relay import Relay, reached_directly
from meshdsl.training.processes.watching import (
    AGAIN,
    JobProcesses,
    Look,
    Watch,
    report,
    report_ended,
)

JOIN_TIMEOUT = 60.0  # seconds in which all processes of a job must join
PAUSE_TIMEOUT = 120.0  # seconds for which one of them may stand still
_MARGIN = 60  # seconds that JAX, which ends a process with a stack trace, waits longer than we do
# Seconds that JAX, in the first process, waits for others if our own watch sees all of them. After
# a long pause of that process JAX would end it at once, for it has not heard of them.
_NEVER = 7 * 24 * 3600
_GRACE = 8.0  # seconds in which processes may end by themselves, with reasons of their own
_PARTING = 60.0  # seconds for which a process waits for the others at the end
_JOINED: list[tuple[JobProcesses, Watch]] = []
_APART: list[bool] = []  # not empty: this process has left the others, and speaks for all
_ROW = 1024  # bytes of a text that all processes gather at once, with its size
_SIZE = 8  # bytes of a size
# How messages of JAX's runtime begin.
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): ")
_CONNECTION = re.compile("connect|timed? ?out|reset by peer|broken pipe", re.IGNORECASE)
AUTOMATIC = "auto"


def join(
    coordinator: str,
    processes: int | None = None,
    index: int | None = None,
    join_timeout: float = JOIN_TIMEOUT,
    pause_timeout: float = PAUSE_TIMEOUT,
) -> None:
    """Joins the other processes of a job; JAX must not be in use yet.

    Args:
        coordinator: `host:port` of the first process, or "auto" where a TPU pod, GKE, Slurm or MPI
            tell JAX all of this.
        processes: the number of processes.
        index: the number of this one, from 0.
        join_timeout: seconds in which all of them must come. The error names those that are
            missing; not with "auto", where only JAX knows where to ask.
        pause_timeout: seconds for which one may stand still, such as a process that is stopped or
            whose machine migrates.

    JAX itself cannot be interrupted while it connects. If it takes longer than `join_timeout`, this
    process exits with code 1 and a line on standard error, and nothing is raised.

    Raises:
        ValueError: the environment does not describe the job, the others did not come, or this
            process has joined a job already. After a failure to join, this process may go on alone
            or join again.
    """
    if jax.distributed.is_initialized():
        raise ValueError(
            "this process has joined a job already, and is in one at a time: leave out the second "
            "`join`, or let the block of `joined` end before"
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from us
    jax.config.update("jax_enable_recoverability", True)  # we end the others, and say why
    beat = math.ceil(pause_timeout) + _MARGIN
    connect = functools.partial(
        jax.distributed.initialize, initialization_timeout=math.ceil(join_timeout) + _MARGIN
    )
    own = _listening()
    try:
        with ExitStack() as undo:
            undo.callback(JobProcesses(0, (), (), own).close)
            undo.callback(jax.distributed.shutdown)  # a failed connection would prevent another
            if coordinator == AUTOMATIC:
                with _ending_after(join_timeout):
                    connect(heartbeat_timeout_seconds=beat)
                    job = _job(own, _exchanged, jax.process_index(), pause_timeout)
                watch = _watched(job, pause_timeout)
            else:
                if processes is None or index is None:
                    raise ValueError("say how many processes there are, and which of them this is")
                meeting = Meeting(coordinator, processes, index, join_timeout, report)
                job = _job(own, meeting.meet, index, pause_timeout)
                watch = _watched(job, pause_timeout)
                undo.callback(watch.over.set)  # else it would end this process, which may go on
                where = coordinator
                if index == 0 and len(job.watched) == processes - 1:
                    beat = _NEVER
                if index > 0:
                    relay = Relay(address_of(coordinator), watch.over, _lost(coordinator))
                    relay.start()
                    undo.callback(relay.close)
                    where = relay.address
                with _ending_after(join_timeout, job), reached_directly():
                    connect(where, processes, index, heartbeat_timeout_seconds=beat)
            undo.pop_all()
    except (ValueError, RuntimeError) as error:
        known = (
            "what the environment tells"
            if coordinator == AUTOMATIC
            else f"coordinator {coordinator}"
        )
        raise ValueError(f"cannot join the processes of the job by {known}: {error}") from error
    _JOINED[:] = [(job, watch)]


def _watched(job: JobProcesses, pause_timeout: float) -> Watch:
    """Returns a running watch over the other processes, which stops when its event is set."""
    watch = Watch(job, pause_timeout, threading.Event(), _end)
    watch.start()
    return watch


def _lost(coordinator: str) -> Callable[[], None]:
    """Returns what ends this process when only its relay sees that the first one has ended."""
    return lambda: _end(
        report_ended([f"process 0 at {coordinator}"], what="has ended or cannot be reached")
    )


def _end(reason: str) -> None:
    """Ends this process at once, whatever its other threads wait for."""
    report(reason)
    os._exit(FAILED)


@contextmanager
def _ending_after(seconds: float, job: JobProcesses | None = None) -> Iterator[None]:
    """Exits this process if its block, in which JAX connects the processes, takes too long.

    The block cannot be interrupted, so nothing is raised: the process writes a line to standard
    error and exits at once with code 1, without `finally` blocks or exit handlers. JAX itself would
    end it later, with a stack trace.
    """

    def end() -> None:
        # One that ended before this process reached it first looks like one behind a firewall.
        absent = [] if job is None else job.names(job.absent(job.neighbours()))
        verb = "has" if len(absent) == 1 else "have"
        who = f"; {', '.join(absent)} {verb} ended, or cannot be reached" if absent else ""
        _end(
            f"JAX has not connected the processes of the job within {seconds:g} s{who}. See which "
            "of them ended or were not started; --join_timeout waits longer"
        )

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Deserted(RuntimeError):
    """Other processes of the job have ended, and this one cannot go on without them."""


@contextmanager
def joined(
    coordinator: str = AUTOMATIC,
    processes: int | None = None,
    index: int | None = None,
    join_timeout: float = JOIN_TIMEOUT,
    pause_timeout: float = PAUSE_TIMEOUT,
) -> Iterator[None]:
    """Runs its block as one of the processes of a job: `with joined(): train(...)`.

    At the end all wait for each other. A process that fails does not wait; the others report it as
    soon as they notice that it is gone.

    Arguments and errors are those of `join`.

    Raises:
        Deserted: this process failed because others are gone; the message names them.

    Examples:
        >>> from meshdsl.training import joined, train
        >>> with joined("host0:1234", processes=2, index=0):  # doctest: +SKIP
        ...     train(recipe, batches, steps=50, mesh="data:2", layout="batch:data")
    """
    join(coordinator, processes, index, join_timeout, pause_timeout)
    try:
        yield
        everywhere(True)
    except BaseException as error:
        job, watch = _JOINED[0]
        if _of_devices(error) and (reason := _deserted(watch, error)):
            job.say(reason)
            raise Deserted(reason) from error  # JAX may hang as it leaves: see `Watch`
        _part(_GRACE)
        raise
    _JOINED[0][1].over.set()
    _part(_PARTING)


@contextmanager
def apart(coordinator: str, processes: int, index: int, join_timeout: float) -> Iterator[None]:
    """Runs its block with the devices of a job, but without its other processes.

    All of them join, so that JAX knows the devices, and leave each other. Each can then compile for
    these devices, however long others take, and cannot run what others take part in.

    Arguments and errors are those of `join`.
    """
    join(coordinator, processes, index, join_timeout)
    _JOINED[0][1].over.set()  # those that leave before this one have not failed
    jax.devices()
    _part(_PARTING)
    _JOINED.clear()
    _APART.append(True)
    yield


def tell_failure(reason: str) -> None:
    """Tells the other processes of the job why this one is about to end, if there are any."""
    for job, _ in _JOINED:
        job.say(f"process {job.own}: {reason}", alone=True)


def failed_elsewhere() -> str | None:
    """Returns why another process of the job is about to end, if one has said so."""
    return next((job.failure for job, _ in _JOINED if job.failure is not None), None)


def _deserted(watch: Watch, error: BaseException) -> str | None:
    """Returns the message if others are gone, which explains an error of JAX's; else None."""
    job = watch.job
    looks = job.looks(job.watched)
    gone = [n for n, look in looks.items() if look is not Look.ANSWERS]
    if not gone:
        return _disconnected(error)
    if job.reasons or Look.SILENT not in looks.values():
        return watch.why(gone)
    # The host of a silent one has crashed, or it only stands still and the error has other causes.
    return f"{watch.why(gone, 'has ended or cannot be reached')}. JAX reports: {error}"


def _disconnected(error: BaseException) -> str | None:
    """Returns the message if collectives of CPUs lost a connection to one that still answers."""
    text = str(error)
    if "gloo" not in text.lower() or not _CONNECTION.search(text):
        return None
    return (
        "collectives have lost the connection to another process of the job, or could not make it, "
        "though all of them answer: one may be about to end, the network between the hosts drops "
        f"connections, or a host's name (here {socket.gethostname()}) stands for an address that "
        f"others cannot reach. {AGAIN}. JAX reports: {' '.join(text.split())}"
    )


def _of_devices(error: BaseException) -> bool:
    """Whether an error is one of JAX's runtime, which raises some of its own as ValueErrors."""
    if isinstance(error, ValueError):
        return _STATUS.match(str(error)) is not None
    return isinstance(error, RuntimeError)


def _part(seconds: float) -> None:
    """Leaves the job; the first process, which the others need, waits until they have left."""
    job, watch = _JOINED[0]
    if jax.process_index() == 0:
        others, end = list(range(1, jax.process_count())), time.monotonic() + seconds
        while len(job.absent(others)) < len(others) and time.monotonic() < end:
            time.sleep(0.05)
    try:
        jax.distributed.shutdown()
    finally:
        watch.over.set()
        job.close()


def everywhere(true: bool) -> bool:
    """Returns whether a condition is true in every process; all of them must call this."""
    if jax.process_count() == 1:
        return true
    return all(json.loads(text) for text in gathered(json.dumps(bool(true))))


def gathered(text: str) -> list[str]:
    """Returns the texts of all processes, in their order; all of them must call this."""
    if jax.process_count() == 1 or _APART:
        return [text]
    data = text.encode()
    rows = _rows(len(data).to_bytes(_SIZE, "big") + data[: _ROW - _SIZE], _ROW)
    sizes = [int.from_bytes(row[:_SIZE], "big") for row in rows]
    texts = [row[_SIZE:] for row in rows]
    if (rest := max(sizes) - (_ROW - _SIZE)) > 0:
        others = _rows(data[_ROW - _SIZE :], max(_ROW, 1 << (rest - 1).bit_length()))
        texts = [text + other for text, other in zip(texts, others, strict=True)]
    return [text[:size].decode() for text, size in zip(texts, sizes, strict=True)]


def _rows(data: bytes, size: int) -> list[bytes]:
    """Returns as many bytes of every process; JAX compiles a program for each size."""
    from jax.experimental import multihost_utils

    row = np.frombuffer(data.ljust(size, b"\0"), np.uint8)
    return [bytes(one) for one in multihost_utils.process_allgather(row).reshape(-1, size)]


def check_devices(devices: Sequence[Any] | None = None) -> None:
    """Checks that all processes have as many devices; it waits for no process.

    Args:
        devices: those of the job, each with its `process_index`; None: JAX's.

    Raises:
        ValueError: in every process, with the numbers.
    """
    every = jax.devices() if devices is None else devices
    counts = Counter(device.process_index for device in every)
    if len({*counts.values()}) <= 1:
        return
    (usual, _), *_ = Counter(counts.values()).most_common()
    others = [f"process {n} has {count}" for n, count in sorted(counts.items()) if count != usual]
    raise ValueError(
        f"the processes of the job have different numbers of devices: {', '.join(others)}, others "
        f"{usual}. All need the same: see which devices of the host are missing or hidden "
        "(`meshdsl doctor`), or replace it"
    )


@contextmanager
def together() -> Iterator[None]:
    """Runs its block in every process; a ValueError in one of them is raised in all.

    Raises:
        ValueError: the block's own, if it raises one here; else the other processes' messages.
    """
    problem: ValueError | None = None
    try:
        yield
    except ValueError as error:
        problem = error
    problems: list[str | None] = []
    if jax.process_count() > 1:
        problems = [json.loads(text) for text in gathered(json.dumps(problem and str(problem)))]
    if problem is not None:
        raise problem
    wrong = [
        f"process {number}: {text}" for number, text in enumerate(problems) if text is not None
    ]
    if wrong:
        raise ValueError("\n".join(wrong))


def check_agreement(facts: Callable[[], Mapping[str, str]]) -> None:
    """Checks that all processes run the same job.

    Args:
        facts: returns what must be the same, by name; called only if there are several processes.

    Raises:
        ValueError: in every process, with each difference and the process that has it.
    """
    if jax.process_count() == 1:
        return
    first, *others = [json.loads(text) for text in gathered(json.dumps(dict(facts())))]
    differences = [
        f"process {number}: {name} is {other.get(name)}, in process 0 {first.get(name)}"
        for number, other in enumerate(others, 1)
        for name in sorted({*first, *other})
        if first.get(name) != other.get(name)
    ]
    if differences:
        raise ValueError(
            "\n  ".join(["the processes of the job do not run the same", *differences])
        )


def _listening() -> socket.socket:
    """Returns a socket on a free port, by which the others see that this process runs.

    Raises:
        ValueError: no port is free.
    """
    own = socket.socket()
    try:
        own.bind(("", 0))
        own.listen(socket.SOMAXCONN)
    except OSError as error:
        own.close()
        raise no_free_port("this process", error) from error
    return own


def _exchanged(value: Any) -> list[Any]:
    return [json.loads(text) for text in gathered(json.dumps(value))]


def _job(
    own: socket.socket, exchange: Callable[[Any], list[Any]], index: int, pause_timeout: float
) -> JobProcesses:
    """Returns the processes of the job, from the addresses that they exchange."""
    alone = JobProcesses(index, (), (), own)
    threading.Thread(target=alone.answer, daemon=True).start()
    said = exchange([names_here(), own.getsockname()[1]])
    hosts = tuple(tuple(names) for names, _ in said)
    job = replace(alone, hosts=hosts, ports=tuple(int(port) for _, port in said))
    neighbours = job.neighbours()
    absent = job.absent(neighbours)
    if absent:
        warnings.warn(
            f"this process cannot reach {', '.join(job.names(absent))} on ports of their own: a "
            "firewall is between them, or they have ended since they came. If one of them ends, "
            "only others or JAX's runtime notice, the latter after "
            f"{math.ceil(pause_timeout) + _MARGIN} s and without its name",
            stacklevel=2,
        )
    return replace(job, watched=tuple(n for n in neighbours if n not in absent))


def names_here() -> list[str]:
    """Returns the names by which other processes may reach this host, the likeliest first."""
    return [name for name in (_address(), socket.gethostname()) if name]


def _address() -> str:
    """Returns this host's address in the network of most other hosts, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # kept for examples (RFC 5737); nothing is sent
        except OSError:
            return ""
        return str(probe.getsockname()[0])
