"""Calling: how a compiled function is called without looking at its arguments.

An executable's `direct` takes the caller's own trees and compares them in C++ with those that it
was compiled for: structure, dims, dtypes and shardings. A call that fits runs at once. A call that
does not fit is refused before anything runs. It then takes the slow path, which looks at each
argument: it compiles a program for that signature if there is none, moves arrays to their devices,
and reports what is wrong with them.

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

MISS: Any = object()  # the result of a direct call whose arguments do not fit
_PATIENCE = 64  # the most equal calls in a row that a direct call waits for
_RECENT = 8  # the most signatures among which calls may alternate

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

# Arguments raise these if they lack the leaf, key or attribute that is read, or have no dtype.
_NO_SUCH = (LookupError, AttributeError, TypeError, OverflowError)


def attempt(function: Callable, args: Sequence[Any]) -> Any:
    """Returns the result of a direct call, or `MISS` if it is refused: `attempt(direct, args)`."""
    flattening.directly = True
    try:
        return function(*args)
    except (TypeError, ValueError):  # nothing has run: the slow path says what is wrong
        return MISS
    finally:
        flattening.directly = False


class _Known(NamedTuple):
    """A program that was called recently, and the structure of its positional arguments."""

    compiled: Compiled
    structure: Any


class Direct:
    """Calls programs directly while calls are like recent ones.

    A refused call costs more than one on the slow path. So each refusal doubles the number of
    equal calls in a row that come before the next direct one.

    Attributes:
        function: the program to call directly; of several, the one that was called last. None: the
            call takes the slow path.
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
        """Records a call of the slow path, before it runs.

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
        if not compiled.executable.accepts(leaves):
            self.miss()
            return
        numbered = tuple(i for i, value in enumerate(args) if _has_number(value))
        self._numbers = tuple(sorted({*self._numbers, *numbered}))
        latest = _Known(compiled, jax.tree.structure(_with_numbers(args, numbered)))
        rest = [one for one in self._recent if one.compiled is not compiled]
        self._recent = [*rest[1 - _RECENT :], latest]
        if self._alike >= self._patience:
            self._arm(direct)

    def _arm(self, direct: Callable) -> None:
        self.function = direct
        self._key, self._routes = None, {}
        if len(self._recent) > 1:
            self._key, keys = _distinguishing(self._recent)
            rows = zip(keys, self._recent, strict=True)
            self._routes = {key: one.compiled.executable.direct for key, one in rows}

    def miss(self) -> None:
        """Records a direct call that was refused."""
        self.function, self._alike = None, 0
        self._patience = min(2 * self._patience, _PATIENCE)


def _has_number(value: Any) -> bool:
    """Whether a leaf of an argument is a plain number, which stands for a tensor."""
    return any(map(_is_number, jax.tree.leaves(value, is_leaf=_is_array)))


def _is_array(value: Any) -> bool:
    return type(value) is NamedArray


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS or isinstance(value, np.generic)


def _with_numbers(args: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """Returns arguments with arrays for the plain numbers in some of them."""
    if not places:
        return tuple(args)
    arguments = list(args)
    for place in places:
        value = arguments[place]
        if type(value) in NUMBERS or isinstance(value, np.generic):
            arguments[place] = number(value)
        elif type(value) is not NamedArray:
            arguments[place] = jax.tree.map(_array_of, value, is_leaf=_is_array)
    return tuple(arguments)


def _array_of(value: Any) -> Any:
    return number(value) if _is_number(value) else value


def _distinguishing(
    known: Sequence[_Known],
) -> tuple[Callable[[Sequence[Any]], Hashable], Sequence[Hashable]]:
    """Returns a cheap key of arguments that differs between programs, and its value for each."""
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
    """Returns a function that reads a key from one leaf of the arguments."""

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
    """Turns arguments by keyword into arguments by position: `order(args, kwargs)`."""

    def __init__(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        # A positional-only parameter takes a position, but no keyword names it.
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
