"""The files of a run's data: checks that they are, byte for byte, those that an earlier run read.

A thread reads all files once, during the training, and computes a checksum of every piece.
Checkpoints store these, with the sizes and times of change.

Guarantees:
    Before its first step, a run that goes on compares files with another name, size or time than
    before, and all files if they are small. The thread compares the others. A run that ends before
    the thread reports the differences so far, and warns of how much is not compared.
    The thread reads at most `_RATE`, so that it does not compete with the reading of batches.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PIECE = 2**26  # bytes with one checksum
_AT_ONCE = 2**20  # bytes read at a time
_RATE = 2**28  # bytes per second, of the thread
_AT_START = 2**28  # bytes of all files up to which they are compared before the first step
_MOST = 5  # files that are listed one by one


@dataclass
class _File:
    """One file: its name, size and time of change, and the checksums of its pieces so far."""

    path: str
    size: int
    time: int
    sums: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(path: Path) -> _File:
        status = path.stat()
        return _File(str(path), status.st_size, status.st_mtime_ns)

    @property
    def pieces(self) -> range:
        return range(-(-self.size // _PIECE))

    def entry(self, earlier: Mapping[int, str]) -> dict[str, Any]:
        """Returns the file's entry in a checkpoint, for JSON; earlier checksums stay in it."""
        sums = {**self.sums, **earlier}
        listed = [sums.get(number) for number in self.pieces]
        return {"path": self.path, "size": self.size, "time": self.time, "sums": listed}


class DataFiles:
    """The files that a run reads: `Saving(data=DataFiles(paths))`.

    Args:
        paths: the files, in their order.

    Raises:
        ValueError: a file does not exist.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]) -> None:
        try:
            self._files = [_File.of(Path(path)) for path in paths]
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be read: {error.strerror}") from error
        self._earlier: list[dict[int, str]] = [{} for _ in self._files]
        self._over = threading.Event()
        self._problem: str | None = None

    @contextmanager
    def reading(self) -> Iterator[Callable[..., None]]:
        """Reads the files in a thread while its block runs.

        The block gets `check`, which takes any arguments. The reading stops with the block. If the
        block succeeds, differences since the last `check` are raised, and a warning says how much
        was not compared.

        Raises:
            ValueError: a file is not what an earlier run has read.
        """
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        try:
            yield lambda *_: self.check()
        finally:
            self._over.set()
            thread.join()
        self.check()
        self._warn_of_rest()

    @property
    def reads_at_start(self) -> bool:
        """Whether the files are so small that `differences` compares all bytes."""
        return sum(file.size for file in self._files) <= _AT_START

    def _warn_of_rest(self) -> None:
        if left := self._not_compared():
            warnings.warn(
                f"the run was over before all of its data was compared with the checkpoint's: "
                f"{left:,} bytes were not, and may have been changed",
                stacklevel=4,
            )

    def _not_compared(self) -> int:
        """Returns how many bytes with checksums of an earlier run this one has not read."""
        return sum(
            min(_PIECE, file.size - number * _PIECE)
            for file, earlier in zip(self._files, self._earlier, strict=True)
            for number in earlier
            if number not in file.sums
        )

    def state(self) -> Any:
        """Returns the files' sizes, times and checksums so far, for JSON."""
        rows = zip(self._files, self._earlier, strict=True)
        return [file.entry(earlier) for file, earlier in rows]

    def differences(self, state: Any) -> list[str]:
        """Returns how the files differ from the state that an earlier run has stored.

        The thread compares files that look unchanged, see `check`.
        """
        if state is None:
            return []
        if len(state) != len(self._files):
            return [f"data: {len(state):,} files in the checkpoint, {len(self._files):,} here"]
        changed, few = [], self.reads_at_start
        for file, earlier, was in zip(self._files, self._earlier, state, strict=True):
            earlier.update({n: total for n, total in enumerate(was["sums"]) if total is not None})
            if difference := self._difference(file, earlier, was, few):
                changed.append(difference)
        rest = [f"... and {len(changed) - _MOST:,} files more"] if len(changed) > _MOST else []
        return [*changed[:_MOST], *rest]

    def _difference(
        self, file: _File, earlier: Mapping[int, str], was: Mapping[str, Any], reads: bool
    ) -> str | None:
        """Returns how one file differs; reads its bytes if its time differs or `few` is set."""
        if file.size != was["size"]:
            return f"{file.path} had {was['size']:,} bytes, and has {file.size:,}"
        same = (file.path, file.time) == (was["path"], was["time"])
        if same and not reads:
            return None
        try:
            for number, total in _sums(file, sorted(earlier)):
                file.sums[number] = total
                if total != earlier[number]:
                    return _changed(file, number)
        except OSError as error:
            return f"{file.path} cannot be read: {error.strerror}"
        if not same and len(earlier) < len(file.pieces):
            return (
                f"{file.path} has another name or time of change than before, and no checkpoint "
                "has checksums of all of it: it may have been changed"
            )
        return None

    def check(self) -> None:
        """Raises an error if the thread has found differences so far.

        Raises:
            ValueError: a file is not what an earlier run has read.
        """
        if self._problem is not None:
            raise ValueError(
                f"the data has changed since the checkpoint: {self._problem}. Put the file back, "
                "or go on with what is there (--override)"
            )

    def _read(self) -> None:
        """Adds checksums of the pieces that have none yet, and compares those of earlier runs."""
        began, read = time.monotonic(), 0
        for file, earlier in zip(self._files, self._earlier, strict=True):
            missing = [number for number in file.pieces if number not in file.sums]
            try:
                for number, total in _sums(file, missing):
                    file.sums[number] = total
                    if self._problem is None and earlier.get(number, total) != total:
                        self._problem = _changed(file, number)
                    read += _PIECE
                    if self._over.wait(max(0.0, read / _RATE - (time.monotonic() - began))):
                        return
            except OSError as error:
                self._problem = f"{file.path} cannot be read: {error.strerror}"

    def accept(self) -> None:
        """Accepts the files as they are, whatever earlier runs have read."""
        for earlier in self._earlier:
            earlier.clear()


def all_sums(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Reads files; returns their sizes and checksums, as `DataFiles.state` has them.

    Raises:
        OSError: a file cannot be read.
    """
    files = [_File.of(path) for path in paths]
    return [file.entry(dict(_sums(file, file.pieces))) for file in files]


def _changed(file: _File, number: int) -> str:
    first = number * _PIECE
    last = min(first + _PIECE, file.size)
    return f"{file.path} has other bytes than before, between {first:,} and {last:,}"


def _sums(file: _File, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yields the checksums of some pieces of a file."""
    if not numbers:
        return
    with open(file.path, "rb", buffering=0) as stream:
        for number in numbers:
            stream.seek(number * _PIECE)
            total, left = hashlib.blake2b(digest_size=8), _PIECE
            while left and (data := stream.read(min(left, _AT_ONCE))):
                total.update(data)
                left -= len(data)
            yield number, total.hexdigest()
