"""The user's line of an equation of a jaxpr."""

from __future__ import annotations

from typing import Any

from meshdsl.tracing.source import UNKNOWN, Source, is_machinery

_INSTALLED = ("site-packages", "dist-packages")


def source_of(equation: Any, outer: Source = UNKNOWN) -> Source:
    """Returns the innermost line of user code that made an equation; else that of its caller.

    The lines of installed packages count only where no other line is known: users read their own.
    """
    traceback = equation.source_info.traceback
    installed = None
    for frame in traceback.frames if traceback is not None else ():
        if is_machinery(frame.file_name):
            continue
        source = Source(frame.file_name, frame.line_num, frame.function_name)
        if not any(folder in frame.file_name for folder in _INSTALLED):
            return source
        installed = installed or source
    return outer if outer is not UNKNOWN else installed or outer
