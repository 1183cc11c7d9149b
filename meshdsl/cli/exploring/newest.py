"""Newest: one task at a time, and of those that wait, the newest.

Whoever edits a layout asks for a plan after every edit, and looks at the last one only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


class Replaced(Exception):
    """A task was never begun, because a newer one came while it waited."""


class Newest(Generic[_Task, _Result]):
    """Does tasks on a thread of its own, which ends with the process.

    A task that has begun is done to its end. One at most waits for it: each new task takes the
    place of the waiting one.

    Args:
        do: does a task; its errors are those of the task's future.
    """

    def __init__(self, do: Callable[[_Task], _Result]) -> None:
        self._do = do
        self._changed = threading.Condition()
        self._waiting: tuple[_Task, Future[_Result]] | None = None
        self._closed = False
        threading.Thread(target=self._work, name="newest", daemon=True).start()

    def ask(self, task: _Task) -> Future[_Result]:
        """Returns the result of a task, to come; `Replaced` if a newer task takes its place."""
        future: Future[_Result] = Future()
        with self._changed:
            older, self._waiting = self._waiting, (task, future)
            self._changed.notify()
        if older is not None and older[1].set_running_or_notify_cancel():
            older[1].set_exception(Replaced())
        return future

    def close(self) -> None:
        """Ends the thread when it has nothing more to do; does not wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._closed)
                if self._waiting is None:
                    return
                (task, future), self._waiting = self._waiting, None
            if not future.set_running_or_notify_cancel():  # nobody waits for it any more
                continue
            try:
                future.set_result(self._do(task))
            except Exception as error:  # it is the task's; other tasks go on
                future.set_exception(error)
