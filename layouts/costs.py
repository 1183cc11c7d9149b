"""Costs: how long operations of many sizes take on a kind of hardware, from a table.

A table is a file of `layouts/tables`, with its origin in it: for TPUs the compiler's own estimates
(`meshdsl.lowering.backends.jax.sampling` makes them). What is kept of an operation is its
*efficiency*: the least time, by the peaks of the hardware, over the time in the table. Between the
sizes of the table the logarithm of the efficiency is interpolated along the logarithms of the
sizes. Beyond the largest size it stays as it is there. Below the smallest one the time stays: a
smaller operation is padded to it.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from meshdsl.layouts.hardware import Hardware, hardware

_FOLDER = Path(__file__).resolve().parent / "tables"
_FORMAT = 1
PRODUCTS = "products"
ELEMENTWISE = "elementwise"
_BFLOAT16 = 2  # bytes: the dtype of the products in a table

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """The efficiencies of one family of operations, by sizes."""

    efficiency: Mapping[Sizes, float]

    @cached_property
    def _axes(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(set(column))) for column in zip(*self.efficiency, strict=True))

    def at(self, sizes: Sequence[float]) -> float:
        """Returns the efficiency of an operation, interpolated."""
        corners = [_between(size, axis) for size, axis in zip(sizes, self._axes, strict=True)]
        total = weight_sum = 0.0
        for corner in itertools.product(*corners):
            weight = math.prod(share for _, share in corner)
            known = self.efficiency.get(tuple(size for size, _ in corner))
            if weight and known is not None:
                total += weight * math.log(known)
                weight_sum += weight
        if not weight_sum:  # the table has none of the corners: the nearest entry
            return self.efficiency[min(self.efficiency, key=lambda known: _distance(known, sizes))]
        return math.exp(total / weight_sum)


@dataclass(frozen=True)
class Costs:
    """What operations cost on a kind of hardware: `costs_of("v5p").product(512, 4096, 4096)`.

    Attributes:
        origin: where the figures come from.
    """

    hardware: Hardware
    origin: str
    families: Mapping[str, Family]

    def product(
        self, rows: int, inner: int, columns: int, width: int = _BFLOAT16, batch: float = 1
    ) -> float:
        """Returns the seconds of [rows, inner] x [inner, columns].

        Args:
            width: bytes of an element of the operands and of the result.
            batch: how many such products are one operation.
        """
        family = self.families[PRODUCTS]
        smallest = min(min(sizes) for sizes in family.efficiency)
        sizes = [max(size, smallest) for size in (rows, inner, columns)]
        least = _least_of_product(self.hardware, sizes, width)
        alone = least / family.at(sizes)
        if batch == 1:
            return alone
        # What even the smallest product costs, it costs once.
        start = [smallest] * 3
        once = _least_of_product(self.hardware, start, width) / family.at(start)
        return once + batch * max(alone - once, least)

    def moved(self, family: str, moved_bytes: float) -> float:
        """Returns the seconds of work of a family that moves some bytes to and from memory."""
        table = self.families[family]
        least = min(size for (size,) in table.efficiency)
        count = max(moved_bytes, least)
        return count / self.hardware.memory_bandwidth / table.at([count])


def costs_of(name: str) -> Costs | None:
    """Returns the costs of a kind of hardware; None: there is no table of it."""
    return _read(name) if path_of(name).is_file() else None


def path_of(name: str) -> Path:
    """Returns the file of a table."""
    return _FOLDER / f"{name}.json"


def to_json(name: str, origin: str, cycles: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """Returns a table as text, one operation in a line: its sizes, and its cycles."""
    head = {"format": _FORMAT, "hardware": name, "origin": origin}
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    lines.append('  "cycles": {')
    for at, (family, rows) in enumerate(cycles.items()):
        lines.append(f"    {json.dumps(family)}: [")
        lines.append(",\n".join(f"      {json.dumps(list(row))}" for row in rows))
        lines.append("    ]" + ("," if at < len(cycles) - 1 else ""))
    return "\n".join(["{", *lines, "  }", "}", ""])


@cache
def _read(name: str) -> Costs:
    table = json.loads(path_of(name).read_text(encoding="utf-8"))
    if table["format"] != _FORMAT:
        raise ValueError(f"{path_of(name)}: format {table['format']}, this version reads {_FORMAT}")
    kind = hardware(name)
    families = {}
    for family, rows in table["cycles"].items():
        efficiency = {}
        for *sizes, cycles in rows:
            if family == PRODUCTS:
                least = _least_of_product(kind, sizes, _BFLOAT16)
            else:
                least = sizes[0] / kind.memory_bandwidth
            efficiency[tuple(sizes)] = least / (cycles / kind.clock)
        families[family] = Family(efficiency)
    return Costs(kind, table["origin"], families)


def _least_of_product(kind: Hardware, sizes: Sequence[int], width: int) -> float:
    """Returns the seconds of a product by the peaks of the hardware.

    Args:
        sizes: rows, inner and columns.
    """
    rows, inner, columns = sizes
    moved = width * (rows * inner + inner * columns + rows * columns)
    flops = kind.flops[min(kind.flops, key=lambda known: abs(known - width))]
    return max(2 * rows * inner * columns / flops, moved / kind.memory_bandwidth)


def _between(size: float, known: Sequence[int]) -> list[tuple[int, float]]:
    """Returns the sizes of a table around a size, with their weights."""
    if size <= known[0]:
        return [(known[0], 1.0)]
    if size >= known[-1]:
        return [(known[-1], 1.0)]
    above = bisect.bisect_left(known, size)
    low, high = known[above - 1], known[above]
    share = math.log(size / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


def _distance(known: Sizes, sizes: Sequence[float]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(known, sizes, strict=True))
