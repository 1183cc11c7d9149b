"""Which steps the hosts that are there can go on from, by what each says of its copies.

For supervisors, which have no JAX. Of each step, a copy says which processes have the same block:
of each such set, one has to be there.

Guarantees:
    A step counts only if no block of its state is lacking.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.newest import (
    ABOUT,
    BESIDE,
    FIRST,
    FOLDER,
    NEEDS,
    START,
    copies_in,
)


class Together(NamedTuple):
    """What hosts hold of a step together.

    Attributes:
        time: when it was copied, in seconds since 1970.
        lacking: the processes of which no host has the blocks.
    """

    step: int
    time: float
    lacking: list[int]


def said(folder: Path | None) -> list[dict[str, Any]]:
    """Returns what a host says of its copies: of each version its processes, as JSON."""
    found: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}
    every: list[str] = []
    for name, step, about in () if folder is None else copies_in(folder):
        assert folder is not None
        every.append(name)
        start = (*about.get(START, FIRST),)
        entry = found.setdefault((step, start), {"step": step, "start": start, "has": []})
        entry["has"].append(_number(name))
        entry["needs"] = about.get(NEEDS)
        entry["beside"] = about.get(BESIDE)
        try:
            time = (folder / name / str(step) / ABOUT).stat().st_mtime
        except OSError:  # a process is about to replace it
            time = 0.0
        entry["time"] = max(time, entry.get("time", 0.0))
    for entry in found.values():  # copies of earlier code do not say what they need
        beside = entry.pop("beside") or sorted({*every})
        entry["needs"] = entry["needs"] or [[_number(name)] for name in beside]
    return [*found.values()]


def _number(folder: str) -> int:
    return int(folder.partition(".")[2])


def together(hosts: Iterable[Sequence[dict[str, Any]]], starts: Starts) -> list[Together]:
    """Returns what hosts hold together, by what each of them says; the newest first."""
    has: dict[tuple[int, tuple[Any, ...]], set[int]] = {}
    times: dict[tuple[int, tuple[Any, ...]], float] = {}
    needs: dict[tuple[int, tuple[Any, ...]], set[tuple[int, ...]]] = {}
    for entry in (entry for host in hosts for entry in host):
        version = entry["step"], (*entry["start"],)
        if starts.current(version[1][0], version[0]):
            has.setdefault(version, set()).update(entry["has"])
            times[version] = max(entry["time"], times.get(version, 0.0))
            needs.setdefault(version, set()).update(map(tuple, entry["needs"]))
    found = []
    for version in sorted(has, reverse=True):
        lost = [each for each in needs[version] if not {*each} & has[version]]
        lacking = sorted({process for each in lost for process in each})
        found.append(Together(version[0], times[version], lacking))
    return found


def together_with(
    workdir: Path, folder: Path | None, others: Iterable[Sequence[dict[str, Any]]] = ()
) -> list[Together]:
    """Returns what this host, whose copies are in a folder, and others hold of a job together."""
    return together([said(folder), *others], Starts.read(workdir / FOLDER))


def newest_together(found: Sequence[Together]) -> tuple[int, float] | None:
    """Returns the newest step that lacks nothing, and when it was copied."""
    return next(((one.step, one.time) for one in found if not one.lacking), None)


def of_no_use(found: Sequence[Together], reached: int) -> Together | None:
    """Returns the newest copy after a step, if a lost host is why it cannot be used.

    When processes end, some may have a copy of the last step and others none; that alone is no
    loss, since all have one of the step before.
    """
    later = [one for one in found if one.lacking and one.step > reached]
    return later[0] if len({one.step for one in later}) > 1 else None
