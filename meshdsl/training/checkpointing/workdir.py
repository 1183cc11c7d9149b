"""The folder of a run: one run at a time has it, and one supervisor of each host."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = "launch.lock"  # in a host's folder of copies


@contextmanager
def locked(
    workdir: str | os.PathLike[str], name: str = "run.lock", instead: str = ""
) -> Iterator[Path]:
    """Creates a folder and locks it while its block runs; a process that dies releases the lock.

    Args:
        name: the file of the lock; those of others do not matter.
        instead: what the error says if another one has locked it; empty: to choose another workdir.

    If the disk has no locks, it warns and locks nothing.

    Raises:
        ValueError: another run has locked it, or it cannot be written to.
    """
    folder = Path(workdir).absolute()
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / name).open("ab+", buffering=0)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"workdir {folder} is in use by {_owner(folder / name)}; wait for it to end, or "
                f"{instead or 'choose another'}"
            ) from error
        except OSError as error:  # some network disks have no locks
            warnings.warn(
                f"workdir {folder} cannot be locked ({error.strerror}): see to it that no other "
                "run uses it",
                stacklevel=4,
            )
        with _writing_to(folder):
            lock.truncate(0)
            lock.write(json.dumps(_myself()).encode())
        yield folder
        lock.truncate(0)


@contextmanager
def locked_copies(folder: Path | None) -> Iterator[None]:
    """Creates a host's folder of copies and locks it while its block runs; None: there is none.

    The folder goes with the lock, if nothing else is in it.

    Raises:
        ValueError: another supervisor has locked it, or it cannot be created.
    """
    if folder is None:
        yield
        return
    lock = folder / _LOCK
    try:
        while (opened := _locked_file(lock)) is None:
            pass
    except BlockingIOError as error:
        raise ValueError(
            f"another supervisor keeps copies in {folder}, on this machine or on a disk that hosts "
            "share, and would take those of this one for its own: choose another --host_copies, "
            "such as /dev/shm/mine"
        ) from error
    except OSError as error:
        raise ValueError(f"--host_copies={folder} cannot be created: {error.strerror}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
            folder.rmdir()
        os.close(opened)


def _locked_file(lock: Path) -> int | None:
    """Returns a file that it has created and locked; None: its last owner has just deleted it.

    Raises:
        BlockingIOError: another process has locked it.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = os.open(lock, os.O_RDONLY | os.O_CREAT, 0o644)
    except FileNotFoundError:  # so is its folder
        return None
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise
    except OSError:  # a disk without locks
        return opened
    with suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(opened), lock.stat()):
            return opened
    os.close(opened)
    return None


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    """Turns an OSError of its block into a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write to {folder}: {error.strerror}. Choose another workdir"
        ) from error


def _myself() -> dict[str, object]:
    return {
        "process": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _owner(file: Path) -> str:
    try:
        lock = json.loads(file.read_text())
        return f"process {lock['process']} on {lock['host']} since {lock['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
