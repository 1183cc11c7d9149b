"""The template of a host's processes: it has imported everything, and is forked for each of them.

Guarantees:
    It is forked only while no other thread runs in it, but OpenBLAS's, and no device is open.
    A process that comes of it is a child of the supervisor, and the leader of a group of its own.
    It has the arguments, variables and streams that it would have had without a template, and it
    imports whatever the template has not: the user's own files are read when it starts.
    It begins when the supervisor knows of it, and ends when the supervisor does.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from meshdsl.training.launching.parent import end_with
from meshdsl.training.processes.code_version import remember

READY = b"!"  # what the template sends when it can be forked
HEADER = 8  # bytes of the length of a request
OURS = "MESHDSL_LAUNCH_"  # how variables begin that change between starts; no library reads them
STREAMS = 4  # descriptors of a request: standard input, output, errors, and where it waits
_DEVICES = ("/dev/nvidia", "/dev/accel", "/dev/vfio", "/dev/kfd", "/dev/dri")
_ARGUMENTS = slice(45, 47)  # where the arguments are in memory, among what follows the name


def forked(supervisor: int, line: int, modules: Sequence[str]) -> None:
    """Imports modules, and waits for requests; returns only in a process that comes of one.

    Ends this process if it cannot be forked, or the supervisor closes the line.

    Args:
        supervisor: the supervisor's process number.
        line: the descriptor of a socket; see `warm.Warm` for what is sent.
    """
    end_with(supervisor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else `waitpid` fails
    try:
        remember()
        for module in modules:
            importlib.import_module(module)
    except Exception:  # processes without a template will say it
        os._exit(1)
    if not _is_alone():
        os._exit(1)
    gc.collect()
    gc.freeze()  # so that collections write to no memory that the processes share
    with socket.socket(fileno=line) as requests:
        with suppress(OSError):
            requests.sendall(READY)
        while (request := _received(requests)) is not None:
            words, streams = request
            number = _fork(requests)
            if number is None:
                _become(supervisor, words["command"], words["variables"], streams)
                return
            for stream in streams:
                os.close(stream)
            with suppress(OSError):
                requests.sendall(number.to_bytes(HEADER, "big"))
    os._exit(0)


def _is_alone() -> bool:
    """Whether no other thread runs. Those of OpenBLAS end at a fork, and begin when needed."""
    if _threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return threading.active_count() == 1 and _threads() == 1 and not _has_devices()


def _has_devices() -> bool:
    """Whether a library has opened an accelerator, which no fork may use."""
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(_DEVICES):
                return True
    return False


def _threads() -> int:
    """Returns how many threads this process has, of Python and of others."""
    return len(os.listdir("/proc/self/task"))


def _received(requests: socket.socket) -> tuple[dict, list[int]] | None:
    """Returns the next request; None: there is none any more."""
    try:
        header, streams, _, _ = socket.recv_fds(requests, HEADER, STREAMS)
        rest, text = int.from_bytes(header, "big"), b""
        while rest > len(text) and (part := requests.recv(rest - len(text))):
            text += part
    except OSError:
        return None
    return (json.loads(text), streams) if len(text) == rest > 0 else None


def _fork(requests: socket.socket) -> int | None:
    """Returns the number of a new process, in that one None; the kernel gives it to the supervisor.

    Ends the template if there can be no other process.
    """
    if not _is_alone():
        os._exit(1)
    read_end, write_end = os.pipe()
    try:
        middle = os.fork()
        if middle == 0 and os.fork():
            os._exit(0)
    except OSError:  # this machine has too many processes; the supervisor sees that this one ends
        os._exit(1)
    if middle == 0:
        os.setsid()  # before the supervisor knows of it, and may end its group
        os.write(write_end, os.getpid().to_bytes(HEADER, "big"))
        for descriptor in (read_end, write_end):
            os.close(descriptor)
        requests.close()
        return None
    os.close(write_end)
    number = os.read(read_end, HEADER)
    os.close(read_end)
    os.waitpid(middle, 0)
    if len(number) < HEADER:
        os._exit(1)
    return int.from_bytes(number, "big")


def _become(
    supervisor: int, command: Sequence[str], variables: dict[str, str], streams: Sequence[int]
) -> None:
    """Makes this process the one of a command, `python -c program supervisor words...`.

    Args:
        variables: those that begin with `OURS`.
    """
    *standard, begins = streams
    if not os.read(begins, 1):  # the supervisor does not know of it
        os._exit(1)
    end_with(supervisor)
    for number, stream in enumerate(standard):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    for name in [name for name in os.environ if name.startswith(OURS)]:
        del os.environ[name]  # the others stay, with those that imports have set
    os.environ.update(variables)
    sys.argv[:] = ["-c", *command[4:]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()  # each process has numbers of its own
    _show_arguments(command)


def _show_arguments(command: Sequence[str]) -> None:
    """Has `ps` show the command of this process in place of the template's."""
    with suppress(OSError, ValueError, IndexError):
        facts = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, facts[_ARGUMENTS])
        if 0 < start < end:
            text = b"\0".join(os.fsencode(word) for word in command)[: end - start - 1]
            ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
