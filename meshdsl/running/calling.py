"""Calling: how a compiled function is called without looking at its arguments.

What an executable calls `direct` takes the caller's own trees and compares them in C++ with those
that it was compiled for: structure, dims, dtypes and places. A call that fits runs at once. One
that does not fit is refused before anything runs, and goes to the path that looks at each argument:
it finds or makes the program of that signature, moves arrays to their places, and says what is
wrong with them.

Where calls of several signatures alternate, one leaf's dims choose the program, or the structure
of the arguments. This is a guess, and the program checks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from meshdsl.tensors.named_array import NUMBERS, NamedArray, flattening, number

if TYPE_CHECKING:
    from meshdsl.running.jit import Compiled

MISS: Any = object()  # what a direct call returns whose arguments do not fit
_PATIENCE = 64  # the most calls alike that are waited for
_RECENT = 8  # the most signatures among which calls may alternate

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

# What arguments raise that have no such leaf, key or attribute, or a number without a dtype.
_NO_SUCH = (LookupError, AttributeError, TypeError, OverflowError)


def attempt(function: Callable, args: Sequence[Any]) -> Any:
    """Returns the result of a direct call, or `MISS` if it is refused: `attempt(direct, args)`."""
    flattening.directly = True
    try:
        return function(*args)
    except (TypeError, ValueError):  # nothing has run: the path that looks says what is wrong
        return MISS
    finally:
        flattening.directly = False


class _Known(NamedTuple):
    """A program that was called of late, and the structure of its positional arguments."""

    compiled: Compiled
    structure: Any


class Direct:
    """Calls programs directly while calls are like recent ones.

    A refused call costs more than one whose arguments are looked at. So with each one it takes
    twice as many calls alike, one after the other, until the next is tried directly.

    Attributes:
        function: the program that may be called with the arguments, or with several the one that
            was called last; None: they need a look.
    """

    __slots__ = ("_alike", "_key", "_numbers", "_patience", "_recent", "_routes", "function")

    def __init__(self) -> None:
        self.function: Callable | None = None
        self._recent: list[_Known] = []  # the latest last
        self._routes: dict[Hashable, Callable] = {}
        self._key: Callable[[Sequence[Any]], Hashable] | None = None
        self._numbers: tuple[int, ...] = ()
        self._alike = 0
        self._patience = 1

    def call(self, args: Sequence[Any]) -> Any:
        """Returns the result for positional arguments, or `MISS`; `function` must not be None."""
        function = self.function
        if self._key is not None or self._numbers:
            try:
                args = _with_numbers(args, self._numbers)
                function = self._routes.get(self._key(args)) if self._key else function
            except _NO_SUCH:
                return MISS
        if function is None:
            return MISS
        result = attempt(function, args)
        if result is MISS:
            self.miss()
        return result

    def note(self, compiled: Compiled, leaves: Sequence[Any], args: Sequence[Any] | None) -> None:
        """Learns of a call that was looked at, before it runs.

        Args:
            args: the arguments by position; None if some cannot be given so.
        """
        known = [one for one in self._recent if one.compiled is compiled]
        self._alike = self._alike + 1 if known else 1
        direct = getattr(compiled.executable, "direct", None)
        if direct is None or args is None:
            return
        if known and self._alike < self._patience:
            return
        if not compiled.executable.takes(leaves):
            self.miss()
            return
        found = tuple(i for i, value in enumerate(args) if _has_number(value))
        self._numbers = tuple(sorted({*self._numbers, *found}))
        latest = _Known(compiled, jax.tree.structure(_with_numbers(args, found)))
        rest = [one for one in self._recent if one.compiled is not compiled]
        self._recent = [*rest[1 - _RECENT :], latest]
        if self._alike >= self._patience:
            self._arm(direct)

    def _arm(self, direct: Callable) -> None:
        self.function = direct
        self._key, self._routes = None, {}
        if len(self._recent) > 1:
            self._key, keys = _telling(self._recent)
            rows = zip(keys, self._recent, strict=True)
            self._routes = {key: one.compiled.executable.direct for key, one in rows}

    def miss(self) -> None:
        """Learns of a direct call that was refused."""
        self.function, self._alike = None, 0
        self._patience = min(2 * self._patience, _PATIENCE)


def _has_number(value: Any) -> bool:
    """Whether a plain number stands for a tensor somewhere in an argument."""
    return any(map(_is_number, jax.tree.leaves(value, is_leaf=_is_array)))


def _is_array(value: Any) -> bool:
    return type(value) is NamedArray


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS or isinstance(value, np.generic)


def _with_numbers(args: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """Returns arguments with arrays for the plain numbers in some of them."""
    if not places:
        return tuple(args)
    given = list(args)
    for place in places:
        value = given[place]
        if type(value) in NUMBERS or isinstance(value, np.generic):
            given[place] = number(value)
        elif type(value) is not NamedArray:
            given[place] = jax.tree.map(_array_of, value, is_leaf=_is_array)
    return tuple(given)


def _array_of(value: Any) -> Any:
    return number(value) if _is_number(value) else value


def _telling(
    known: Sequence[_Known],
) -> tuple[Callable[[Sequence[Any]], Hashable], Sequence[Hashable]]:
    """Returns what tells the arguments of programs apart by little, and what it is for each."""
    structures = [one.structure for one in known]
    arguments = [structure.unflatten(range(structure.num_leaves)) for structure in structures]
    keyed = [jax.tree_util.tree_flatten_with_path(a, is_leaf=_is_array)[0] for a in arguments]
    if all([keys for keys, _ in row] == [keys for keys, _ in keyed[0]] for row in keyed):
        avals = [one.compiled.signature.avals for one in known]
        for place, (path, _) in enumerate(keyed[0]):
            steps = _reaching(path)
            for read, count in (_dims, 1), (_dims_and_dtype, 2):
                parts: list[Hashable] = [row[place][:count] for row in avals]
                if steps is not None and len({*parts}) == len(known):
                    return _leaf(steps, read), parts
    return jax.tree.structure, structures


def _dims(leaf: Any) -> Hashable:
    return (leaf.dims,)


def _dims_and_dtype(leaf: Any) -> Hashable:
    return leaf.dims, leaf.dtype


def _leaf(
    steps: Sequence[Callable[[Any], Any]], read: Callable[[Any], Hashable]
) -> Callable[[Sequence[Any]], Hashable]:
    """Returns what reads something of one leaf of the arguments."""

    def key(args: Any) -> Hashable:
        for step in steps:
            args = step(args)
        return read(args)

    return key


def _reaching(path: Sequence[Any]) -> list[Callable[[Any], Any]] | None:
    """Returns the steps to a leaf of the arguments; None where a node has its own kind of keys."""
    steps: list[Callable[[Any], Any]] = []
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            steps.append(attrgetter(key.name))
        elif isinstance(key, jax.tree_util.SequenceKey):
            steps.append(itemgetter(key.idx))
        elif isinstance(key, jax.tree_util.DictKey):
            steps.append(itemgetter(key.key))
        else:
            return None
    return steps


class Order:
    """Puts arguments given by keyword where they are by position: `order(args, kwargs)`."""

    def __init__(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        # Positional-only parameters count as places, but no keyword is the name of one.
        self._names = [
            name if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD else None
            for name, parameter in parameters.items()
            if parameter.kind in _BY_POSITION
        ]
        self._known: dict[tuple, list[str] | None] = {}

    def __call__(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple | None:
        """Returns all arguments by position; None if some cannot be given so."""
        key = (len(args), *kwargs)
        if key not in self._known:
            names = self._names[len(args) : len(args) + len(kwargs)]
            known = [name for name in names if name is not None]
            self._known[key] = known if set(names) == set(kwargs) else None
        order = self._known[key]
        return None if order is None else (*args, *[kwargs[name] for name in order])
