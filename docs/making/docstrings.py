"""An extension of Griffe: what our docstrings say of several parameters at once.

`low, high: how many to add` is written once for both; in the tables of the reference each has it.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_SEVERAL = re.compile(r"^( +)(\w+(?:,\s+\w+)+):(.*(?:\n\1 +.*)*)", re.M)
_SECTION = re.compile(r"^ *(?:Args|Attributes):\n(?:(?: +.*)?\n?)*", re.M)


class Several(griffe.Extension):
    """Repeats a text for each name that it is written for."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = spelled_out(obj.docstring.value)


def spelled_out(text: str) -> str:
    """Returns a docstring in which each parameter has a text of its own.

    >>> print(spelled_out("Args:" + chr(10) + "    a, b: sizes."))
    Args:
        a: sizes.
        b: sizes.
    """
    return _SECTION.sub(lambda section: _SEVERAL.sub(_each, section[0]), text)


def _each(match: re.Match[str]) -> str:
    names = re.split(r",\s+", match[2])
    return "\n".join(f"{match[1]}{name}:{match[3]}" for name in names)
