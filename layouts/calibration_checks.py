"""Checks of what stands in a calibration's file, part by part.

Every error is a ValueError that names the part and says what it needs. A file that a person has
edited is as likely as a damaged one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from meshdsl.layouts.costs import Sizes
from meshdsl.layouts.fits import SIZES, kind_of
from meshdsl.layouts.hardware import COLLECTIVES
from meshdsl.layouts.machine import Machine
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import as_dtype

CLOCKS = ("processor", "wall")
_COUNTS = ("devices", "cores")  # the fields of a machine that are numbers
_FORMS = ("rows", "leading")  # of products
_ENDLESS = 1e300


def checked_machine(machine: Any) -> Machine:
    """Returns the machine.

    Raises:
        ValueError: a field is missing, unknown, or of another type.
    """
    names = {field.name for field in fields(Machine)}
    if not isinstance(machine, dict) or machine.keys() != names:
        raise ValueError(f"`machine` needs {', '.join(sorted(names))}")
    for name, value in machine.items():
        if name in _COUNTS:
            checked_count(f"`{name}` of `machine`", value)
        elif not isinstance(value, str):
            raise ValueError(f"`{name}` of `machine` is {value!r}, but needs a text")
    return Machine(**machine)


def checked_count(name: str, value: Any) -> int:
    """Returns a number of things.

    Raises:
        ValueError: it is no positive integer.
    """
    if not (_is_number(value) and value > 0 and value == int(value)):
        raise ValueError(f"{name} is {value!r}, but needs a positive integer")
    return int(value)


def checked_clock(clock: Any) -> str:
    """Returns the name of a clock.

    Raises:
        ValueError: there is no such clock.
    """
    if clock not in CLOCKS:
        raise ValueError(f"`clock` is {clock!r}, but needs one of {', '.join(CLOCKS)}")
    return str(clock)


def checked_overlap(overlap: Any) -> dict[str, float]:
    """Returns the shares of collectives that pass beside a product.

    Raises:
        ValueError: there is no such collective, or a share is not one.
    """
    for kind, share in _entries("overlap", overlap):
        if kind not in COLLECTIVES:
            raise ValueError(f"`overlap` names {kind!r}, which is none of {', '.join(COLLECTIVES)}")
        if not (_is_number(share) and 0 <= share <= 1):
            raise ValueError(f"`overlap` of `{kind}` is {share!r}, but needs a share from 0 to 1")
    return {kind: float(share) for kind, share in overlap.items()}


def checked_seconds(seconds: Any) -> dict[str, dict[Sizes, float]]:
    """Returns the measurements of all families by their sizes.

    Raises:
        ValueError: there is no such family, or a row of it is not what its family needs.
    """
    return {family: _rows(family, rows) for family, rows in _entries("seconds", seconds)}


def _rows(family: str, rows: Any) -> dict[Sizes, float]:
    """Returns the measurements of a family by their sizes."""
    _check_family(family)
    names = SIZES[kind_of(family)]
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"`{family}` is {rows!r}, but needs a list of rows")
    measured: dict[Sizes, float] = {}
    for number, row in enumerate(rows, start=1):
        good = isinstance(row, list) and len(row) == len(names) + 1 and all(map(_is_number, row))
        if not good or min(row) <= 0 or any(size != int(size) for size in row[:-1]):
            needs = ", ".join([*names, "seconds"])
            raise ValueError(
                f"row {number} of `{family}` is {row}, but needs {needs}: positive numbers, and "
                "integers but for the seconds"
            )
        sizes = tuple(int(size) for size in row[:-1])
        if sizes in measured:
            raise ValueError(f"row {number} of `{family}` has the sizes of another row: {row}")
        measured[sizes] = float(row[-1])
    return measured


def _check_family(family: str) -> None:
    kind, *words = family.split("/")
    if kind not in SIZES:
        hint = did_you_mean(kind, SIZES)
        raise ValueError(f"`{family}` is no family; the families are {', '.join(SIZES)}{hint}")
    if kind == "products":
        if len(words) != 2 or words[1] not in _FORMS:
            raise ValueError(f"`{family}` is no family; products are called products/float32/rows")
        as_dtype(words[0])


def _entries(name: str, value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise ValueError(f"`{name}` is {value!r}, but needs an object")
    return [*value.items()]


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number; NaN compares as false."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _ENDLESS
