"""The user's line of an equation of a jaxpr."""

from __future__ import annotations

from typing import Any

from meshdsl.tracing.source import UNKNOWN, Source, is_machinery


def source_of(equation: Any, outer: Source = UNKNOWN) -> Source:
    """Returns the innermost line of user code that made an equation; else that of its caller."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not is_machinery(frame.file_name):
            return Source(frame.file_name, frame.line_num, frame.function_name)
    return outer
