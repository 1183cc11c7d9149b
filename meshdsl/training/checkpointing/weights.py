"""Weights in and out as safetensors: a model's parameters, to share and to start from.

A tensor has the name that layouts and checkpoints give it, such as `blocks/attention/query`. A
file's metadata has the names of its dims, which the `safetensors` library shows to any program.

Guarantees:
    Loaded weights equal the saved ones, to the bit, on any mesh; each process reads the blocks of
    its own devices.
    One error lists all tensors that are missing, that are not of the model, or have other dims.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshdsl.tensors.dtypes import is_float, short
from meshdsl.tensors.named_array import NamedArray, Spec
from meshdsl.training.checkpointing.adapters import FOLDER as ADAPTERS
from meshdsl.training.checkpointing.foreign_files import weight_files, write_foreign
from meshdsl.training.checkpointing.nearest import Nearest
from meshdsl.training.checkpointing.weight_files import (
    DIMS,
    SUFFIX,
    Stored,
    shards,
    write,
)
from meshdsl.training.processes.joining import together
from meshdsl.training.state import by_path, tree_like
from meshdsl.training.trainable import Trainable, names_nothing, trained

SHARD = 5 * 10**9  # bytes, as Hugging Face splits them
_MOST = 20  # the most problems in a message


def save_weights(
    out: str | os.PathLike[str],
    params: Any,
    dtype: Any = None,
    max_shard_size: int = SHARD,
    step: int | None = None,
) -> list[Path]:
    """Writes parameters as safetensors: `save_weights("weights", result.state.params)`.

    Several processes all call it; the first of them writes.

    Args:
        out: a file, by its name `*.safetensors`, or a folder, which gets `model.safetensors`, or
            several files with the index that Hugging Face writes.
        params: a tree of NamedArrays.
        dtype: the dtype to which floating-point numbers are rounded. None: they stay as they are.
        max_shard_size: bytes of one file of a folder.
        step: how many steps they were trained for, written to the files' metadata.

    Returns:
        The files.

    Raises:
        ValueError: `out` exists already, it cannot be written, or numbers are out of the dtype's
            range.

    Examples:
        >>> from meshdsl.training import save_weights
        >>> params = {"w": md.ones(md.dims(embed=2))}
        >>> [file.name for file in save_weights("weights", params, dtype="bfloat16")]
        ['model.safetensors']
    """
    arrays = by_path(params)

    def fetch(names: Sequence[str]) -> dict[str, np.ndarray]:
        return {name: on_host(arrays[name]) for name in names}

    return write_weights(Path(out), arrays, fetch, dtype, max_shard_size, step)


def write_weights(
    out: Path,
    specs: Mapping[str, Any],
    fetch: Callable[[Sequence[str]], dict[str, np.ndarray]],
    dtype: Any = None,
    max_shard_size: int = SHARD,
    step: int | None = None,
) -> list[Path]:
    """Writes the tensors that `fetch` returns for names; `specs` have their dims and dtypes."""
    out = out.absolute()
    wanted = None if dtype is None else np.dtype(dtype)
    dtypes = {name: _written(np.dtype(spec.dtype), wanted) for name, spec in specs.items()}
    sizes = {name: spec.dims.volume * dtypes[name].itemsize for name, spec in specs.items()}
    groups = shards(sizes, None if out.suffix == SUFFIX else max_shard_size)
    common = {"format": "np", "meshdsl_version": version("meshdsl")}
    common |= {} if step is None else {"step": str(step)}

    waiting: list[Sequence[str]] = list(groups)

    def converted(names: Sequence[str]) -> dict[str, np.ndarray]:
        waiting.remove(names)
        return _rounded(fetch(names), dtypes)

    def metadata(names: Sequence[str]) -> dict[str, str]:
        return {**common, DIMS: json.dumps({name: list(specs[name].dims.names) for name in names})}

    with together():
        try:
            if jax.process_index() == 0:
                return write(out, groups, converted, metadata)
        finally:  # all processes with parts of an array must fetch it, whatever happens
            for group in waiting if jax.process_count() > 1 else ():
                fetch(group)
    return []


def write_hugging_face(
    out: Path,
    model: Any,
    specs: Mapping[str, Any],
    fetch: Callable[[Sequence[str]], dict[str, np.ndarray]],
    dtype: Any = None,
    max_shard_size: int = SHARD,
    origin: str | os.PathLike[str] | None = None,
    tokenizer: str | os.PathLike[str] | None = None,
    begin: int | None = None,
    end: int | None = None,
) -> list[Path]:
    """Writes the parameters of a model as a folder of Hugging Face; arguments as of `export`."""
    wanted = None if dtype is None else np.dtype(dtype)
    dtypes = {name: _written(np.dtype(spec.dtype), wanted) for name, spec in specs.items()}
    rounded = {name: Spec(spec.dims, dtypes[name]) for name, spec in specs.items()}

    def round_to(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return _rounded(arrays, dtypes)

    target, beside = out.absolute(), (origin, tokenizer, begin, end)
    return write_foreign(target, model, rounded, fetch, round_to, max_shard_size, *beside)


def load_weights(
    path: str | os.PathLike[str], like: Any, places: Sequence[Any] | None = None
) -> Any:
    """Returns parameters from safetensors: `load_weights("weights", spec_of(init))`.

    Args:
        path: a file, or a folder of files.
        like: a tree of `md.spec` or of arrays, with the wanted dims and dtypes. A file may have
            fewer bits (bfloat16 for float32), since nothing is lost.
        places: the sharding of each leaf, for arrays without pads. Leaves without one become numpy
            arrays.

    Raises:
        ValueError: files cannot be read or are cut off, or their tensors are not those of `like`;
            all of these are listed.

    Examples:
        >>> from meshdsl.training import load_weights, save_weights
        >>> written = save_weights("weights", {"w": md.named([1.0, 2.0], ["embed"])})
        >>> print(load_weights("weights", {"w": md.spec(md.dims(embed=2))})["w"])
        f32[embed=2] [1. 2.]
    """
    return Weights(path).load(like, places)


class Weights:
    """The weights in a file or a folder: `check` them early, `load` them when they are needed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.files = weight_files(path)

    def check(self, like: Any, trainable: Trainable | None = None) -> frozenset[str]:
        """Compares the files with a model; reads no numbers.

        Args:
            like: as in `load_weights`.
            trainable: as in `training.trainable.trained`. If it is given, parameters that are
                trained may be missing, such as the adapters that a pretrained model gets. Patterns
                that only leave out (`!embedding`) name none of these; then only adapters may be
                missing.

        Returns:
            The paths of the missing parameters that may be missing.

        Raises:
            ValueError: something is not as in `like`; all differences are listed.
        """
        wanted, tensors = by_path(like), self.files.tensors
        missing = [name for name in wanted if name not in tensors]
        learning, named = frozenset[str](), trainable is not None
        if trainable is not None:
            learning = frozenset(by_path(trained(like, trainable)))
            if names_nothing(trainable):
                named = False
                learning = frozenset(name for name in learning if name.startswith(ADAPTERS))
        needless = [name for name in tensors if name not in wanted]
        nearest, problems = Nearest(needless), list[str]()
        for name in missing:
            if name not in learning:
                near = nearest(name) if len(problems) < _MOST else []
                hint = f"; there is {' and '.join(near)}" if near else ""
                left_out = named or (trainable is not None and name.startswith(ADAPTERS))
                why = ", and not trainable, so that nothing would ever set it" if left_out else ""
                problems.append(f"{name}: missing{why}{hint}")
        absent = len(problems)
        nearest = Nearest(wanted)
        for name in needless:
            near = nearest(name) if len(problems) < _MOST else []
            hint = f"; it has {near[0]}" if near else ""
            problems.append(f"{name}: not of the model (in {tensors[name].file.name}){hint}")
        problems += [
            f"{name}: {tensors[name]} in {tensors[name].file.name}, {_shown(leaf)} in the model"
            for name, leaf in wanted.items()
            if name in tensors and not _fits(tensors[name], leaf)
        ]
        if problems:
            rest = [f"... and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
            first = f"weights {self.files.path} are of another model"
            named_here = any(stored.dims for stored in tensors.values())
            if tensors and not named_here and tensors.keys().isdisjoint(wanted):
                first += (
                    "; none of the names are of meshdsl: if this is a folder of Hugging Face, it "
                    "lacks its config.json; download that beside the weights"
                )
            if not named and tensors and len(problems) == absent:
                none = "" if trainable is None else "; patterns after `!` name none"
                rest.append(
                    f"parameters that `trainable` names may be missing; they are initialised{none}"
                )
            raise ValueError("\n  ".join([first, *problems[:_MOST], *rest]))
        return frozenset(missing)

    def load(self, like: Any, places: Sequence[Any] | None = None) -> Any:
        """Returns a tree as `like`; see `load_weights`."""
        self.check(like)
        wanted = by_path(like)
        where = dict(zip(wanted, places or [None] * len(wanted), strict=True))
        leaves = [
            NamedArray(self._read(name, leaf, where[name]), leaf.dims)
            for name, leaf in wanted.items()
        ]
        return tree_like(like, leaves)

    def _read(self, name: str, leaf: Any, place: Any) -> Any:
        sizes, dtype = leaf.dims.sizes, np.dtype(leaf.dtype)
        blocks: dict[Any, np.ndarray] = {}  # devices may hold the same

        def block(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            key = tuple(each.indices(size)[:2] for each, size in zip(index, sizes, strict=True))
            if key not in blocks:
                blocks[key] = self.files.read(name, key, dtype)
            return blocks[key]

        if place is None:
            data = block((slice(None),) * len(sizes))
            return data if data.flags.writeable else np.array(data)
        return jax.make_array_from_callback(sizes, place, block)


def on_host(array: NamedArray) -> np.ndarray:
    """Returns an array without pads on the host, also if other processes have parts of it."""
    data = array.unpadded()
    if not getattr(data, "is_fully_addressable", True):
        from jax.experimental import multihost_utils

        data = multihost_utils.process_allgather(data, tiled=True)
    return np.ascontiguousarray(data).reshape(array.dims.sizes)


def _written(dtype: np.dtype, wanted: np.dtype | None) -> np.dtype:
    return wanted if wanted is not None and is_float(dtype) else dtype


def _rounded(
    arrays: dict[str, np.ndarray], dtypes: Mapping[str, np.dtype]
) -> dict[str, np.ndarray]:
    """Returns arrays in their dtypes; removes them from `arrays`, so that memory has none twice.

    Raises:
        ValueError: finite numbers of some arrays are out of range; all such arrays are listed.
    """
    rounded, problems = {}, []
    for name in list(arrays):
        array = arrays.pop(name)
        with np.errstate(over="ignore"):
            rounded[name] = array.astype(dtypes[name], copy=False)
        if rounded[name].dtype != array.dtype:
            lost = int(np.sum(np.isfinite(array) & ~np.isfinite(rounded[name])))
            if lost:
                problems.append(f"{name}: {lost} numbers are out of the range of {dtypes[name]}")
    if problems:
        raise ValueError("\n  ".join(["the weights cannot be written so", *problems]))
    return rounded


def _fits(stored: Stored, leaf: Any) -> bool:
    """Whether a tensor of a file is one of the model's, without loss."""
    if stored.sizes != leaf.dims.sizes or stored.dims not in (None, leaf.dims.names):
        return False
    wanted = np.dtype(leaf.dtype)
    if stored.dtype is None or stored.dtype == wanted:
        return stored.dtype is not None
    widens = is_float(stored.dtype) and is_float(wanted)
    return widens and np.promote_types(stored.dtype, wanted) == wanted


def _shown(leaf: Any) -> str:
    sizes = ", ".join(f"{dim.name}={dim.size}" for dim in leaf.dims)
    return f"{short(np.dtype(leaf.dtype))}[{sizes}]"
