"""Units: bytes and counts, as people read them."""

from __future__ import annotations

from collections.abc import Sequence


def show_bytes(count: float) -> str:
    """Returns bytes in the largest unit that leaves a whole part: `6.0 MiB`, `256 KiB`, `12 B`."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count /= 1024
        units.pop(0)
    unit = units[0]
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def show_count(count: float) -> str:
    """Returns a count in thousands, millions, billions or trillions: `174.6 B`."""
    return _scaled(count, ("", " K", " M", " B", " T"))


def show_flops(count: float) -> str:
    """Returns floating-point operations: `6.6 Pflop`."""
    return _scaled(count, (" ", " K", " M", " G", " T", " P", " E")) + "flop"


def _scaled(count: float, prefixes: Sequence[str]) -> str:
    left = list(prefixes)
    while count >= 1000 and len(left) > 1:
        count /= 1000
        left.pop(0)
    prefix = left[0]
    return f"{count:,.1f}{prefix}" if prefix.strip() else f"{count:,.0f}{prefix}"
