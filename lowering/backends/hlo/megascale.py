"""Megascale: collectives between slices of TPUs, read from the HLO of XLA:TPU.

A collective across slices is a pair of transfers between a chip and its host, `send` and `recv`.
Their attributes say what the hosts do over the data-centre network. The members are written as a
product of slices and chips, `{1,2}x{0:255}`, or as a list, `{{100000,200000},...}`. The number of a
member is 100,000 times its slice, counted from 1, plus its chip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from meshdsl.layouts.mesh import Mesh

_KINDS = {
    "ALL_REDUCE": "all_reduce",
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
}
_SLICE = 100_000
_NUMBERS = r"\{([\d,:]+)\}"


@dataclass(frozen=True)
class Transfer:
    """A collective across slices; `groups` and `payload` mean the same as in `wire.Sent`."""

    kind: str
    groups: frozenset[tuple[int, ...]]
    payload: int


def transfer(attributes: str, sent: int) -> Transfer | None:
    """Returns the collective that a `send` begins; None: it does not go to another slice.

    Args:
        attributes: the instruction's.
        sent: bytes sent to the host.

    Raises:
        ValueError: the kind, or the form of the members, is not known.
    """
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', attributes)
    if match is None:
        return None
    kind = _KINDS.get(match.group(1))
    if kind is None:
        raise ValueError(f"a collective across slices of unknown kind: {match.group(1)}")
    groups = _groups(attributes.partition("_xla_megascale_target=")[2])
    members = len(next(iter(groups)))
    return Transfer(kind, groups, sent * members if kind == "all_gather" else sent)


def numbered(groups: frozenset[tuple[int, ...]], mesh: Mesh) -> frozenset[tuple[int, ...]]:
    """Returns groups of members as the numbers of devices of a mesh.

    The slow axes of the mesh number the slices, the others the chips of a slice, both row-major.
    libtpu may number the chips of a slice in another order, but in the same one in every slice: so
    the axes between slices that a group spans are right, whichever of its chips it is.

    Raises:
        ValueError: the mesh has no such slice or chip.
    """
    slow = [axis for axis in mesh.names if axis in mesh.slow]
    order = [mesh.names.index(axis) for axis in slow]
    order += [at for at in range(len(mesh.names)) if at not in order]
    devices = np.arange(mesh.size).reshape([size for _, size in mesh.axes]).transpose(order)
    devices = devices.reshape(mesh.extent(slow), -1)

    def number(member: int) -> int:
        slice_, chip = member // _SLICE - 1, member % _SLICE
        if not (0 <= slice_ < devices.shape[0] and chip < devices.shape[1]):
            raise ValueError(
                f"member {member} is no chip of the {devices.shape[0]} slices of "
                f"{devices.shape[1]} chips of the mesh {mesh}; mark axes between slices @dcn"
            )
        return int(devices[slice_, chip])

    return frozenset(tuple(map(number, group)) for group in groups)


def _groups(text: str) -> frozenset[tuple[int, ...]]:
    """Returns the groups of members, written as a product or as a list."""
    product = re.match(rf'"{_NUMBERS}x{_NUMBERS}"', text)
    if product:
        slices, chips = (_numbers(part) for part in product.groups())
        return frozenset(tuple(_SLICE * number + chip for number in slices) for chip in chips)
    listed = re.match(r'"?\{(\{[\d,>\-{}]+\})\}', text)
    if listed is None:
        raise ValueError(f"members of unknown form across slices: {text[:120]}")
    rows = re.findall(r"\{([^{}]+)\}", listed.group(1))
    return frozenset(tuple(map(int, re.findall(r"\d+", row))) for row in rows)


def _numbers(text: str) -> list[int]:
    """Returns the numbers of `0:3,8`."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition(":")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
