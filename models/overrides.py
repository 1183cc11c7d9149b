"""Overrides: "layers=8,embed=512,policy.compute=bfloat16" for the fields of a configuration."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal, TypeVar

from meshdsl.tensors.dims import did_you_mean

Config = TypeVar("Config")
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def apply_overrides(config: Config, text: str, name: str) -> Config:
    """Returns a frozen dataclass with fields changed as `text` says.

    Values are read as the field's annotation asks: int, float, bool, str, a Literal, any of these
    or None, a tuple of one kind ("3+4+6+3"), or a class with a `parse`. The fields of a field that
    is a dataclass itself are reached with a dot. A configuration whose `with_changes` takes the
    changed fields decides which of its other fields still apply.

    Args:
        name: what the configuration is called in messages.

    Raises:
        ValueError: unknown fields (nearest names and all choices shown), values that are not what
            the field takes, or a configuration that refuses them; every problem is told.
    """
    changes: dict[str, Any] = {}
    problems = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        path, equals, value = (piece.strip() for piece in part.partition("="))
        try:
            if not equals:
                raise ValueError("write field=value")
            if path in changes:
                raise ValueError("given twice")
            changes[path] = _read(_type_of(config, path), value)
        except ValueError as error:
            problems.append(f"{part}: {error}")
    if not problems:
        try:
            return _replace(config, changes)
        except ValueError as error:
            problems.append(str(error))
    count = f"{len(problems)} problem" + ("s" if len(problems) > 1 else "")
    raise ValueError("\n  ".join([f"{name} with {text!r}: {count}", *problems]))


def _fields(config: Any, prefix: str = "") -> dict[str, Any]:
    """Returns the annotation of every field, and of the fields of its dataclass fields."""
    found: dict[str, Any] = {}
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        found[prefix + field.name] = hints[field.name]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found.update(_fields(value, f"{prefix}{field.name}."))
    return found


def _type_of(config: Any, path: str) -> Any:
    known = _fields(config)
    if path not in known:
        hint = did_you_mean(path, known)
        raise ValueError(f"there is no field `{path}`{hint or '.'} Choose from {', '.join(known)}")
    return known[path]


def _read(kind: Any, text: str) -> Any:
    """Reads a value of an annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in arguments:
            return None
        (kind,) = (a for a in arguments if a is not type(None))
        return _read(kind, text)
    if origin is Literal:
        if text not in arguments:
            raise ValueError(f"choose from {', '.join(arguments)}{did_you_mean(text, arguments)}")
        return text
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise ValueError("needs true or false")
        return _TRUTH[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            word = "a whole number" if kind is int else "a number"
            raise ValueError(f"needs {word}") from None
    if origin is tuple:
        return tuple(_read(arguments[0], part) for part in text.split("+"))
    return kind.parse(text) if hasattr(kind, "parse") else text


def _replace(config: Any, changes: dict[str, Any]) -> Any:
    """Returns the dataclass with its fields, and those reached with a dot, changed."""
    own = {path: value for path, value in changes.items() if "." not in path}
    inner: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        first, dot, rest = path.partition(".")
        if dot:
            inner.setdefault(first, {})[rest] = value
    for field, parts in inner.items():
        own[field] = _replace(own.get(field, getattr(config, field)), parts)
    if hasattr(config, "with_changes"):
        return config.with_changes(own)
    return dataclasses.replace(config, **own)
