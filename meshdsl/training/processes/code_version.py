"""The version of this package's code, which all processes of a job must share.

A process that runs for long may have imported other code than the files have now. `remember` and
`loaded` tell these apart.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]
_ENDS = (".py", ".json")
_REMEMBERED: list[tuple[str, str]] = []  # the state of the files, and the version of the code


def code_version(folder: Path = _PACKAGE) -> str:
    """Returns a hash of all source files and tables of this package.

    In a checkout, some of its folders are links, which `Path.rglob` does not follow.
    """
    total = hashlib.sha256()
    for file in sorted(map(Path, _files(folder))):
        total.update(str(file.relative_to(folder)).encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]


def remember(folder: Path = _PACKAGE) -> None:
    """Notes the version of the code; a process calls this before it imports what `loaded` is of.

    Processes that are forked know it too.
    """
    _REMEMBERED.clear()
    with suppress(OSError):  # files are being replaced
        state, version = _state(folder), code_version(folder)
        if _state(folder) == state:
            _REMEMBERED.append((state, version))


def loaded(folder: Path = _PACKAGE) -> str | None:
    """Returns the version of the code that this process runs.

    None: it is not known. The process has not called `remember`, or a file was written to since.
    """
    if not _REMEMBERED:
        return None
    (state, version), *_ = _REMEMBERED
    try:
        return version if _state(folder) == state else None
    except OSError:  # files are being replaced
        return None


def told(folder: Path = _PACKAGE) -> str:
    """Returns the version that the processes of a job compare.

    That of the code which was noted, also where files have changed since: the process runs it.
    """
    return _REMEMBERED[0][1] if _REMEMBERED else code_version(folder)


def _state(folder: Path) -> str:
    """Returns a hash that changes when a file is written to, replaced, added or removed.

    No program can set when a file's record was changed (`ctime`), so it also changes if a file gets
    its old content again.
    """
    total = hashlib.sha256()
    for file in sorted(_files(folder)):
        facts = os.stat(file)
        total.update(f"{file} {facts.st_ino} {facts.st_size} {facts.st_ctime_ns}\0".encode())
    return total.hexdigest()


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder, followlinks=True):
        yield from (os.path.join(parent, name) for name in names if name.endswith(_ENDS))
