"""Parameter types: checks that an instruction's parameters fit the record of its kind.

The records are in `lowering.parameters`. `verify` calls this; lowering itself checks nothing.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints

from meshdsl.lowering.instructions import record_of
from meshdsl.lowering.program import Block, Instruction


def parameter_problems(instruction: Instruction) -> Iterator[str]:
    """Yields the problems with the parameters of an instruction of a declared kind."""
    record, params = record_of(instruction), instruction.params
    wanted = _fields(record)
    where = f"(`{record.__name__}` in {_file_of(record)})"
    for key, (kind, required) in wanted.items():
        if key not in params:
            if required:
                yield f"lacks parameter `{key}`, expected {_text(kind)} {where}"
        elif not _is(params[key], kind):
            yield (
                f"has parameter `{key}` of type {_type_of(params[key])}, expected {_text(kind)} "
                f"{where}"
            )
    known = ", ".join(wanted) or "none"
    for key in params:
        if key not in wanted:
            yield f"has an unknown parameter `{key}`, expected {known} {where}"


def _file_of(record: type) -> str:
    """Returns the file of a record: `lowering/parameters/data.py`."""
    return record.__module__.removeprefix("meshdsl.").replace(".", "/") + ".py"


@cache
def _fields(record: type) -> dict[str, tuple[Any, bool]]:
    """Returns the type of each key of a record, and whether the key is required."""
    types_of = {}
    for key, hint in get_type_hints(record, None, {"Block": Block}, include_extras=True).items():
        optional = get_origin(hint) is NotRequired
        types_of[key] = (get_args(hint)[0] if optional else hint, not optional)
    return types_of


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, as mypy checks it, except that a bool is no int or float."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin is Literal:
        return value in inner
    if origin in (Union, types.UnionType):
        return any(_is(value, option) for option in inner)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if inner[-1] is Ellipsis:
            return all(_is(item, inner[0]) for item in value)
        return len(value) == len(inner) and all(map(_is, value, inner))
    if kind is complex:  # any number, or a bool
        return isinstance(value, complex | float | int)
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _text(kind: Any) -> str:
    """Returns a type as it is written: `tuple[int, ...]`, `float | None`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Ellipsis:
        return "..."
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, types.UnionType):
        return " | ".join(map(_text, inner))
    if origin is tuple:
        return f"tuple[{', '.join(map(_text, inner))}]"
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _type_of(value: Any) -> str:
    """Returns the type of a value, of a tuple with those of its items; never the value itself."""
    if isinstance(value, tuple):
        inner = list(dict.fromkeys(map(_type_of, value)))
        return f"{type(value).__name__}[{' | '.join(inner)}]"
    return type(value).__name__
