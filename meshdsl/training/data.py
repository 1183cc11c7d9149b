"""Byte-level text for language models, and batches of any examples, shuffled by grain.

Text is bytes: no tokenizer, a vocabulary of 256, nothing to download. The documents follow one
another, each ended by `SEPARATOR`, and are cut into windows of `length + 1` bytes: `length` inputs
and the same shifted by one as targets.

Guarantees:
    Windows do not overlap, and together cover the text up to its unfinished last window.
    One window in `held_out` is kept from training, chosen by its position alone.
    Batches are a function of the files (names and bytes) and the seed; of no other circumstance.
    Reading happens in the calling thread; no thread or process outlives the iterator.
"""

from __future__ import annotations

import errno
import glob
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import grain

VOCABULARY = 256
SEPARATOR = 0  # the byte that ends every document

Batch: TypeAlias = dict[str, np.ndarray]


def text_files(pattern: str | None = None) -> list[Path]:
    """Finds the text to train on: non-empty, readable files, sorted by their absolute path.

    Args:
        pattern: paths with `*` (within a folder), `**` (all folders below) and `?`; commas separate
            several. None or blank: the `*.py` files of Python's standard library, without
            `site-packages`. These differ between Python versions.

    Raises:
        ValueError: a pattern matches nothing or only empty files, or a file cannot be read. All
            such problems are listed.
    """
    patterns = [part.strip() for part in (pattern or "").split(",") if part.strip()]
    found: set[Path] = set()
    problems: list[str] = []
    for name, paths in [(p, _matches(p)) for p in patterns] or [_standard_library()]:
        sizes = {}
        for path in paths:
            try:
                sizes[path] = _readable_size(path)
            except OSError as error:
                problems.append(f"{path} cannot be read: {error.strerror}")
        if not paths:
            problems.append(_no_match(name))
        elif not any(sizes.values()) and len(sizes) == len(paths):
            problems.append(f"`{name}` matches only empty files, {len(paths)} in all")
        found.update(path for path, size in sizes.items() if size)
    if problems:
        raise ValueError(_describe(problems))
    return sorted(found, key=Path.as_posix)


def _matches(pattern: str) -> list[Path]:
    pattern = os.path.expanduser(pattern)
    literal = os.path.lexists(pattern)  # a name may contain what would be a wildcard: notes[1].txt
    paths = [pattern] if literal else glob.glob(pattern, recursive=True)
    return [Path(os.path.abspath(path)) for path in paths if not os.path.isdir(path)]


def _standard_library() -> tuple[str, list[Path]]:
    """Returns the pattern that stands for the standard library's sources, and what it matches."""
    root = sysconfig.get_paths()["stdlib"]
    paths = []
    for folder, inner, names in os.walk(root):
        inner[:] = set(inner) - {"site-packages", "dist-packages", "__pycache__"}
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return f"{root}/**/*.py", paths


def _readable_size(path: Path) -> int:
    if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
        raise OSError(errno.EINVAL, "not a regular file")
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_size


def _no_match(pattern: str) -> str:
    """Says where a pattern was looked for in vain: the folder before its first wildcard."""
    path = Path(os.path.expanduser(pattern)).absolute()
    if path.is_dir():
        return f"`{pattern}` is a folder; write `{pattern.rstrip('/')}/**/*` for all files in it"
    fixed = [part for part in path.parents if not glob.has_magic(str(part))]
    exists = "" if fixed[0].is_dir() else ", which does not exist"
    return f"`{pattern}` matches no file; looked in {fixed[0]}{exists}"


def _describe(problems: list[str], most: int = 10) -> str:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"  {number}. {text}" for number, text in enumerate(problems[:most], start=1)]
    if len(problems) > most:
        lines.append(f"  ... and {len(problems) - most} more")
    return "\n".join(
        [
            f"cannot read the text to train on ({count})",
            "",
            *lines,
            "",
            "  Write paths with * (within a folder), ** (all folders below) and ?, as in",
            "    --data='corpus/**/*.txt,notes/*.md'",
            "  Without --data, the sources of Python's standard library are used.",
        ]
    )


class Source(Protocol):
    """Examples that can be picked by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: NDArray[np.int64], /) -> Batch:
        """Returns the chosen examples, stacked along a leading batch dim."""


@dataclass(frozen=True, eq=False)
class Arrays:
    """Examples given as whole arrays, one row each: `Arrays({"image": images, "label": labels})`.

    Raises:
        ValueError: the arrays differ in their number of rows.
    """

    arrays: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        if len({len(array) for array in self.arrays.values()}) != 1:
            rows = ", ".join(f"{name} {len(array):,}" for name, array in self.arrays.items())
            raise ValueError(f"every array needs one row for each example, got {rows or 'none'}")

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        return {name: array[rows] for name, array in self.arrays.items()}


@dataclass(frozen=True, eq=False)
class Windows:
    """Chosen windows of a text, as `tokens` and `targets`: int32 [batch, length].

    Attributes:
        text: uint8 [windows, length + 1], every window of the corpus.
        chosen: the rows of `text` that belong to this split.
    """

    text: NDArray[np.uint8]
    chosen: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, rows: NDArray[np.int64]) -> Batch:
        picked = self.chosen[rows]
        return {
            "tokens": self.text[picked, :-1].astype(np.int32),
            "targets": self.text[picked, 1:].astype(np.int32),
        }


@dataclass(frozen=True, eq=False)
class ByteCorpus:
    """The bytes of all documents, each followed by `SEPARATOR`, held in memory once."""

    text: NDArray[np.uint8]

    @staticmethod
    def read(files: Iterable[Path]) -> ByteCorpus:
        """Reads documents in the order given."""
        text = bytearray()
        for file in files:
            text += file.read_bytes()
            text.append(SEPARATOR)
        corpus = ByteCorpus(np.frombuffer(text, np.uint8))
        corpus.text.flags.writeable = False
        return corpus

    def split(self, length: int, *, batch_size: int, held_out: int = 20) -> tuple[Windows, Windows]:
        """Cuts the text into windows to train on, and windows held out from training.

        Args:
            length: tokens in a window.
            batch_size: the windows that each of the two must have at least.
            held_out: one window in this many is held out: the last of each run of that length.

        Returns:
            The windows to train on and the held-out ones.

        Raises:
            ValueError: the text is too short, or a number is out of range.
        """
        _check_at_least(1, length=length, batch_size=batch_size)
        _check_at_least(2, held_out=held_out)
        size = length + 1
        needed = held_out * batch_size * size
        if self.text.size < needed:
            raise ValueError(
                f"the text is too short: it has {self.text.size:,} bytes, and "
                f"batch_size={batch_size} with length={length} needs {needed:,}\n"
                f"  ({batch_size} held-out windows of {size} bytes, one window in {held_out} being "
                "held out).\n"
                "  Give more text, or a smaller batch_size or length."
            )
        count = self.text.size // size
        windows = self.text[: count * size].reshape(count, size)
        rows = np.arange(count)
        is_held_out = rows % held_out == held_out - 1
        return Windows(windows, rows[~is_held_out]), Windows(windows, rows[is_held_out])


def shuffled_batches(source: Source, batch_size: int, seed: int) -> Iterator[Batch]:
    """Yields batches without end: every epoch visits each example once, in an order of its own.

    Epochs follow without a gap, so a batch may hold the end of one and the start of the next. The
    result is a grain iterator: `get_state` and `set_state` resume it at the exact batch.

    Raises:
        ValueError: fewer examples than one batch, or a number out of range.
    """
    import grain  # with JAX behind it, the slowest import here: only for those who read data

    _check_at_least(0, seed=seed)
    _check_one_batch(source, batch_size)
    rows = grain.MapDataset.range(len(source)).seed(seed).shuffle().repeat()
    return iter(_batches(source, rows, batch_size))


def ordered_batches(source: Source, batch_size: int, count: int | None = None) -> Iterable[Batch]:
    """Returns whole batches in a fixed order, the same on every pass: for evaluation.

    Args:
        source: the examples.
        batch_size: examples in a batch; a rest that does not fill one is left out.
        count: at most this many batches, of examples spread evenly over the source. None: all.

    Raises:
        ValueError: fewer examples than one batch, or a number out of range.
    """
    import grain

    _check_one_batch(source, batch_size)
    if count is None:
        rows = np.arange(len(source))
    else:
        _check_at_least(1, count=count)
        used = min(count, len(source) // batch_size) * batch_size
        rows = np.arange(used) * len(source) // used
    return _batches(source, grain.MapDataset.source(rows), batch_size)


def _batches(source: Source, rows: grain.MapDataset, batch_size: int) -> grain.IterDataset:
    import grain

    batches = rows.batch(batch_size, drop_remainder=True).map(source.__getitem__)
    in_this_thread = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return batches.to_iter_dataset(in_this_thread)


def _check_one_batch(source: Source, batch_size: int) -> None:
    _check_at_least(1, batch_size=batch_size)
    if len(source) < batch_size:
        raise ValueError(
            f"batch_size={batch_size} needs at least {batch_size:,} examples, there are only "
            f"{len(source):,}"
        )


def _check_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
