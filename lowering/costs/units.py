"""Units: bytes, counts and times as short text."""

from __future__ import annotations

from collections.abc import Sequence


def show_bytes(count: float) -> str:
    """Returns bytes in the largest unit of which there is at least one: `6.0 MiB`, `12 B`."""
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


def show_seconds(count: float) -> str:
    """Returns a time in the largest unit of which there is at least one: `349 µs`, `1.2 s`."""
    if count >= 60:
        minutes, rest = divmod(round(count), 60)
        return f"{minutes:,} min {rest} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if count >= size:
            scaled = count / size
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{count * 1e9:.0f} ns"


def show_share(share: float) -> str:
    """Returns a share in percent: `41 %`, `0.3 %`."""
    percent = 100 * share
    if 0 < percent < 0.01:
        return "< 0.01 %"
    return f"{percent:.0f} %" if percent >= 10 or not percent else f"{percent:.2g} %"


def _scaled(count: float, prefixes: Sequence[str]) -> str:
    remaining = list(prefixes)
    while count >= 1000 and len(remaining) > 1:
        count /= 1000
        remaining.pop(0)
    prefix = remaining[0]
    return f"{count:,.1f}{prefix}" if prefix.strip() else f"{count:,.0f}{prefix}"
