"""Megatron-LM's token files: `NAME.bin` with the tokens, and `NAME.idx` with where documents begin.

The index is (Megatron-LM, `megatron/core/datasets/indexed_dataset.py`), little-endian:

    b"MMIDIDX\\0\\0", version 1 (uint64), dtype code (uint8), number of sequences (uint64), number
    of document bounds (uint64), sizes of the sequences (int32 each), where they start in the .bin,
    in bytes (int64 each), and the sequences that begin documents, with the end (int64 each).

Guarantees:
    Both files are memory-mapped: opening reads only the index.
    Lengths are checked against each other, so a file that is cut off is refused when it is opened.
    A written file is complete or absent, whenever writing ends.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from meshdsl.training.data.documents import Tokens

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_HEAD = struct.Struct("<9sQBQQ")


class TokenFile(Tokens):
    """Tokens in a file; copies in other processes open it again."""

    def __init__(self, path: Path) -> None:
        bounds, dtype = _read_index(path)
        super().__init__(str(path), _mapped(path, dtype, int(bounds[-1])), bounds)

    @property
    def paths(self) -> tuple[Path, ...]:
        path = Path(self.name)
        return path, path.with_suffix(".idx")

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (Path(self.name),)


def write_token_file(
    path: Path, documents: Iterable[NDArray[np.integer]], dtype: DTypeLike = "int32"
) -> None:
    """Writes `path`, which ends in .bin, and the .idx beside it; every document is one sequence.

    Raises:
        ValueError: the format has no such dtype, or a token does not fit in it.
    """
    kind = np.dtype(dtype)
    codes = {name: code for code, name in DTYPES.items()}
    if kind.name not in codes:
        raise ValueError(f"token files hold {', '.join(codes)}, not {kind.name}")
    limits, sizes = np.iinfo(kind), []
    mark = secrets.token_hex(8)  # several processes may write the same, on several machines
    parts = {suffix: path.with_suffix(f"{suffix}.{mark}") for suffix in (".bin", ".idx")}
    with ExitStack() as stack:
        for part in parts.values():
            stack.callback(part.unlink, missing_ok=True)
        with parts[".bin"].open("wb") as file:
            for number, document in enumerate(documents):
                if (
                    document.size
                    and not limits.min <= document.min() <= document.max() <= limits.max
                ):
                    raise ValueError(f"document {number} has tokens that {kind.name} cannot hold")
                file.write(document.astype(kind.newbyteorder("<")).tobytes())
                sizes.append(document.size)
        with parts[".idx"].open("wb") as file:
            file.write(_index(codes[kind.name], kind.itemsize, np.asarray(sizes, np.int64)))
        for suffix, part in parts.items():  # the index last: without it, there is no file
            os.replace(part, path.with_suffix(suffix))


def _index(code: int, itemsize: int, sizes: NDArray[np.int64]) -> bytes:
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]) * itemsize if sizes.size else sizes
    head = _HEAD.pack(MAGIC, VERSION, code, sizes.size, sizes.size + 1)
    arrays = (sizes.astype("<i4"), starts.astype("<i8"), np.arange(sizes.size + 1, dtype="<i8"))
    return head + b"".join(array.tobytes() for array in arrays)


def _read_index(path: Path) -> tuple[NDArray[np.int64], np.dtype]:
    """Returns the bounds of documents, in tokens, and the dtype of the tokens."""
    index = path.with_suffix(".idx")
    if not index.exists():
        raise ValueError(f"{path} needs its index beside it, {index.name}")
    with index.open("rb") as file:
        head = file.read(_HEAD.size)
        length = os.fstat(file.fileno()).st_size
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        raise ValueError(f"{index} is no index of a token file: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = _HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"{index} has version {version} of the format; version {VERSION} is read")
    if code not in DTYPES:
        known = ", ".join(f"{code} {name}" for code, name in DTYPES.items())
        kind = f" ({_FLOATS[code]})" if code in _FLOATS else ""
        raise ValueError(f"{index} has the dtype code {code}{kind}; tokens have one of {known}")
    needed = _HEAD.size + 12 * sequences + 8 * documents
    if length < needed:
        raise ValueError(f"{index} is cut short: it has {length:,} bytes, and needs {needed:,}")
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    at = _HEAD.size
    sizes = np.fromfile(index, "<i4", sequences, offset=at).astype(np.int64)
    starts = np.fromfile(index, "<i8", sequences, offset=at + 4 * sequences)
    first = np.fromfile(index, "<i8", documents, offset=at + 12 * sequences)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    if np.any(sizes < 0) or not np.array_equal(starts, bounds[:-1] * dtype.itemsize):
        raise ValueError(f"{index} is damaged: its sequences do not follow one another")
    first_and_last = (first[0], first[-1]) if documents else (0, 0)
    if first_and_last != (0, sequences) or np.any(np.diff(first) < 0):
        raise ValueError(f"{index} is damaged: its documents do not cover its sequences")
    return bounds[first] if documents else bounds[:1], dtype


def _mapped(path: Path, dtype: np.dtype, count: int) -> NDArray[np.integer]:
    length, needed = path.stat().st_size, count * dtype.itemsize
    if length != needed:
        wrong = "is cut short" if length < needed else "is too long"
        raise ValueError(
            f"{path} {wrong}: it has {length:,} bytes, and its index tells of {needed:,} "
            f"({count:,} tokens of {dtype.name})"
        )
    return np.memmap(path, dtype, "r") if count else np.zeros(0, dtype)
