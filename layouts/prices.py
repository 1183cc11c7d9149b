"""Prices: what collectives cost on the links of a mesh, by time.

Without hardware, lowering weighs moves by the bytes that a device sends. With prices it weighs them
by seconds, in the same unit: the bytes that one link carries in that time. Each kind of collective
on each set of axes has a least cost, its latency, and a cost per byte; it costs the larger of the
two. So says `Hardware.seconds`, but for few bytes that take a slow and a fast network in turn: they
cost up to twice as much.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from meshdsl.layouts.hardware import COLLECTIVES, Hardware

if TYPE_CHECKING:
    from meshdsl.layouts.mesh import Mesh

PARTS = 1024  # prices per byte are whole multiples of 1/1024, so that sums of them are exact
_MANY = 2.0**60  # bytes that surely take longer than a latency


class Price(NamedTuple):
    """What a collective costs, in bytes of one link.

    Attributes:
        least: the cost of one that sends next to nothing.
        parts: the cost of each byte that a device sends, in `PARTS`; at least 1.
    """

    least: float
    parts: int

    def of(self, wire_bytes: float) -> float:
        """Returns the cost of a collective that sends some bytes; nothing is free."""
        return max(self.least, wire_bytes * self.parts / PARTS) if wire_bytes else 0.0


@dataclass(frozen=True)
class LinkPrices:
    """The prices of all kinds of collectives on all sets of axes of a mesh.

    Attributes:
        rows: for each kind and set of axes with more than one device, its price.
    """

    rows: tuple[tuple[str, frozenset[str], Price], ...]

    @staticmethod
    def on(hardware: Hardware, mesh: Mesh) -> LinkPrices:
        """Returns the prices of some hardware for the axes of a mesh."""
        axes = [name for name, size in mesh.axes if size > 1]
        sets = [chosen for n in range(1, len(axes) + 1) for chosen in combinations(axes, n)]
        return LinkPrices(
            tuple(
                (kind, frozenset(chosen), _price(hardware, kind, chosen, mesh))
                for kind in COLLECTIVES
                for chosen in sets
            )
        )

    @cached_property
    def _known(self) -> dict[str, dict[frozenset[str], Price]]:
        known: dict[str, dict[frozenset[str], Price]] = {kind: {} for kind in COLLECTIVES}
        for kind, axes, price in self.rows:
            known[kind][axes] = price
        return known

    @cached_property
    def _axes(self) -> frozenset[str]:
        return frozenset().union(*(axes for _, axes, _ in self.rows))

    @cached_property
    def _hash(self) -> int:
        return hash(self.rows)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:  # without the hash: it differs in another process
        return LinkPrices, (self.rows,)

    def price(self, kind: str, axes: Iterable[str]) -> Price:
        """Returns the price of a kind of collective along some axes; without devices it is free."""
        return self._known[kind].get(self._axes.intersection(axes), _FREE)

    def cost(self, kind: str, axes: Iterable[str], wire_bytes: float) -> float:
        """Returns the cost of a collective, in bytes of one link."""
        return self.price(kind, axes).of(wire_bytes)

    def lowest(self, axes: Iterable[str]) -> int:
        """Returns the least that a byte costs along some of these axes, in `PARTS`."""
        among = self._axes.intersection(axes)
        return min((p.parts for _, of, p in self.rows if of <= among), default=1)


_FREE = Price(0.0, 1)


def _price(hardware: Hardware, kind: str, axes: tuple[str, ...], mesh: Mesh) -> Price:
    """Returns a price from the times of two collectives: with next to no bytes, and with many."""
    link = hardware.link_bandwidth
    least, most = (hardware.seconds(kind, sent, axes, mesh) * link for sent in (1.0, _MANY))
    return Price(least, max(1, round(most / _MANY * PARTS)))
