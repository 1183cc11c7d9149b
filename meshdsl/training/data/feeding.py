"""Feeding a run: batches with named dims, as many at once as a call takes, from any step on.

A run is fed from an iterable of batches. The iterable may have further methods:

* `state()` and `restore(state)`, or grain's `get_state` and `set_state`: a run that goes on
  restores its position. Without them, the run skips batches.
* `batch_size` and `resize(batch_size, rows)`: its batches can grow (`BatchRamp`), and each of
  several processes reads only the rows of its devices. Without them, each reads full batches.
* `peek()`: returns the next batch without starting to read.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from meshdsl.tensors.dims import STEPS, Dimension, DimsLike, as_list, did_you_mean
from meshdsl.tensors.named_array import NamedArray, Spec, named, spec
from meshdsl.training.batch_ramp import BatchRamp
from meshdsl.training.data.rows import Rows
from meshdsl.training.settings import Of, check, record, setting

Batch = Mapping[str, Any]
_BYTES = "bytes"  # the key of a position that is bytes


@record
class Data:
    """The batches that a run takes its steps with: `Data(batches, {"image": ["batch", "pixel"]})`.

    Raises:
        ValueError: values are of another kind.

    Examples:
        >>> from meshdsl.training import Data
        >>> batches = [{"image": np.zeros((2, 4), "float32")}]
        >>> data = Data(batches, {"image": ["batch", "pixel"]})
        >>> data.batch_dims
        {'image': ['batch', 'pixel']}
    """

    batches: Iterable[Batch] = setting("Dicts of NamedArrays, or of arrays with `batch_dims`.")
    batch_dims: Mapping[str, DimsLike] | None = setting(
        "The dims of each entry of a batch, also of those to evaluate with: "
        '{"image": ["batch", "pixel"]}. Default: the entries are NamedArrays.',
        Of(Mapping, "are the dims of each entry, as in {'image': ['batch']}"),
        default=None,
    )
    batch_ramp: BatchRamp | None = setting(
        "Let the batch grow: start,increment,samples, as 16,8,300_000. Default: it has its size.",
        Of(BatchRamp, "is BatchRamp(...) of meshdsl.training.batch_ramp"),
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)


class Feed:
    """The batches of a run, one for each step, or several together.

    Args:
        batches: dicts of NamedArrays, or of arrays whose dims `dims` names.
        dims: the dims of each entry.
        at_once: how many batches come together.
        ramp: how batches grow, if they do.
        batch_dim: the dim that grows.

    Attributes:
        full: the size of the largest batch; None: there is one size, which need not be known.
        seen: the number of samples so far; counted only if batches grow.
        rows: returns the rows that this process reads of a batch of a size; by default all.

    Raises:
        ValueError: there is no batch, entries have no dim names, or batches cannot grow.
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        dims: Mapping[str, DimsLike] | None,
        at_once: int = 1,
        ramp: BatchRamp | None = None,
        batch_dim: str = "batch",
    ) -> None:
        self._source = iterator(batches, "batches")
        self._given: int | None = None  # the size its batches had, once it is asked for others
        self._dims, self._at_once = _of_any_size(dims, batch_dim), at_once
        self._ramp, self._batch_dim = ramp, batch_dim
        self._held: dict[str, NamedArray] | None = None
        self.rows: Callable[[int | None], Rows | None] = lambda size: None
        self.full: int | None = None
        self.seen = 0
        if ramp is not None:
            self.full = _size_of(self._source)
            ramp.sizes(self.full)
        self._resize()
        self._first = self._peek()

    @property
    def size(self) -> int | None:
        """The size of the next batch; None: that of all of them."""
        if self._ramp is None or self.full is None:
            return None
        return self._ramp.size_at(self.seen, self.full)

    def specs(self) -> dict[int | None, dict[str, Spec]]:
        """Returns dims and dtypes of the batches of each size."""
        if self._ramp is None or self.full is None:
            return {None: self._first}
        return {size: self._sized(size) for size in self._ramp.sizes(self.full)}

    def share(self) -> float:
        """Returns which part of a full batch the next one is."""
        size = self.size
        return 1.0 if size is None or self.full is None else size / self.full

    def counts(self) -> dict[str, float]:
        """Returns metrics of batches that grow: the size of the next one, and samples so far."""
        size = self.size
        return {} if size is None else {"batch_size": size, "samples": self.seen}

    def position(self) -> Any:
        """Returns the position in the data; None if the data has no such method."""
        tell = _method(self._source, "state", "get_state")
        place = _as_json(None if tell is None else tell())
        return place if self._ramp is None else {"seen": self.seen, "data": place}

    def seek(self, step: int, position: Any) -> None:
        """Moves to the position after a step of an earlier run.

        Raises:
            ValueError: the position is of other data, or of a run with another batch ramp; or the
                data ends before the step.
        """
        go = _method(self._source, "restore", "set_state")
        seen = None
        if isinstance(position, Mapping) and {*position} == {"seen", "data"}:
            seen, position = position["seen"], position["data"]
        if position is not None and go is not None:
            self._held = None
            go(_from_json(position))
            if self._ramp is not None and self.full is not None:
                self.seen = step * self.full if seen is None else seen
            return
        for done in range(0, step, self._at_once):
            if next(self, None) is None:
                raise ValueError(f"the data ended after {done} steps, and the run was at {step}")

    def close(self) -> None:
        """Restores the data's original batch size, with all rows."""
        if self._given is not None:
            _method(self._source, "resize")(self._given)

    def __iter__(self) -> Iterator[dict[str, NamedArray]]:
        return self

    def __next__(self) -> dict[str, NamedArray]:
        size = self.size
        batch, self._held = self._held, None
        if batch is None:
            parts = _method(self._source, "resize") is not None
            rows = self.rows(size) if parts else None
            self._resize(rows)
            batch = self._read(rows)
        self.seen += 0 if size is None else size * self._at_once
        return batch

    def _read(self, rows: Rows | None = None) -> dict[str, NamedArray]:
        """Returns the batches of the next call; ends if there are too few."""
        raw = itertools.islice(self._source, self._at_once)
        batches = [_named(batch, self._dims, "batches") for batch in raw]
        if len(batches) < self._at_once:
            raise StopIteration
        batch = batches[0] if self._at_once == 1 else _stacked(batches)
        return batch if rows is None else rows.globally(batch)

    def _resize(self, rows: Rows | None = None) -> None:
        """Resizes the data's batches to the next size, with this process's rows."""
        size = self.size
        if size is not None or rows is not None:
            had = _size_of(self._source)
            self._given = had if self._given is None else self._given
            read = None if rows is None else rows.read
            _method(self._source, "resize")(had if size is None else size, read)

    def _peek(self) -> dict[str, Spec]:
        """Returns dims and dtypes of the first batches; keeps these for the first call if read."""
        peek = _method(self._source, "peek")
        if peek is None or jax.process_count() == 1:  # reading begins while programs compile
            try:
                self._held = self._read()
            except StopIteration:
                raise ValueError("batches: there is no batch") from None
            return specs_of(self._held)
        specs = specs_of(_named(peek(), self._dims, "batches"))
        if self._at_once == 1:
            return specs
        steps = Dimension(STEPS, self._at_once)
        return {name: spec([steps, *one.dims], one.dtype) for name, one in specs.items()}

    def _sized(self, size: int) -> dict[str, Spec]:
        """Returns dims and dtypes of batches of a size."""
        grown = Dimension(self._batch_dim, size)
        return {
            name: spec([grown if d.name == grown.name else d for d in one.dims], one.dtype)
            for name, one in self._first.items()
        }


@dataclass(frozen=True)
class Named:
    """Batches that can be iterated repeatedly, with named dims."""

    batches: Iterable[Batch]
    dims: Mapping[str, DimsLike] | None
    role: str
    batch_dim: str = "batch"
    rows: Rows | None = None

    def __iter__(self) -> Iterator[dict[str, NamedArray]]:
        dims = _of_any_size(self.dims, self.batch_dim)
        for batch in self.batches:
            named_batch = _named(batch, dims, self.role)
            yield named_batch if self.rows is None else self.rows.globally(named_batch)

    def specs(self) -> dict[str, Spec]:
        """Returns dims and dtypes of a batch.

        Raises:
            ValueError: there is no batch, or entries have no dim names.
        """
        for batch in self:
            return specs_of(batch)
        raise ValueError(f"{self.role}: there is no batch")

    @contextmanager
    def reading(self, rows: Rows | None) -> Iterator[Named]:
        """Returns these batches, of which this process reads only its rows if possible."""
        resize = _method(self.batches, "resize")
        if rows is None or resize is None:
            yield self
            return
        size = _size_of(self.batches)
        resize(size, rows.read)
        try:
            yield replace(self, rows=rows)
        finally:
            resize(size)


def iterator(batches: Iterable[Batch], role: str) -> Iterator[Batch]:
    """Returns an iterator over batches.

    Raises:
        ValueError: they are not iterable, such as a generator function that was not called.
    """
    if not isinstance(batches, Iterable):
        name = getattr(batches, "__name__", None)
        what = f"the {type(batches).__name__} `{name}`" if name else f"a {type(batches).__name__}"
        hint = f"; call it, as in {role}={name}()" if name and callable(batches) else ""
        raise ValueError(f"{role}: batches are an iterable of dicts, not {what}{hint}")
    return iter(batches)


def _of_any_size(
    dims: Mapping[str, DimsLike] | None, batch_dim: str
) -> dict[str, list[str | Dimension]]:
    """Returns the dims of entries, without a size for the batch dim."""
    return {
        name: [batch_dim if getattr(d, "name", d) == batch_dim else d for d in as_list(each)]
        for name, each in (dims or {}).items()
    }


def _as_json(place: Any) -> Any:
    """Returns a position for JSON; some of grain's positions are bytes.

    Raises:
        ValueError: JSON cannot represent it.
    """
    if isinstance(place, bytes):
        return {_BYTES: base64.b64encode(place).decode()}
    try:
        json.dumps(place)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"batches: their state, {type(place).__name__}, cannot be stored as JSON: {error}"
        ) from None
    return place


def _from_json(place: Any) -> Any:
    if isinstance(place, Mapping) and {*place} == {_BYTES}:
        return base64.b64decode(place[_BYTES])
    return place


def specs_of(batch: Mapping[str, NamedArray]) -> dict[str, Spec]:
    """Returns dims and dtypes of the entries of a batch."""
    return {name: spec(array.dims, array.dtype) for name, array in batch.items()}


def _size_of(source: Any) -> int:
    """Returns the batch size of data whose batches can be resized.

    Raises:
        ValueError: they cannot be resized.
    """
    if _method(source, "resize") is None or not hasattr(source, "batch_size"):
        raise ValueError(
            f"batch_ramp: {type(source).__name__} gives batches of one size; it needs `batch_size` "
            "and `resize(batch_size, rows)`, as what shuffled_batches returns has"
        )
    return int(source.batch_size)


def _method(source: Any, *names: str) -> Any:
    return next((getattr(source, name) for name in names if hasattr(source, name)), None)


def _named(batch: Batch, dims: Mapping[str, DimsLike], role: str) -> dict[str, NamedArray]:
    if not isinstance(batch, Mapping):
        raise ValueError(
            f"{role}: a batch is a dict of arrays by name, as in {{'image': x, 'label': y}}; got a "
            f"{type(batch).__name__}"
        )
    result, problems = {}, []
    for name, entry in batch.items():
        if isinstance(entry, NamedArray):
            result[name] = entry
        elif name in dims:
            result[name] = named(entry, dims[name])
        else:
            hint = did_you_mean(name, dims)
            problems.append(
                f"entry `{name}` of a batch has no dim names: give NamedArrays, or "
                f"Data(batches, batch_dims={{{name!r}: [...]}}){hint}"
            )
    if problems:
        problems += [
            f"`{name}`, which batch_dims has, is not in it" for name in dims if name not in batch
        ]
        raise ValueError("; ".join([f"{role}: {problems[0]}", *problems[1:]]))
    return result


def _stacked(group: list[dict[str, NamedArray]]) -> dict[str, NamedArray]:
    """Returns batches stacked along a first dim `steps`.

    Raises:
        ValueError: batches differ; the message has the first difference.
    """
    stacked = {}
    for batch in group:
        if {*batch} != {*group[0]}:
            raise ValueError(f"batches differ: one has {sorted(group[0])}, one {sorted(batch)}")
    for name, first in group[0].items():
        arrays = [batch[name] for batch in group]
        for array in arrays:
            if (array.dims, array.dtype) != (first.dims, first.dtype):
                raise ValueError(f"batches differ: `{name}` is {first!r} and {array!r}")
        data = np.stack([np.asarray(array) for array in arrays])
        stacked[name] = named(data, [STEPS, *first.dims])
    return stacked
