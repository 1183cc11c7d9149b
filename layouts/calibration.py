"""Calibration: what operations and collectives took on the devices of one machine, as a file.

`meshdsl calibrate --out=mine.json` writes it, and `--hardware=mine.json` reads it. It has the
seconds that were measured, by families of operations and their sizes; laws are fitted to them when
it is read (`layouts.fits`). Its `machine` says where it was measured.

All devices were at work at once. So what virtual CPU devices share, their cores and their memory,
is in the figures. `sharing` has the time of the same work with fewer devices at once.

The clock of virtual CPU devices is the processor time of all threads over the number of cores: what
the devices take on a machine that does nothing else. Other jobs hardly change it. The clock of all
other devices is the wall clock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType

from meshdsl.layouts.calibration_checks import (
    checked_clock,
    checked_count,
    checked_machine,
    checked_overlap,
    checked_seconds,
)
from meshdsl.layouts.costs import Sizes
from meshdsl.layouts.fits import Fit, kind_of
from meshdsl.layouts.hardware import COLLECTIVES, HARDWARE, Hardware, hardware, sent_bytes
from meshdsl.layouts.machine import Machine
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import as_dtype

SUFFIX = ".json"
_FORMAT = 1
_KIND = "calibration of meshdsl"
_NEEDED = ("products", "elementwise")
_OVERLAPS = 0.5  # the share of a collective beside a product from which on it counts as hidden
_EVERYWHERE = 2**31


@dataclass(frozen=True)
class Calibration:
    """What was measured; `with_family` adds a family.

    Attributes:
        clock: `processor` or `wall`; see above.
        memory_bytes: what one device has.
        seconds: of each family, by sizes.
        overlap: the share of a collective's time that passes beside a product, by kind.
        path: the file that it comes from.
    """

    machine: Machine
    date: str
    clock: str
    memory_bytes: int
    seconds: Mapping[str, Mapping[Sizes, float]] = field(default_factory=dict)
    overlap: Mapping[str, float] = field(default_factory=dict)
    path: str = field(default="", compare=False)

    @cached_property
    def fits(self) -> Mapping[str, Fit]:
        """The fitted law of each family."""
        return {family: Fit(family, rows) for family, rows in self.seconds.items() if rows}

    @cached_property
    def hardware(self) -> Hardware:
        """The devices, with the best that was measured as their peaks."""
        flops: dict[int, float] = {}
        for family, rows in self.seconds.items():
            if kind_of(family) == "products":
                width = as_dtype(family.split("/")[1]).itemsize
                best = max(2 * b * m * k * n / s for (b, m, k, n), s in rows.items())
                flops[width] = max(best, flops.get(width, 0.0))
        memory = max(moved / s for (moved,), s in self.seconds["elementwise"].items())
        sent = [
            (sent_bytes(kind_of(family), *sizes), seconds)
            for family, rows in self.seconds.items()
            if kind_of(family) in COLLECTIVES
            for sizes, seconds in rows.items()
        ]
        link = max((count / seconds for count, seconds in sent), default=memory)
        return Hardware(
            self.path,
            f"{self.machine}, as measured in {self.path}",
            MappingProxyType(flops),
            self.memory_bytes,
            memory,
            link,
            link,
            joined=_EVERYWHERE,
            latency=min((seconds for _, seconds in sent), default=0.0),
            asynchronous=frozenset(k for k, share in self.overlap.items() if share > _OVERLAPS),
        )

    @property
    def lacking(self) -> list[str]:
        """The kinds of families without which no program can be simulated."""
        return [k for k in _NEEDED if not any(kind_of(family) == k for family in self.fits)]

    @property
    def origin(self) -> str:
        """What the costs are, for reports."""
        return f"{sum(map(len, self.seconds.values()))} measurements of {self.date} ({self.path})"

    def nearest(self, family: str) -> Fit | None:
        """Returns the fit of a family, or the one of its kind whose name has most words in common.

        None: no family of that kind was measured.
        """
        if family in self.fits:
            return self.fits[family]
        words = family.split("/")
        alike = [known for known in self.fits if kind_of(known) == words[0]]
        if not alike:
            return None
        return self.fits[max(alike, key=lambda known: sum(w in words for w in known.split("/")))]

    def fingerprint(self) -> str:
        """Returns a hash of all that was measured."""
        return hashlib.sha256(self._text().encode()).hexdigest()[:16]

    def with_family(self, family: str, rows: Mapping[Sizes, float]) -> Calibration:
        """Returns these measurements with those of one more family."""
        return replace(self, seconds={**self.seconds, family: dict(rows)})

    def write(self, path: str) -> None:
        """Writes the file; a reader never sees a part of it.

        Raises:
            ValueError: it cannot be written.
        """
        part = Path(f"{path}.part")
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(self._text(), encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            reason = (error.strerror or "unknown reason").lower()
            raise ValueError(f"cannot write {path}: {reason}") from error

    def _text(self) -> str:
        head = {
            "kind": _KIND,
            "format": _FORMAT,
            "machine": asdict(self.machine),
            "date": self.date,
            "clock": self.clock,
            "memory_bytes": self.memory_bytes,
            "overlap": dict(self.overlap),
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        families = []
        for family, rows in self.seconds.items():
            each = ",\n".join(f"      {json.dumps([*sizes, s])}" for sizes, s in rows.items())
            families.append(f"    {json.dumps(family)}: [\n{each}\n    ]")
        return "\n".join(["{", *lines, '  "seconds": {', ",\n".join(families), "  }", "}", ""])


def is_file_name(name: str) -> bool:
    """Whether a name of hardware is that of a calibration's file."""
    return name.endswith(SUFFIX)


def find_hardware(name: str) -> Hardware:
    """Returns the hardware of a name, such as `v5p`, or that of a calibration, `mine.json`.

    Raises:
        ValueError: it is not known, or its file cannot be used.
    """
    if is_file_name(name):
        return complete(name).hardware
    if name not in HARDWARE:
        raise ValueError(
            f"unknown hardware {name!r}; choose one of {', '.join(HARDWARE)}, or a file of "
            f"`meshdsl calibrate --out=mine{SUFFIX}`{did_you_mean(name, HARDWARE)}"
        )
    return hardware(name)


def calibration_of(name: str) -> Calibration | None:
    """Returns the calibration of a name of hardware; None if it is no file."""
    return complete(name) if is_file_name(name) else None


def complete(path: str) -> Calibration:
    """Returns a calibration that a simulation can use.

    Raises:
        ValueError: as `read`, or what a simulation needs has not been measured yet.
    """
    calibration = read(path)
    if missing := calibration.lacking:
        raise ValueError(
            f"{path} is not complete: it has no {' and no '.join(missing)}. "
            f"`meshdsl calibrate --out={path}` measures what is missing"
        )
    return calibration


def read(path: str) -> Calibration:
    """Returns the calibration of a file.

    Raises:
        ValueError: there is no such file, it is damaged, or another version has written it.
    """
    try:
        facts = os.stat(path)
        return _read(path, facts.st_mtime_ns, facts.st_size)
    except OSError as error:
        reason = (error.strerror or "unknown reason").lower()
        others = [one.name for one in Path(path).parent.glob(f"*{SUFFIX}")]
        raise ValueError(
            f"cannot read {path}: {reason}. `meshdsl calibrate --out={path}` writes it"
            f"{did_you_mean(Path(path).name, others)}"
        ) from error


@lru_cache(maxsize=8)
def _read(path: str, changed: int, size: int) -> Calibration:
    again = f"Measure again: remove it, and run `meshdsl calibrate --out={path}`"
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: it is not text. {again}") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg.lower()}"
        raise ValueError(f"{path} is damaged: {where}. {again}") from error
    if not isinstance(data, dict) or data.get("kind") != _KIND:
        raise ValueError(
            f"{path} is no calibration: `meshdsl calibrate --out=FILE{SUFFIX}` writes one"
        )
    if data.get("format") != _FORMAT:
        raise ValueError(
            f"{path} is of another version of meshdsl: it has format {data.get('format')}, and "
            f"this version reads {_FORMAT}. {again}"
        )
    try:
        return Calibration(
            checked_machine(data["machine"]),
            str(data["date"]),
            checked_clock(data["clock"]),
            checked_count("`memory_bytes`", data["memory_bytes"]),
            checked_seconds(data["seconds"]),
            checked_overlap(data["overlap"]),
            path,
        )
    except KeyError as error:
        raise ValueError(f"{path} is damaged: it has no {error}. {again}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}. {again}") from error
