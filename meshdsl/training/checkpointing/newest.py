"""The newest state of a run, as the names of folders say it, for processes that have no JAX.

Guarantees:
    Only complete checkpoints and copies count: those that are not have other names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"  # in the workdir
ABOUT = "about.json"  # beside the arrays of a local checkpoint or copy
BLOCKS = "state.safetensors"  # the arrays of one
# What a description of a copy has besides: the start that wrote it, as a number and a name, and the
# folders on this host of all processes of that start.
START = "start"
BESIDE = "beside"
NEEDS = "needs"  # sets of processes: of each, one has to be there for the state to be whole
FIRST = (0, "")  # the start of a copy that does not name it
_PROCESS = re.compile(r"process\.\d+")  # the folder of a process


def newest_saved(workdir: str | os.PathLike[str]) -> tuple[int, float] | None:
    """Returns the step of the newest complete checkpoint, and when it was saved: since 1970."""
    newest = None
    try:
        for entry in os.scandir(Path(workdir) / FOLDER):
            if entry.name.isdigit() and (newest is None or int(entry.name) > newest[0]):
                newest = int(entry.name), entry.stat().st_mtime
    except OSError:  # there is none yet, or one was removed meanwhile
        return newest
    return newest


def copies_in(folder: str | os.PathLike[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Yields the complete copies on this host: whose folder, the step, and the description.

    Those that cannot be read are left out, such as those that a process deletes meanwhile.
    """
    for own in _entries(Path(folder)):
        for path in _entries(own) if _PROCESS.fullmatch(own.name) else ():
            if path.name.isdigit():
                try:
                    about = json.loads((path / ABOUT).read_text())
                except (OSError, ValueError):  # a process is about to replace it
                    continue
                if isinstance(about, dict):
                    yield own.name, int(path.name), about


def delete_copies(folder: Path) -> None:
    """Deletes the copies on this host; the folder stays if anything else is in it."""
    for own in _entries(folder):
        if _PROCESS.fullmatch(own.name):
            shutil.rmtree(own, ignore_errors=True)
    with suppress(OSError):
        folder.rmdir()


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # it is not there any more, or no folder
        return []
