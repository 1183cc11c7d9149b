"""What copies of the state the hosts of a job hold in memory, whatever start has written them.

Each start of a job may have other processes on another mesh. So a copy says which start it is of,
and which blocks of which arrays it has. Those of one step and one start make the state together,
and replicas of a block are equal: each is needed from one host alone.

Guarantees:
    Copies of different starts are never mixed: steps that were taken again on another mesh differ
    by rounding.
    Copies of an abandoned line of training are not used; see `starts`.
"""

from __future__ import annotations

import base64
import json
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from meshdsl.training.checkpointing.blocks import Region, complete
from meshdsl.training.checkpointing.copies.starts import Starts
from meshdsl.training.checkpointing.local_checkpoints import regions_of
from meshdsl.training.checkpointing.newest import ABOUT, FIRST, START, copies_in
from meshdsl.training.processes.joining import gathered

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_ABOUT = ("arrays", "position", "config")
_MOST = 3  # arrays that a message names


class Version(NamedTuple):
    """A step, and the start of the job that copied it: later starts have larger numbers."""

    step: int
    number: int
    name: str


class Holder(NamedTuple):
    """Where a block is.

    Attributes:
        process: the process that answers for the host.
        folder: the folder of the process that copied it: `process.1`.
        number: the block's number there.
    """

    process: int
    folder: str
    number: int


@dataclass
class Held:
    """The copies that all hosts hold: `look(folder, leads, starts)`.

    Attributes:
        starts: those of the job, as all processes know them.
        folders: by version and by the process that answers for a host, the folders there.
    """

    starts: Starts
    folders: dict[Version, dict[int, list[str]]] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The largest number of a start."""
        return max((version.number for version in self.folders), default=0)

    @property
    def steps(self) -> list[int]:
        """The steps of which there are copies, without those of abandoned lines of training."""
        return sorted(
            {one.step for one in self.folders if self.starts.current(one.number, one.step)}
        )

    def at(self, step: int) -> list[Version]:
        """Returns the versions of a step, that of the last start first."""
        versions = [one for one in self.folders if one.step == step]
        return sorted(
            (one for one in versions if self.starts.current(one.number, step)), reverse=True
        )


@dataclass
class Blocks:
    """All blocks of a version: where each is, by path and region.

    Attributes:
        about: the description beside the arrays.
    """

    about: dict[str, Any]
    holders: dict[str, dict[Region, list[Holder]]]

    def missing(self) -> str | None:
        """Returns which arrays lack blocks, for a message; None: all are complete."""
        incomplete = [
            path
            for path, array in self.about["arrays"].items()
            if not complete([size for _, size in array["dims"]], [*self.holders.get(path, {})])
        ]
        if not incomplete:
            return None
        rest = f" and {len(incomplete) - _MOST} more" if len(incomplete) > _MOST else ""
        return f"{', '.join(incomplete[:_MOST])}{rest}"


def host_of(folder: Path) -> str:
    """Returns what tells a folder in a host's memory from those of other hosts."""
    try:
        boot = _BOOT.read_text().strip()
    except OSError:  # not Linux
        boot = socket.gethostname()
    place = folder.stat()
    return f"{boot}:{place.st_dev}:{place.st_ino}"


def look(folder: Path, leads: bool, starts: Starts) -> Held:
    """Returns what all hosts hold; all processes must call this.

    Args:
        folder: the folder of copies on this host.
        leads: whether this process answers for its host.
    """
    own = []
    for name, step, about in copies_in(folder) if leads else ():
        own.append([name, [step, *about.get(START, FIRST)]])
    held = Held(starts)
    for process, text in enumerate(gathered(json.dumps(own))):
        for name, version in json.loads(text):
            hosts = held.folders.setdefault(Version(*version), {})
            hosts.setdefault(process, []).append(name)
    return held


def described(folder: Path, version: Version, own: Sequence[str]) -> str:
    """Returns the blocks of a version on this host, as `blocks_of_all` takes them.

    Args:
        own: the folders that this process answers for.

    Raises:
        OSError, ValueError: a description cannot be read.
    """
    about: dict[str, Any] = {}
    blocks = {}
    for name in own:
        read = json.loads((folder / name / str(version.step) / ABOUT).read_text())
        blocks[name] = read["blocks"]
        about = about or {key: read[key] for key in _ABOUT}
    return base64.b85encode(zlib.compress(json.dumps([about, blocks]).encode())).decode()


def blocks_of_all(texts: Sequence[str]) -> Blocks:
    """Returns the blocks on all hosts, given those of each process."""
    description: dict[str, Any] = {}
    holders: dict[str, dict[Region, list[Holder]]] = {}
    for process, text in enumerate(texts):
        about, blocks = json.loads(zlib.decompress(base64.b85decode(text)))
        description = description or about
        for name, regions in blocks.items():
            _add(holders, process, name, regions_of(regions))
    return Blocks(description, holders)


def _add(
    holders: dict[str, dict[Region, list[Holder]]],
    process: int,
    folder: str,
    regions: Mapping[str, Sequence[Region]],
) -> None:
    for path, each in regions.items():
        of_path = holders.setdefault(path, {})
        for number, region in enumerate(each):
            of_path.setdefault(region, []).append(Holder(process, folder, number))
