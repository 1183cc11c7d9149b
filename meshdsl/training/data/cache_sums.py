"""Checksums of a token cache: stored when it is built, compared by every run that reads it.

They are in `NAME.sums`, beside `NAME.bin` and `NAME.idx`: for each of these two files its size, and
a checksum of every piece.

Guarantees:
    A small cache is compared before the first step, a large one by a thread during the run.
    A cache without readable checksums counts as not built.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from meshdsl.training.data.data_files import DataFiles, all_sums

_SUFFIX = ".sums"


def is_built(path: Path) -> bool:
    """Whether a cache, its index and its checksums exist: `is_built(folder / "1f.bin")`."""
    return path.exists() and path.with_suffix(".idx").exists() and _stored(path) is not None


def seal(path: Path) -> None:
    """Stores the checksums of a cache that was just written.

    Raises:
        OSError: the cache cannot be read, or there is no room for the checksums.
    """
    target = path.with_suffix(_SUFFIX)
    part = path.with_suffix(f"{_SUFFIX}.{secrets.token_hex(8)}")
    with ExitStack() as stack:
        stack.callback(part.unlink, missing_ok=True)
        part.write_text(json.dumps(all_sums(_files(path))))
        os.replace(part, target)


def damage(path: Path) -> str | None:
    """Returns what is wrong with a cache; compares only the sizes of a large one."""
    return _Cached(path).damage()


@contextmanager
def compared(paths: Sequence[Path]) -> Iterator[Callable[[], None]]:
    """Compares large caches in a thread while its block runs.

    The block gets a function that raises if a cache is damaged.

    Args:
        paths: the files of a run; files that are no caches are ignored.

    Raises:
        ValueError: the bytes of a cache are not those that were written.
    """
    caches = [_Cached(path) for path in paths if _stored(path) is not None]
    with ExitStack() as stack:
        checks = []
        for cache in caches:
            if not cache.reads_at_start:  # else `damage` has compared all of it
                checks.append(stack.enter_context(cache.reading()))

        def check() -> None:
            for each in checks:
                each()

        yield check


class _Cached(DataFiles):
    """The files of a cache, as they were written."""

    def __init__(self, path: Path) -> None:
        super().__init__(_files(path))
        self._path = path

    @contextmanager
    def reading(self) -> Iterator[Callable[..., None]]:
        if problem := self.damage():
            raise ValueError(problem)
        with super().reading() as check:
            yield check

    def damage(self) -> str | None:
        """Returns how the files differ from the stored checksums, by `differences`."""
        written = _stored(self._path)
        assert written is not None
        # A cache may be copied: neither its name nor its time of change says that it is damaged.
        pairs = zip(written, self.state(), strict=True)
        here = [{**was, "path": now["path"], "time": now["time"]} for was, now in pairs]
        return self._described(self.differences(here))

    def _described(self, problems: list[str]) -> str | None:
        if not problems:
            return None
        return (
            f"{'; '.join(problems)}. It is a cache of tokens and is damaged: delete {self._path}, "
            "and it is built again"
        )

    def check(self) -> None:
        if self._problem is not None:
            raise ValueError(self._described([self._problem]))

    def _warn_of_rest(self) -> None:
        """Gives no warning: a run may end before all of its data is compared."""


def _files(path: Path) -> list[Path]:
    return [path, path.with_suffix(".idx")]


def _stored(path: Path) -> list[dict[str, Any]] | None:
    """Returns the checksums of a cache; None if there are none that can be read."""
    if path.suffix != ".bin":
        return None
    try:
        sums = json.loads(path.with_suffix(_SUFFIX).read_text())
    except (OSError, ValueError):
        return None
    fits = isinstance(sums, list) and len(sums) == 2
    fits = fits and all(isinstance(each, dict) and {"size", "sums"} <= {*each} for each in sums)
    return sums if fits else None
