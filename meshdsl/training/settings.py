"""Settings: the fields of the records that `train` takes, such as `Recipe` and `Saving`.

A setting is declared once, with its meaning and the values that it takes. The docstring of its
record, the check of its values and its flag on the command line follow from the declaration.
"""

from __future__ import annotations

import inspect
import operator
import os
import textwrap
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Protocol, TypeVar, dataclass_transform

from meshdsl.optim.checks import is_number
from meshdsl.tensors.dims import did_you_mean

_Record = TypeVar("_Record")


class Kind(Protocol):
    """The values that a setting takes."""

    def problem(self, name: str, value: Any) -> str:
        """Returns what is wrong with the value of a setting, or nothing."""


@dataclass(frozen=True)
class Of:
    """Values of a class.

    Attributes:
        kind: what `isinstance` takes.
        says: what such a value is, for errors: "is a path".
    """

    kind: Any
    says: str

    def problem(self, name: str, value: Any) -> str:
        return "" if isinstance(value, self.kind) else f"{name} {self.says}, not {value!r}"


@dataclass(frozen=True)
class Whole:
    """Whole numbers of at least `least`, if that is given."""

    least: int | None = None

    def problem(self, name: str, value: Any) -> str:
        try:
            number = operator.index(value)
        except TypeError:
            number = None
        if number is None or isinstance(value, bool):
            return f"{name} is a whole number, not {value!r}"
        if self.least is not None and number < self.least:
            return f"{name} must be at least {self.least}, got {value}"
        return ""


@dataclass(frozen=True)
class Number:
    """Numbers that are not negative."""

    def problem(self, name: str, value: Any) -> str:
        fits = is_number(value) and 0 <= value < float("inf")
        return "" if fits else f"{name} is a number of at least 0, not {value!r}"


@dataclass(frozen=True)
class OneOf:
    """One of several words."""

    words: tuple[str, ...]

    def problem(self, name: str, value: Any) -> str:
        if value in self.words:
            return ""
        hint = did_you_mean(str(value), self.words)
        return f"{name} is one of {', '.join(self.words)}, not {value!r}{hint}"


TRUTH = Of(bool, "is True or False")
PATH = Of(str | os.PathLike, "is a path")


@dataclass(frozen=True)
class Setting:
    """The declaration of a field of a record.

    Attributes:
        says: its meaning, in full sentences.
        kind: the values that it takes; None: they are checked where they are used.
        default: its default, which may be None; `MISSING` if it has none, or a new one for each
            record.
    """

    says: str
    kind: Kind | None
    default: Any = MISSING


def setting(
    says: str,
    kind: Kind | None = None,
    *,
    default: Any = MISSING,
    default_factory: Any = MISSING,
) -> Any:
    """Declares a field of a `record`: `every: int = setting("Steps ...", Whole(1), default=10)`.

    Args:
        says, kind: as in `Setting`.
        default, default_factory: as in `dataclasses.field`.
    """
    metadata = {"says": says, "kind": kind}
    return field(default=default, default_factory=default_factory, metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(setting,))
def record(cls: type[_Record]) -> type[_Record]:
    """Makes a class a frozen dataclass whose docstring lists the meanings of its settings.

    Its `__post_init__` calls `check`, and then checks settings that must fit together.
    """
    made = dataclass(frozen=True)(cls)
    listed = [
        textwrap.fill(f"{name}: {one.says}", 96, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, one in settings(made).items()
    ]
    summary, raises, errors = inspect.cleandoc(cls.__doc__ or "").partition("\n\nRaises:")
    made.__doc__ = "\n".join([summary, "", "Attributes:", *listed]) + raises + errors
    return made


def settings(record: Any) -> dict[str, Setting]:
    """Returns the settings of a record, or of its class, by their names."""
    return {
        one.name: Setting(one.metadata["says"], one.metadata["kind"], one.default)
        for one in fields(record)
    }


def check(record: Any) -> None:
    """Checks the settings of a record, each by itself.

    Raises:
        ValueError: a value is of another kind, or a number is too small; all of them are reported.
    """
    problems = []
    for name, one in settings(record).items():
        value = getattr(record, name)
        if one.kind is not None and not (value is None and one.default is None):
            problems.append(one.kind.problem(name, value))
    if any(problems):
        raise ValueError(f"{type(record).__name__}: {'; '.join(filter(None, problems))}")
