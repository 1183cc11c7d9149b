"""Files of weights: safetensors, alone or as a folder of shards with the index of Hugging Face.

Guarantees:
    Written files are complete or absent, and never replace anything.
    An error names a file that is cut off before anything is read. Files are data: nothing in them
    is executed, and an index names no file outside its folder.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from meshdsl.tensors.dtypes import BFLOAT16

SUFFIX = ".safetensors"
ONE = f"model{SUFFIX}"
INDEX = f"{ONE}.index.json"
DIMS = "dims"  # the entry of a file's metadata that holds the names of dims
_DTYPES = {
    "BOOL": "bool",
    **{f"{kind}{bits}": f"{name}{bits}" for kind, name in (("I", "int"), ("U", "uint"))
       for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    "C64": "complex64",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes:
        file: the file that has it.
        sizes: the sizes of its dims.
        dtype: its dtype; None if numpy has no such dtype.
        kind: the dtype's name in the file.
        dims: the names of the dims, if the file has them.
    """

    file: Path
    sizes: tuple[int, ...]
    dtype: np.dtype | None
    kind: str
    dims: tuple[str, ...] | None

    def __str__(self) -> str:
        if self.dims is None or len(self.dims) != len(self.sizes):
            return f"{self.kind}[{', '.join(map(str, self.sizes))}]"
        sizes = (f"{dim}={size}" for dim, size in zip(self.dims, self.sizes, strict=True))
        return f"{self.kind}[{', '.join(sizes)}]"


class WeightFiles:
    """The tensors of a file, or of a folder of files; opening it reads no numbers.

    Attributes:
        path: the file or the folder.
        tensors: its tensors, by name.

    Raises:
        ValueError: there is none, it cannot be read, or is cut off; all such files are listed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self.tensors: dict[str, Stored] = {}
        self._open: dict[Path, Any] = {}
        places = _places(self.path)
        problems = []
        for file in sorted(set(places.values())) if places else _files(self.path):
            try:
                self._open[file] = safe_open(file, framework="numpy")
                stored = _stored(file, self._open[file])
            except (SafetensorError, OSError, ValueError) as error:
                problems.append(_problem(file, error))
                continue
            wanted = [name for name, place in places.items() if place == file] or list(stored)
            problems += [
                f"{name}: not in {file}, where {INDEX} says it is"
                for name in wanted
                if name not in stored
            ]
            self.tensors |= {name: stored[name] for name in wanted if name in stored}
        if problems:
            raise ValueError("\n  ".join([f"cannot read the weights in {self.path}", *problems]))

    def read(self, name: str, index: Sequence[tuple[int, int]], dtype: Any) -> np.ndarray:
        """Reads a block of a tensor, from a start to a stop in each dim; returns it in a dtype.

        Raises:
            ValueError: the file cannot be read any more.
        """
        stored = self.tensors[name]
        file = self._open[stored.file]
        try:
            if not stored.sizes or 0 in stored.sizes:
                data = file.get_tensor(name)
            else:
                data = file.get_slice(name)[tuple(slice(*each) for each in index)]
        except (SafetensorError, OSError) as error:
            raise ValueError(f"cannot read {name} in {stored.file}: {_reason(error)}") from error
        return np.asarray(data).astype(dtype, copy=False)


def _places(path: Path) -> dict[str, Path]:
    """Returns the file of each tensor by the index; nothing if there is no index."""
    index = path / INDEX
    if not index.is_file():
        return {}
    try:
        file_of = json.loads(index.read_text())["weight_map"]
        outside = [name for name in file_of.values() if Path(name).name != name]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
    if outside:
        raise ValueError(f"{index} names a file that is not in its folder: {outside[0]!r}")
    return {name: path / file for name, file in file_of.items()}


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        hint = "".join(
            f"; {file.name} can run code when it is read, so take the safetensors of the same "
            "model, or write them with `save_pretrained` of transformers"
            for file in sorted(path.glob("*.bin"))[:1]
        )
        raise ValueError(f"{path} has no {SUFFIX} file{hint}")
    return files


def _stored(file: Path, opened: Any) -> dict[str, Stored]:
    """Returns the tensors of a file by name."""
    dims = _dims(opened.metadata())
    names = opened.keys()
    tensors = {}
    for name in names:
        about = opened.get_slice(name)
        kind = about.get_dtype()
        dtype = BFLOAT16 if kind == "BF16" else np.dtype(_DTYPES[kind]) if kind in _DTYPES else None
        tensors[name] = Stored(file, tuple(about.get_shape()), dtype, kind.lower(), dims.get(name))
    return tensors


def _dims(metadata: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
    """Returns the dims of tensors by name; files of other programs mostly have none."""
    try:
        dims_of = json.loads((metadata or {})[DIMS])
        return {name: tuple(map(str, dims)) for name, dims in dims_of.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        return {}


def _problem(file: Path, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{file}: there is no such file"
    return f"{file} is not a whole safetensors file: {_reason(error)}"


def _reason(error: Exception) -> str:
    return str(error).removeprefix("Error while deserializing header: ")


def shards(sizes: Mapping[str, int], most: int | None) -> list[list[str]]:
    """Returns the names of tensors in groups, in their order.

    Args:
        sizes: bytes of each.
        most: the maximum of bytes in a group of several tensors. None: all are in one group.
    """
    groups: list[list[str]] = [[]]
    size_of_group = 0
    for name, size in sizes.items():
        if most is not None and groups[-1] and size_of_group + size > most:
            groups.append([])
            size_of_group = 0
        groups[-1].append(name)
        size_of_group += size
    return groups


def write(
    out: Path,
    groups: Sequence[Sequence[str]],
    fetch: Callable[[Sequence[str]], Mapping[str, np.ndarray]],
    metadata: Callable[[Sequence[str]], Mapping[str, str]],
    beside: Mapping[str, Callable[[Path], Any]] = {},
) -> list[Path]:
    """Writes tensors, one file for each group; at most one group is in memory at a time.

    Args:
        out: a file, for one group, or a folder.
        fetch: returns the tensors of a group.
        metadata: returns the metadata of a group's file.
        beside: writes other files of a folder, by name: each gets its path.

    Returns:
        The files.

    Raises:
        ValueError: `out` exists already, or it cannot be written.
    """
    if out.suffix == SUFFIX:
        with _atomically(out) as folder:
            arrays = fetch(groups[0])
            _save(folder / out.name, arrays, metadata(groups[0]))
        return [out]
    count, sizes = len(groups), 0
    written: dict[str, str] = {}
    with _atomically(out) as folder:
        for number, group in enumerate(groups, 1):
            name = ONE if count == 1 else f"model-{number:05}-of-{count:05}{SUFFIX}"
            arrays = fetch(group)
            _save(folder / out.name / name, arrays, metadata(group))
            written |= dict.fromkeys(group, name)
            sizes += sum(array.nbytes for array in arrays.values())
            del arrays  # before the next are made
        if count > 1:
            index = {"metadata": {"total_size": sizes}, "weight_map": written}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / out.name / INDEX).write_text(text)
        for name, written_at in beside.items():
            written_at(folder / out.name / name)
    return [out / name for name in sorted({*written.values()})]


def check_free(out: Path) -> None:
    """Raises ValueError if the path exists and is not an empty folder."""
    if out.is_file() or (out.is_dir() and (out.suffix == SUFFIX or any(out.iterdir()))):
        raise ValueError(f"{out} is there already, and is not written over; choose another name")


@contextmanager
def _atomically(out: Path) -> Iterator[Path]:
    """Yields a temporary folder beside `out`; moves what the block writes there to `out`.

    Raises:
        ValueError: `out` exists already, or it cannot be written.
    """
    check_free(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".part", dir=out.parent))
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}. Choose another place") from error
    try:
        yield aside
        check_free(out)
        os.rename(aside / out.name, out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot write {out}: {reason}. Nothing is left of it") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _save(file: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    file.parent.mkdir(exist_ok=True)
    save_file(dict(arrays), file, dict(metadata))
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)  # as any other file; the library writes for its owner alone
    with file.open("rb") as written:
        os.fsync(written.fileno())
