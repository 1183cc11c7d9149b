"""Errors raised in the user's own code: which frames of the traceback are shown.

A model file may fail anywhere: when it is imported, in its `init`, in its `loss`. The user needs
the frames of that code. Frames of meshdsl, of libraries and of Python do not help; `--debug` shows
them. Mistakes in operations (`OperationError`) name their line already, and need no frames.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from functools import cache

import meshdsl
from meshdsl.ops.operation import OperationError


def user_text(error: BaseException) -> str | None:
    """Returns an error with the user's frames; None if it does not come from the user's code."""
    if isinstance(error, OperationError):
        return None
    frames = _frames(error)
    of_syntax = isinstance(error, SyntaxError) and _is_users(error.filename or "")
    if not frames and not of_syntax:
        return None
    lines = [_headline(error)]
    lines += _shown(error, frames)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and (of_cause := _frames(cause)):
        lines += [f"caused by {_headline(cause)}", *_shown(cause, of_cause)]
    return "\n".join([*lines, "(--debug shows the frames of meshdsl and of libraries as well)"])


def plain_text(error: BaseException) -> str:
    """Returns an error's text, with the user's frames if it comes from their code."""
    return user_text(error) or str(error)


def _headline(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _shown(error: BaseException, frames: list[traceback.FrameSummary]) -> list[str]:
    text = "".join(traceback.format_list(frames))
    if isinstance(error, SyntaxError) and _is_users(error.filename or ""):
        *place, _ = traceback.format_exception_only(error)
        text += "".join(place)
    return text.rstrip("\n").split("\n")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]


@cache
def _is_users(path: str) -> bool:
    """Whether a file is neither part of meshdsl, nor of Python, nor an installed library."""
    if not path or path.startswith("<"):
        return False
    real = os.path.realpath(path)
    return not any(real.startswith(root) for root in _others())


@cache
def _others() -> tuple[str, ...]:
    home = os.path.dirname(os.path.realpath(meshdsl.__file__))
    # `layouts`, `lowering` and `models` are links, to folders beside the package in a checkout.
    parts = [os.path.realpath(os.path.join(home, n)) for n in ("layouts", "lowering", "models")]
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    library = [os.path.realpath(sysconfig.get_path(name)) for name in names]
    base = os.path.realpath(os.path.dirname(os.__file__))
    roots = {home, *parts, *library, base}
    return tuple(root + os.sep for root in roots)
