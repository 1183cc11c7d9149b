"""Finds the token cache of text files: the one that was made of the same bytes.

A cache is named by the checksums of all bytes of its files, so a changed file has another cache.
`NAME.key` beside the caches says that files with given names, sizes and times belong to a cache:
then the files are not read again. One of the times is that of the last change of the inode
(`st_ctime`), which every write sets, and which programs that keep the time of modification, such
as `cp -p` and `rsync -t`, cannot set.

Guarantees:
    A change is seen, unless it leaves size and both times as they were. This needs a clock that was
    set back, two changes within the resolution of the file system's times (some milliseconds), or a
    file system without `st_ctime`, such as FAT.
    Files that were copied or touched are read again, and use the same cache if they are equal.
    A run whose cache is open never has it replaced by another one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meshdsl.training.data.cache_sums import damage, is_built, seal
from meshdsl.training.data.data_files import all_sums

_NAME = re.compile(r"[0-9a-f]{24}\.bin")


class Unreadable(Exception):
    """A file cannot be read, so its cache is not known."""


def token_cache(
    folder: Path, paths: Sequence[Path], settings: Any, write: Callable[[Path], None]
) -> Path:
    """Returns the undamaged cache of files, which is written if it does not exist yet.

    Args:
        settings: what else the tokens depend on, for JSON.
        write: writes the tokens of the files to a path and its index beside it.

    Raises:
        Unreadable: a file cannot be read.
        ValueError: the cache is damaged, or a file was changed while it was read.
        OSError: the cache cannot be written.
    """
    with _reading():
        before = _stamps(paths)
    key = folder / f"{_hash([before, settings])}.key"
    target = _known(key)
    if target is None or not is_built(target):
        with _reading():
            sums = all_sums(paths)
        contents = [
            [path.suffix, each["size"], each["sums"]]
            for path, each in zip(paths, sums, strict=True)
        ]
        target = folder / f"{_hash([contents, settings])}.bin"
        folder.mkdir(parents=True, exist_ok=True)
        built = is_built(target)
        if not built:
            write(target)
        with _reading():
            pairs = zip(before, _stamps(paths), strict=True)
        if changed := [was["path"] for was, now in pairs if was != now]:
            raise ValueError(
                f"{', '.join(changed)} changed while it was read; start again when nothing writes "
                "to it"
            )
        if not built:
            seal(target)
        _write(key, target.name)
    if problem := damage(target):
        raise ValueError(problem)
    return target


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreadable(f"{error.filename or 'a file'}: {error.strerror or error}") from None


def _stamps(paths: Sequence[Path]) -> list[dict[str, Any]]:
    stamps = []
    for path in paths:
        status = path.stat()
        stamps.append(
            {
                "path": os.path.abspath(path),
                "size": status.st_size,
                "modified": status.st_mtime_ns,
                "changed": status.st_ctime_ns,
            }
        )
    return stamps


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def _known(key: Path) -> Path | None:
    """Returns the cache that a key names; None if there is none that can be read."""
    try:
        name = key.read_text()
    except (OSError, ValueError):
        return None
    return key.parent / name if _NAME.fullmatch(name) else None


def _write(key: Path, name: str) -> None:
    part = key.with_suffix(f".key.{secrets.token_hex(8)}")
    with ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        part.write_text(name)
        os.replace(part, key)
