"""Places of processes on hosts: which numbers those of a start get, and who takes whose place."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from meshdsl.training.launching.remote import RemoteHost
from meshdsl.training.processes.meeting import listed

# A host, and the number that its supervisor was started with; None: the host that leads.
Place: TypeAlias = tuple[RemoteHost | None, int]


class Named(NamedTuple):
    """A place as what stays the same when its supervisor comes again.

    Attributes:
        own_id: of the supervisor; empty: the one that leads.
        number: the number that it was started with.
    """

    own_id: str
    number: int

    @classmethod
    def of(cls, place: Place) -> Named:
        member, number = place
        return cls("" if member is None else member.own_id, number)


def in_order(places: Sequence[Place], last: Sequence[Named]) -> list[Place]:
    """Returns places in an order in which those of the last start keep their numbers."""
    before = {place: number for number, place in enumerate(last)}
    kept: dict[int, Place] = {}
    others = []
    for place in places:
        number = before.get(Named.of(place), len(places))
        if number < len(places):
            kept[number] = place
        else:
            others.append(place)
    rest = iter(others)
    return [kept[n] if n in kept else next(rest) for n in range(len(places))]


def host_of(place: Place) -> str:
    """Returns what messages call the host of a place."""
    member, _ = place
    return socket.gethostname() if member is None else member.host


def by_host(places: Sequence[Place]) -> str:
    """Returns which host has which processes: `process 0 on host2, processes 1 and 2 on host3`."""
    numbers: dict[str, list[int]] = {}
    for number, place in enumerate(places):
        numbers.setdefault(host_of(place), []).append(number)
    return ", ".join(f"{listed(has)} on {host}" for host, has in numbers.items())


def change(places: Sequence[Place], last: Sequence[tuple[Named, str]]) -> str:
    """Returns which hosts take part that did not before, and in whose place; empty: none.

    Args:
        last: the places of the last start, and their hosts.
    """
    before = {place.own_id for place, _ in last}
    now = {Named.of(place).own_id for place in places}
    new = [n for n, place in enumerate(places) if Named.of(place).own_id not in before]
    if not last or not new:
        return ""
    hosts = [*dict.fromkeys(host_of(places[n]) for n in new)]
    lost = [host for place, host in last if place.own_id not in now]
    # A host whose supervisor was started again takes its own place.
    gone = ", ".join(host for host in dict.fromkeys(lost) if host not in hosts)
    instead = f" in the place of {gone}" if gone else ""
    takes = "takes" if len(hosts) == 1 else "take"
    return f"{', '.join(hosts)} {takes} part{instead}, with {listed(new)}"
