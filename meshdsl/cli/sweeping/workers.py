"""Workers: processes that do tasks. If one dies, the others go on.

Each worker prepares itself once and then does one task after another. It sends its results as
messages, any number for a task. Workers end with the process that started them, however that ends,
and leave Ctrl-C to it.
"""

from __future__ import annotations

import collections
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

_Task = TypeVar("_Task")
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process that uses JAX may hang
_NEXT = "next"  # what a worker sends when it has done a task

Perform = Callable[[Any], Iterable[Any]]


@dataclass(frozen=True)
class Died:
    """The last message of a task whose process has died; this process makes it."""

    reason: str


def perform(
    tasks: Sequence[_Task], count: int, prepare: Callable[[Any], Perform], setup: Any
) -> Iterator[tuple[_Task, Any]]:
    """Does tasks in up to `count` processes; yields the messages of each as they come.

    After `Died` a task has no more messages; the others go on.

    Args:
        prepare: called in each process, with `setup`; returns what does a task. All of these are
            pickled, so functions are those of modules.
    """
    waiting = collections.deque(tasks)
    workers: dict[Connection, tuple[Any, _Task]] = {}
    try:
        while waiting or workers:
            while waiting and len(workers) < count:
                pipe, process = _started(prepare, setup)
                _give(pipe, waiting[0])
                workers[pipe] = process, waiting.popleft()
            for ready in wait([*workers]):
                assert isinstance(ready, Connection)
                pipe = ready
                process, task = workers[pipe]
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    del workers[pipe]
                    process.join()
                    yield task, Died(_how(process.exitcode))
                    continue
                if message != _NEXT:
                    yield task, message
                elif waiting:
                    _give(pipe, waiting[0])
                    workers[pipe] = process, waiting.popleft()
                else:
                    del workers[pipe]
                    pipe.close()
                    process.join()
    finally:
        for process, _ in workers.values():
            process.terminate()
            process.join()


def _give(pipe: Connection, task: Any) -> None:
    with contextlib.suppress(OSError):  # it has died, which is seen when its answer is read
        pipe.send(task)


def _started(prepare: Callable[[Any], Perform], setup: Any) -> tuple[Connection, Any]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, prepare, setup), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _serve(pipe: Connection, prepare: Callable[[Any], Perform], setup: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    do = prepare(setup)
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        for message in do(task):
            pipe.send(message)
        pipe.send(_NEXT)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (as when the machine is out of memory)" if name == "SIGKILL" else ""
        return f"the process that measured it was ended by {name}{hint}"
    return f"the process that measured it ended with exit code {code}; its last words are above"
