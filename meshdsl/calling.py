"""Calling: how a compiled function is called without looking at its arguments.

What an executable calls `direct` takes the caller's own trees and compares them in C++ with those
that it was compiled for: structure, dims, dtypes and places. A call that fits runs at once. One
that does not fit is refused before anything runs, and goes to the path that looks at each argument:
it finds or makes the program of that signature, moves arrays to their places, and says what is
wrong with them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshdsl.array import flattening

if TYPE_CHECKING:
    from meshdsl.jit import Compiled

MISS: Any = object()  # what a direct call returns whose arguments do not fit
_PATIENCE = 64  # the most calls alike that are waited for


class Direct:
    """Calls a program directly while calls are alike.

    A refused call costs more than one whose arguments are looked at. So with each one it takes
    twice as many calls alike, one after the other, until the next is tried directly.

    Attributes:
        function: what may be called with the arguments; None: they need a look.
    """

    __slots__ = ("_alike", "_compiled", "_patience", "function")

    def __init__(self) -> None:
        self.function: Callable | None = None
        self._compiled: Compiled | None = None
        self._alike = 0
        self._patience = 1

    def call(self, args: Sequence[Any]) -> Any:
        """Returns the result for positional arguments, or `MISS`; `function` must not be None."""
        flattening.directly = True
        try:
            return self.function(*args)  # type: ignore[misc]
        except (TypeError, ValueError):  # nothing has run: the path that looks says what is wrong
            self.miss()
            return MISS
        finally:
            flattening.directly = False

    def note(self, compiled: Compiled, leaves: Sequence[Any]) -> None:
        """Learns of a call that was looked at, before it runs."""
        self._alike = self._alike + 1 if compiled is self._compiled else 1
        self._compiled = compiled
        executable = compiled.executable
        direct = getattr(executable, "direct", None)
        if self._alike >= self._patience and direct is not None:
            if executable.takes(leaves):
                self.function = direct
            else:
                self.miss()

    def miss(self) -> None:
        """Learns of a direct call that was refused."""
        self.function, self._alike = None, 0
        self._patience = min(2 * self._patience, _PATIENCE)


class Order:
    """Puts arguments given by keyword where they are by position: `order(args, kwargs)`."""

    def __init__(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        self._names = [
            name
            for name, parameter in parameters.items()
            if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        self._known: dict[tuple, Sequence[str] | None] = {}

    def __call__(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple | None:
        """Returns all arguments by position; None if some cannot be given so."""
        key = (len(args), *kwargs)
        if key not in self._known:
            names = self._names[len(args) : len(args) + len(kwargs)]
            self._known[key] = names if set(names) == set(kwargs) else None
        order = self._known[key]
        return None if order is None else (*args, *[kwargs[name] for name in order])
