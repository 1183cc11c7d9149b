"""Feeding a run: batches with named dims, as many at once as a call takes, from any step on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshdsl.array import NamedArray, named
from meshdsl.dims import DimsLike, did_you_mean
from meshdsl.jit import STEPS


class Feed:
    """The batches of a run, one for each step, or several together.

    Args:
        batches: dicts of NamedArrays, or of arrays whose dims `dims` names. An iterator that can
            tell its position and go to one, as ours (`state`, `restore`) and grain's (`get_state`,
            `set_state`) can, is moved there to resume a run; of others the batches are skipped.
        dims: the dims of each entry.
        at_once: how many batches come together.

    Attributes:
        first: the first of them, which is read before all else.

    Raises:
        ValueError: there is none, or it has entries without names.
    """

    def __init__(
        self,
        batches: Iterable[Mapping[str, Any]],
        dims: Mapping[str, DimsLike] | None,
        at_once: int = 1,
    ) -> None:
        self._raw = iter(batches)
        self._at_once = at_once
        self._source = named_batches(self._raw, dims, "batches")
        if at_once > 1:
            self._source = stacked(self._source, at_once)
        self.first = first_of(self._source, "batches")
        self._held: dict[str, NamedArray] | None = self.first

    def position(self) -> Any:
        """Returns where the data has come to; None if it cannot tell."""
        tell = _method(self._raw, "state", "get_state")
        return None if tell is None else tell()

    def seek(self, step: int, position: Any) -> None:
        """Goes to where a run has left off after a step, with the position it had then.

        Raises:
            ValueError: the position is of other data; or the data ends before the step.
        """
        go = _method(self._raw, "restore", "set_state")
        if position is not None and go is not None:
            self._held = None
            go(position)
            return
        for done in range(0, step, self._at_once):
            if next(self, None) is None:
                raise ValueError(f"the data ended after {done} steps, and the run was at {step}")

    def __iter__(self) -> Iterator[dict[str, NamedArray]]:
        return self

    def __next__(self) -> dict[str, NamedArray]:
        if self._held is not None:
            held, self._held = self._held, None
            return held
        return next(self._source)


def _method(source: Any, *names: str) -> Any:
    return next((getattr(source, name) for name in names if hasattr(source, name)), None)


@dataclass(frozen=True)
class Named:
    """Batches that can be gone through again and again, with the names of their dims put on."""

    batches: Iterable[Mapping[str, Any]]
    dims: Mapping[str, DimsLike] | None
    role: str

    def __iter__(self) -> Iterator[dict[str, NamedArray]]:
        return named_batches(iter(self.batches), self.dims, self.role)


def named_batches(
    batches: Iterator[Mapping[str, Any]], dims: Mapping[str, DimsLike] | None, role: str
) -> Iterator[dict[str, NamedArray]]:
    """Yields batches with the names of their dims put on.

    Raises:
        ValueError: entries have no names; all of them are told.
    """
    for batch in batches:
        yield _named(batch, dims or {}, role)


def first_of(source: Iterator[dict[str, NamedArray]], role: str) -> dict[str, NamedArray]:
    """Returns the next batch, of which there must be one."""
    for batch in source:
        return batch
    raise ValueError(f"{role}: there is no batch")


def _named(
    batch: Mapping[str, Any], dims: Mapping[str, DimsLike], role: str
) -> dict[str, NamedArray]:
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
                f"batch_dims={{{name!r}: [...]}}{hint}"
            )
    if problems:
        raise ValueError("; ".join([f"{role}: {problems[0]}", *problems[1:]]))
    return result


def stacked(
    batches: Iterator[dict[str, NamedArray]], count: int
) -> Iterator[dict[str, NamedArray]]:
    """Yields batches together, `count` of them along a first dim `steps`; an end too short is left.

    Raises:
        ValueError: a batch differs from the one before; every difference is told.
    """
    while len(group := list(itertools.islice(batches, count))) == count:
        found = {}
        for name, first in group[0].items():
            arrays = [batch[name] for batch in group]
            for array in arrays:
                if (array.dims, array.dtype) != (first.dims, first.dtype):
                    raise ValueError(f"batches differ: `{name}` is {first!r} and {array!r}")
            data = np.stack([np.asarray(array) for array in arrays])
            found[name] = named(data, [STEPS, *first.dims])
        yield found
