"""Calling: how a compiled function is called without looking at its arguments.

A direct call runs the code of `callers` on the caller's own trees. It compares structure, dims and
pads with those of the program; JAX compares shapes, dtypes and shardings in C++. A call that fits
runs at once. A call that does not fit is refused before anything runs. It then takes the slow path,
which looks at each argument: it compiles a program for that signature if there is none, moves
arrays to their devices, and reports what is wrong with them.

Where calls of several signatures alternate, one leaf's dims choose the program, or the structure
of the arguments. This is a guess, and the program checks it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from meshdsl.running.callers import MISS, REFUSED, caller, is_leaf, positional, route
from meshdsl.tensors.named_array import NUMBERS, NamedArray, number

if TYPE_CHECKING:
    from meshdsl.running.jit import Compiled

_PATIENCE = 64  # the most equal calls in a row that a direct call waits for
_RECENT = 8  # the most signatures among which calls may alternate

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class _Known(NamedTuple):
    """A program that was called recently.

    Attributes:
        structure: of its positional arguments.
        paths: of their leaves.
        numbers: the leaves that were plain numbers in some call.
        run: what `call` runs.
    """

    compiled: Compiled
    structure: Any
    paths: Sequence[Any]
    numbers: frozenset[int]
    run: Callable
    call: Callable


class Direct:
    """Calls programs directly while calls are like recent ones.

    A refused call costs more than one on the slow path. So each refusal doubles the number of
    equal calls in a row that come before the next direct one.

    Attributes:
        function: takes the arguments by position; returns the result, or `MISS`, or raises one of
            `REFUSED`. None: the call takes the slow path.
    """

    __slots__ = ("_alike", "_known", "_patience", "_recent", "function")

    def __init__(self) -> None:
        self.function: Callable | None = None
        self._known: dict[int, _Known] = {}  # by the identity of the program
        self._recent: list[_Known] = []  # the latest last
        self._alike = 0
        self._patience = 1

    def call(self, args: Sequence[Any]) -> Any:
        """Returns the result for arguments by position; `MISS`: take the slow path."""
        if self.function is None:
            return MISS
        try:
            result = self.function(*args)
        except REFUSED:  # nothing has run: the slow path says what is wrong
            result = MISS
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
        run = getattr(compiled.executable, "direct", None)
        if run is None or args is None:
            return
        if known and self._alike < self._patience:
            return
        if not compiled.executable.accepts(leaves):
            self.miss()
            return
        latest = _known(compiled, run, args, self._known.get(id(compiled)))
        if latest is None:
            return
        self._known[id(compiled)] = latest
        rest = [one for one in self._recent if one.compiled is not compiled]
        self._recent = [*rest[1 - _RECENT :], latest]
        if self._alike >= self._patience:
            self.function = latest.call if len(self._recent) == 1 else _routed(self._recent)

    def miss(self) -> None:
        """Records a direct call that was refused."""
        self.function, self._alike = None, 0
        self._patience = min(2 * self._patience, _PATIENCE)


def _known(
    compiled: Compiled, run: Callable, args: Sequence[Any], before: _Known | None
) -> _Known | None:
    """Returns what is known of a program after a call; None if it has no direct calls.

    Args:
        before: what was known of it.
    """
    keyed, _ = jax.tree_util.tree_flatten_with_path(tuple(args), is_leaf=is_leaf)
    examples = [leaf for _, leaf in keyed]
    numbers = frozenset(i for i, leaf in enumerate(examples) if _is_number(leaf))
    if before is not None:
        if before.run is run and numbers <= before.numbers:
            return before
        numbers |= before.numbers
    program, executable = compiled.program, compiled.executable
    arguments = positional(compiled.signature.tree, compiled.jitted.parameters)
    if arguments is None or program.origin.blame is not None:
        return None
    if not all(type(leaf) is NamedArray or i in numbers for i, leaf in enumerate(examples)):
        return None  # arrays that the function names itself
    trees = arguments, program.origin.results
    dtypes = [dtype for _, dtype in compiled.signature.avals]
    call = caller(run, *trees, executable.inputs, executable.outputs, dtypes, numbers)
    paths = [path for path, _ in keyed]
    return _Known(compiled, _structure(args), paths, numbers, run, call)


def _routed(known: Sequence[_Known]) -> Callable:
    """Returns a function that calls the one of several programs that the arguments are for."""
    calls = [one.call for one in known]
    paths = known[0].paths
    if all(one.paths == paths for one in known):
        avals = [one.compiled.signature.avals for one in known]
        for place, path in enumerate(paths):
            is_number = any(place in one.numbers for one in known)
            dims = [row[place][0] for row in avals]
            forms = [row[place] for row in avals]
            if not is_number and len({*dims}) == len(known):
                code = route(path, "{leaf}.dims", dict(zip(dims, calls, strict=True)))
            elif len({*forms}) == len(known):
                code = route(path, "form({leaf})", dict(zip(forms, calls, strict=True)))
            else:
                continue
            if code is not None:
                return code
    routes = {one.structure: one.call for one in known}

    def call(*args: Any) -> Any:
        return routes[_structure(args)](*args)

    return call


def _is_array(value: Any) -> bool:
    return type(value) is NamedArray


def _is_number(value: Any) -> bool:
    return type(value) in NUMBERS or isinstance(value, np.generic)


def _structure(args: Sequence[Any]) -> Any:
    """Returns the structure of arguments, with arrays for plain numbers."""
    return jax.tree.structure(jax.tree.map(_array_of, tuple(args), is_leaf=_is_array))


def _array_of(value: Any) -> Any:
    return number(value) if _is_number(value) else value


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
