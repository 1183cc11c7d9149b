"""Fingerprint: a hash of a program that is equal only where a backend emits the same for both.

It covers all that a program holds, but for its `origin`. What it may hold is listed here: frozen
records of this package, numbers, texts, arrays and collections of these. A program with anything
else, such as a function of the user's, has no fingerprint. Values are numbered in the order in
which they occur, since two values with the same fields are two tensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.program import SpmdProgram, Value
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tracing.source import Source

_SHARED = (Shape, Dimension, TensorLayout, Source)  # which occur thousands of times
_OMITTED = (SpmdProgram, "origin")  # which lives in this process alone
_MODULES = ("builtins", "meshdsl", "ml_dtypes", "numpy", "types")  # not the user's own kinds
_PLAIN = (str, int, bool, float, complex, bytes, type(None), type(...))


def fingerprint(program: SpmdProgram) -> str | None:
    """Returns the hash of a program; None: it holds what cannot be compared between processes.

    It is the same in every process that lowers the same function with the same code.
    """
    try:
        return _Writer().digest(program).hex()
    except _Unknown:
        return None


class _Unknown(Exception):
    """Something has no bytes that stand for all of it."""


class _Writer:
    """Writes things as bytes, one program at a time."""

    def __init__(self) -> None:
        self._numbers: dict[Value, int] = {}
        # By `id`; each is held, so that no other one gets it.
        self._known: dict[int, tuple[Any, bytes]] = {}

    def digest(self, thing: Any) -> bytes:
        return hashlib.sha256(self._bytes(thing)).digest()

    def _bytes(self, thing: Any) -> bytes:
        """Returns bytes that differ for different things.

        Raises:
            _Unknown: there are none.
        """
        kind = type(thing)
        if kind in _PLAIN:  # `repr` tells 1 from True and 1.0, and 0.0 from -0.0
            return _marked(b"=", repr(thing).encode())
        if (known := self._known.get(id(thing))) is not None:
            return known[1]
        if kind is Value and (number := self._numbers.get(thing)) is not None:
            return _marked(b"#", str(number).encode())
        written = _marked(f"{kind.__module__}.{kind.__qualname__}".encode(), self._parts(thing))
        if kind in _SHARED:
            written = _marked(b"~", hashlib.sha256(written).digest())
            self._known[id(thing)] = thing, written
        return written

    def _parts(self, thing: Any) -> bytes:
        kind = type(thing)
        if kind.__module__.partition(".")[0] not in _MODULES:
            raise _Unknown
        if kind is np.ndarray or isinstance(thing, np.generic | np.dtype):
            return _of_numpy(thing)
        if isinstance(thing, Enum):
            return thing.name.encode()
        if isinstance(thing, tuple | list):
            return self._all(thing)
        if isinstance(thing, set | frozenset):  # whose order is another one in each process
            count = len(self._numbers)
            digests = sorted(self.digest(item) for item in thing)
            if len(self._numbers) > count:  # values are numbered in an order
                raise _Unknown
            return b"".join(digests)
        if isinstance(thing, Mapping):
            return self._all(part for pair in thing.items() for part in pair)
        if is_dataclass(kind):
            # The others are computed from these.
            names = [one.name for one in fields(kind) if one.init]
            if kind is Value:
                self._numbers[thing] = len(self._numbers)
            return self._all(getattr(thing, n) for n in names if (kind, n) != _OMITTED)
        raise _Unknown

    def _all(self, things: Iterable[Any]) -> bytes:
        return b"".join(map(self._bytes, things))


def _marked(mark: bytes, content: bytes) -> bytes:
    """Returns a mark and content such that no other ones in a row have the same bytes."""
    return b"%d:%d:" % (len(mark), len(content)) + mark + content


def _of_numpy(thing: np.ndarray | np.generic | np.dtype) -> bytes:
    dtype = thing if isinstance(thing, np.dtype) else thing.dtype
    if dtype.hasobject or dtype.names is not None:
        raise _Unknown
    # Those of `ml_dtypes` have a name, but share their letters.
    facts = f"{dtype.str} {dtype.name}"
    if isinstance(thing, np.dtype):
        return facts.encode()
    # No buffer has the types of `ml_dtypes`; a large array is not copied.
    content = np.ascontiguousarray(thing).reshape(-1).view(np.uint8)
    return _marked(f"{facts} {thing.shape}".encode(), hashlib.sha256(content.data).digest())
