"""The newest state of a run, as the names of folders say it, for processes that have no JAX.

Guarantees:
    Only complete checkpoints and copies count: those that are not have other names.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "checkpoints"  # in the workdir
ABOUT = "about.json"  # beside the arrays of a local checkpoint or copy


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


def newest_copy(folder: str | os.PathLike[str]) -> tuple[int, float] | None:
    """Returns the last step that all processes of this host have copies of, and when it was copied.

    The time is in seconds since 1970.
    """
    processes = [path for path in Path(folder).glob("process.*") if path.is_dir()]
    steps = [{int(path.name) for path in own.glob("*") if path.name.isdigit()} for own in processes]
    common = set.intersection(*steps) if steps else set()
    if not common:
        return None
    last = max(common)
    try:
        return last, max((own / str(last) / ABOUT).stat().st_mtime for own in processes)
    except OSError:  # a process is about to replace it
        return None
