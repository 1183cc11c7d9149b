"""Seals: checksums of a checkpoint's files, written beside them once it is complete.

Storage formats notice files that are cut off, but not numbers that have changed. Each process seals
the files that it has written, in a thread of its own, so that no step waits for it. A checkpoint
without a seal, of a run that was killed in between, is not checked. The first process writes down
which checkpoint is the newest, beside the folder of the checkpoints, so that a later run notices
if the checkpoint or the whole folder is gone.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax

_NAME = "seal.{}.json"  # by process
_NEWEST = "{}.newest"  # by folder: the step of the checkpoint that was completed last
_PIECE = 2**24  # bytes
_PATIENCE = 0.05  # seconds between two looks


class Damaged(Exception):
    """A checkpoint is not as it was saved."""


class Seals:
    """Seals each checkpoint of a folder as soon as it is complete.

    Attributes:
        seconds: how long the last one took until it was complete; None: there was none.
    """

    def __init__(self, folder: Path) -> None:
        self.seconds: float | None = None
        self._folder = folder
        self._settled = threading.Event()  # no more is being written
        self._threads: list[threading.Thread] = []

    def add(self, step: int, began: float) -> None:
        """Seals the checkpoint of a step, begun at a monotonic time, as soon as it is complete."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        given = (self._folder / str(step), began)
        thread = threading.Thread(target=self._seal, args=given, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _seal(self, checkpoint: Path, began: float) -> None:
        while not checkpoint.exists() and not self._settled.wait(_PATIENCE):
            pass
        if not checkpoint.exists():
            return  # it was never completed
        self.seconds = time.monotonic() - began
        try:
            seal(checkpoint, _own(checkpoint))
            if jax.process_index() == 0:
                _replace(_newest(self._folder), checkpoint.name)
        except OSError:
            return  # it has been deleted for a later one, or the disk is full: it stays unsealed

    def wait(self) -> None:
        """Waits until every checkpoint is sealed; all must be complete or have failed before."""
        self._settled.set()
        for thread in self._threads:
            thread.join()
        self._settled.clear()


def seal(checkpoint: Path, files: Iterable[Path]) -> None:
    """Writes the checksums of files of a checkpoint, as this process's seal."""
    sums = {str(file.relative_to(checkpoint)): _sum(file) for file in files}
    _replace(checkpoint / _NAME.format(jax.process_index()), json.dumps(sums))


def _replace(file: Path, text: str) -> None:
    aside = file.with_name(f"{file.name}.part")
    aside.write_text(text)
    os.replace(aside, file)


def missing(folder: Path) -> int | None:
    """Returns the step of a folder's newest checkpoint if it is gone, else None.

    A damaged checkpoint does not count: it was renamed and reported.
    """
    try:
        newest = int(_newest(folder).read_text())
    except (FileNotFoundError, ValueError):  # of a run that has completed none
        return None
    renamed = any(folder.glob(f"damaged.{newest}*"))
    return None if renamed or (folder / str(newest)).exists() else newest


def _newest(folder: Path) -> Path:
    return folder.with_name(_NEWEST.format(folder.name))


def damage(checkpoint: Path, alone: bool = False) -> str | None:
    """Returns what is wrong with this process's share of a checkpoint's files, or None.

    Args:
        alone: whether this process checks all files.

    Raises:
        OSError: a file exists, but cannot be read.
    """
    seals = sorted(checkpoint.glob(_NAME.format("*")))
    for file in seals if alone else seals[jax.process_index() :: jax.process_count()]:
        try:
            sums = json.loads(file.read_text())
        except (FileNotFoundError, ValueError) as error:
            return f"{file.name} cannot be read ({error})"
        for name, expected in sums.items():
            try:
                actual = _sum(checkpoint / name)
            except FileNotFoundError as error:
                return f"{name} cannot be read ({error.strerror})"
            if actual != expected:
                return f"{name} is not as it was written"
    return None


def _own(checkpoint: Path) -> Iterator[Path]:
    """Yields the files of this process; those of no process count as the first one's."""
    index = jax.process_index()
    for file in sorted(checkpoint.rglob("*")):
        parts = file.relative_to(checkpoint).parts
        if not file.is_file() or file.name.startswith("seal."):
            continue
        writers = [part for part in parts if part.startswith("ocdbt.process_")]
        writer = int(writers[0].removeprefix("ocdbt.process_")) if writers else 0
        if writer == index:
            yield file


def _sum(file: Path) -> list[int]:
    """Returns the size and the checksum of a file."""
    size, total = 0, 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            size, total = size + len(piece), zlib.crc32(piece, total)
    return [size, total]
