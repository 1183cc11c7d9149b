"""Reports failures while Orbax writes as one line: a disk that is full, or a clock that jumps.

Orbax logs a failure with its traceback in every thread that meets it, and raises it as well. We
report what is raised, so these logs, and only these, are dropped while a folder is open. When the
write of one array fails, writes of others may still go on and meet a closed event loop. The
interpreter prints a traceback for each of them, which is dropped as well. Threads of a failed save
that still run are waited for, else they would report that the interpreter shuts down.

Of several processes, one whose disk refuses does not come to Orbax's barriers, and the others wait
there for 20 minutes. So it tells them, and all of them raise.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from meshdsl.training.processes.joining import failed_elsewhere, tell_failure

_REFUSED = (errno.EPERM, errno.EACCES, errno.EROFS)
_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, *_REFUSED)
_SYSTEM = {code: os.strerror(code) for code in _CODES}
_JUMP = 1.0  # seconds by which the clock must be off to be reported
_LEFT = 20.0  # seconds in which threads of a failed save end
_WITHOUT_LOSS = "did not provide metrics"
_WRITER = "async_save"  # Orbax's thread that waits for its writes, and logs what they raise
_LOOK = 0.5  # seconds between two looks at whether a process has failed


def system_error(error: BaseException | None) -> str | None:
    """Returns the operating system's message of a failure; None if it has another cause."""
    for each in _chain(error):
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
        for text in _SYSTEM.values():
            if text in str(each):  # storage libraries put it into words
                return text
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _timed_out(error: BaseException | None) -> bool:
    return any(isinstance(each, TimeoutError) and not each.strerror for each in _chain(error))


def _offset() -> float:
    """Returns the wall clock minus the monotonic clock; it changes only if the wall clock jumps."""
    return time.time() - time.monotonic()


@dataclass
class Writing:
    """The writing to a folder, from one save to the next.

    Attributes:
        folder: the folder of the checkpoints.
        logs: what Orbax has logged of failures.
    """

    folder: Path
    logs: Unreported = field(default_factory=lambda: Unreported([]))
    _offset: float = field(default_factory=_offset)
    _began: float = field(default_factory=time.monotonic)

    def begins(self) -> None:
        """Records the time at which a write begins."""
        self._offset, self._began = _offset(), time.monotonic()
        self.logs.failure = None

    def finish(self, wait: Callable[[], None]) -> None:
        """Waits until every process has written; all must call this.

        Args:
            wait: waits for this process's writing, and for the others.

        Raises:
            ValueError: as of `reported`, in every process if one of them fails.
        """
        if jax.process_count() == 1:
            with self.reported():
                wait()
            return
        ended, errors = threading.Event(), list[BaseException]()

        def run() -> None:
            try:
                wait()
            except BaseException as error:
                errors.append(error)
            finally:
                ended.set()

        # Orbax's wait cannot be interrupted; if it goes on, nothing but this thread waits for it.
        threading.Thread(target=run, daemon=True).start()
        with self.reported_to_all():
            while not ended.wait(_LOOK) and self.logs.failure is None:
                if reason := failed_elsewhere():
                    raise ValueError(reason)
            if error := self.logs.failure or next(iter(errors), None):
                raise error

    @contextmanager
    def reported_to_all(self) -> Iterator[None]:
        """Reports as `reported` does, to the other processes too: they end with the same cause."""
        try:
            with self.reported():
                yield
        except Exception as error:
            self.logs.left = jax.process_count() > 1
            # Other errors may come of a process that is gone: those that watch it name it.
            if isinstance(error, ValueError) and failed_elsewhere() is None:
                tell_failure(str(error))
            raise

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Reports a failure of its block, or of the writing since the last save, as one line.

        Raises:
            ValueError: the disk refuses the data, or the writing takes longer than Orbax waits.
        """
        try:
            yield
        except Exception as error:
            cause = system_error(error)
            if cause is None and _timed_out(error):
                cause = self._timeout()
            if cause is None:
                raise
            if jax.process_count() == 1:  # else they wait for others
                _wait_for_threads()
            raise ValueError(
                f"cannot save a checkpoint in {self.folder}: {cause}. Those before it are complete"
            ) from error

    def _timeout(self) -> str:
        jump = _offset() - self._offset
        if abs(jump) > _JUMP:
            way = "forward" if jump > 0 else "back"
            return (
                f"the clock of this machine jumped {way} by {abs(jump):,.0f} s while it was "
                "written, and Orbax counts by it how long it waits. Start again once the clock is "
                "right"
            )
        return (
            f"it is not complete after {time.monotonic() - self._began:,.0f} s, which is as long "
            "as Orbax waits: the disk or another process is too slow"
        )


def _wait_for_threads() -> None:
    """Waits until the threads that Orbax has started have ended, but not for long."""
    end = time.monotonic() + _LEFT
    for thread in threading.enumerate():
        if type(thread).__module__.partition(".")[0] == "orbax" and not thread.daemon:
            thread.join(max(0.0, end - time.monotonic()))


class Unreported(logging.Filter):
    """Drops log records of failures that are also raised, and so reported; passes all others.

    It also drops Orbax's warning that a checkpoint has no loss, which is as it should be.

    Attributes:
        failure: the last failure of a write.
        left: whether this process leaves the others in a save; its threads fail after that.
    """

    def __init__(self, package: Sequence[str]) -> None:
        super().__init__()
        self.failure: BaseException | None = None
        self.left = False
        self._folders = tuple(os.path.join(folder, "") for folder in package)

    def filter(self, record: logging.LogRecord) -> bool:
        if self.left and (record.name == "asyncio" or self._within(record.pathname)):
            return False
        error = record.exc_info[1] if record.exc_info else None
        if error is None:  # a step that is not evaluated has no loss
            return _WITHOUT_LOSS not in record.getMessage() or not self._within(record.pathname)
        raised = _of_disk(error) or _timed_out(error)
        if raised and record.name == "asyncio":  # tasks that nobody waits for once one has failed
            frames = traceback.walk_tb(error.__traceback__)
            return not any(self._within(frame.f_code.co_filename) for frame, _ in frames)
        if not self._within(record.pathname):
            return True
        if raised or threading.current_thread().name == _WRITER:
            self.failure = error
        return not raised

    def _within(self, file: str) -> bool:
        return file.startswith(self._folders)


def _of_disk(error: BaseException) -> bool:
    """Whether a failure is one of a disk, which `Writing` reports."""
    return any(
        getattr(each, "errno", None) in _CODES
        or any(text in str(each) for text in _SYSTEM.values())
        for each in _chain(error)
    )


class _LateWrites:
    """A hook for errors that nothing can raise; it drops those of writes after a failed write.

    A thread of TensorStore wakes the event loop of a failed save, which is closed. This may happen
    after the folder is closed.
    """

    def __init__(self, others: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._others = others

    def __call__(self, failure: sys.UnraisableHookArgs) -> None:
        if not _wakes_a_closed_loop(failure):
            self._others(failure)


def _wakes_a_closed_loop(failure: sys.UnraisableHookArgs) -> bool:
    """Whether a thread of a library has called only asyncio, whose loop is closed."""
    if failure.object is not None or str(failure.exc_value) != "Event loop is closed":
        return False
    folder = os.path.join(os.path.dirname(asyncio.__file__), "")
    frames = traceback.walk_tb(failure.exc_traceback)
    return all(frame.f_code.co_filename.startswith(folder) for frame, _ in frames)


@contextmanager
def dropped_logs() -> Iterator[Unreported]:
    """Drops Orbax's logs of failures that are reported here, during its block; yields what drops.

    Tracebacks of writes that a failed save leaves behind are dropped from then on. So are all of
    Orbax's logs where it leaves other processes behind.
    """
    import orbax.checkpoint

    if not isinstance(sys.unraisablehook, _LateWrites):
        sys.unraisablehook = _LateWrites(sys.unraisablehook)
    own = Unreported(list(orbax.checkpoint.__path__))
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.addFilter(own)
    try:
        yield own
    finally:
        for logger in () if own.left else loggers:
            logger.removeFilter(own)
