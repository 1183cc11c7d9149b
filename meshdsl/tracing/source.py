"""Source: the line of the user's code that an operation came from."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import sys
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import jax
import numpy as np

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Frames in these rooms are machinery. The user's line is the first one outside of them.
# Layers, optimizers and models are code that users read, so their lines count.
_MACHINERY = tuple(
    os.path.join(_ROOT, room) + os.sep
    for room in ("gradients", "imports", "ops", "precision", "running", "tensors", "tracing")
)
_OUTSIDE = (
    os.path.dirname(jax.__file__) + os.sep,
    os.path.dirname(np.__file__) + os.sep,
    f"{os.sep}contextlib.py",
    "<string>",
)
_is_machinery: dict[str, bool] = {}
# Operations in layers and optimizers have their lines, but errors name the caller's line too.
_LAYERS = tuple(os.path.join(_ROOT, room) + os.sep for room in ("nn", "optim"))

_OWN, _PYTHON = _ROOT + os.sep, os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Source:
    """A file and line; `backward` marks operations made by differentiating that line.

    Attributes:
        function: the function around the line, with its class: `Attention.__call__`.
    """

    file: str
    line: int
    function: str = ""
    backward: bool = False

    @property
    def layer(self) -> str:
        """The class or function around the line, as profiles show it: `Attention.query`, `loss`.

        Functions within functions are named as the outermost one.
        """
        outer = self.function.partition(".<locals>")[0]
        return outer.removesuffix(".__call__") if not outer.startswith("<") else ""

    @property
    def code(self) -> str:
        """The text of the line, stripped; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """`models/transformer.py:18`: the path is shortened, but still identifies the file."""
        return f"{_shorten(self.file)}:{self.line}"

    @property
    def at(self) -> str:
        """` at models/transformer.py:18  y = x + 1`, for a message; empty if it is not known."""
        return f" at {self}  {self.code}".rstrip() if self.file != UNKNOWN.file else ""

    def __str__(self) -> str:
        return self.place + (" (backward)" if self.backward else "")

    def as_backward(self) -> Source:
        return self if self.backward else replace(self, backward=True)


UNKNOWN = Source("<unknown>", 0)


def is_machinery(name: str) -> bool:
    """Whether the lines of a file are machinery."""
    machinery = _is_machinery.get(name)
    if machinery is None:
        machinery = name.startswith(_MACHINERY) or any(part in name for part in _OUTSIDE)
        _is_machinery[name] = machinery
    return machinery


def caller(of_layer: bool = False) -> Source:
    """Returns the innermost line of user code on the stack.

    Args:
        of_layer: skip the lines of `meshdsl.nn` and `meshdsl.optim` as well.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        name = code.co_filename
        layer = of_layer and name.startswith(_LAYERS)
        # Every operation asks about five frames, so what is known takes no call.
        if not layer and not _is_machinery.get(name) and not is_machinery(name):
            return _line(code, frame.f_lineno)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return UNKNOWN


@functools.lru_cache(maxsize=1 << 14)
def _line(code: CodeType, line: int) -> Source:
    return Source(code.co_filename, line, code.co_qualname)


def raiser(error: BaseException) -> Source:
    """Returns the innermost line of user code that an error came through."""
    innermost, part = UNKNOWN, error.__traceback__
    while part is not None:
        code = part.tb_frame.f_code
        if not is_machinery(code.co_filename) and not code.co_filename.startswith(_LAYERS):
            innermost = Source(code.co_filename, part.tb_lineno, code.co_qualname)
        part = part.tb_next
    return innermost


def is_of_user(error: BaseException) -> bool:
    """Whether an error came through code of the user's, below the frame that caught it.

    An installed package is the user's code too, unless JAX, numpy or Python's library calls it.
    """
    by_library, part = False, error.__traceback__
    while part is not None:
        name = part.tb_frame.f_code.co_filename
        installed = any(f"{os.sep}{folder}{os.sep}" in name for folder in _INSTALLED)
        if name.startswith(_OWN):
            by_library = False
        elif is_machinery(name) or (name.startswith((_PYTHON, "<frozen")) and not installed):
            by_library = True
        elif not (by_library and installed):
            return True
        part = part.tb_next
    return False


def definition(function: Any) -> Source:
    """Returns the line at which a function is defined; UNKNOWN for what has none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Source(code.co_filename, code.co_firstlineno, code.co_qualname) if code else UNKNOWN


def user_definition(function: Any) -> Source:
    """Returns the line at which a user's function is defined, or else the caller's line."""
    source = definition(function)
    known = source.file != UNKNOWN.file and not is_machinery(source.file)
    return source if known else caller()


def _shorten(path: str) -> str:
    path = _resolve(path)
    for base in (os.getcwd(), os.path.dirname(_ROOT)):
        if path.startswith(base + os.sep):
            return path[len(base) + 1 :]
    return os.sep.join(path.split(os.sep)[-2:])


@functools.cache
def _resolve(path: str) -> str:
    # In a checkout `meshdsl/models` is a link to `models`: users know a file by one path.
    return os.path.realpath(path) if path.startswith(_ROOT + os.sep) else path
