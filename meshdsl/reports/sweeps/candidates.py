"""Candidates: the meshes and layouts of a sweep, as they are written.

A text with a colon is a mesh or a layout; any other is a file, or a glob of files, with one on each
line and comments from `#`. A line `mesh | layout` is one pair; a layout alone goes with every mesh.
Alternatives stand in braces: `data:{64,128},model:4`, `params/embed:{data,-}`,
`{length:model?,}`; several braces in a text are all combined. Topologies are written likewise, as
texts: `v5p:{4x4x4,8x8x8}`; each goes with the meshes that cover it.

Every text is parsed before anything runs. All malformed texts are reported at once, with file and
line.
"""

from __future__ import annotations

import glob
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology

MOST = 10_000  # more are a mistake in the braces
_BRACES = re.compile(r"\{([^{}]*)\}")
_Kind = TypeVar("_Kind", Mesh, Layout, Topology)


@dataclass(frozen=True, order=True)
class Candidate:
    """A mesh and a layout, as texts that `Mesh.parse` and `Layout.parse` read.

    Attributes:
        topology: what it is planned for, as `str(Topology)`; empty if it is not one.
    """

    mesh: str
    layout: str
    topology: str = ""

    def __str__(self) -> str:
        on = f" | on {self.topology}" if self.topology else ""
        return f"{self.mesh} | {self.layout}{on}"


@dataclass
class Reading:
    """What was read.

    Attributes:
        candidates: every pair once, in the order written.
        repeated: those that are written several times.
        problems: what could not be read, and where it stands.
    """

    candidates: list[Candidate] = field(default_factory=list)
    repeated: list[Candidate] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Line:
    where: str
    text: str


def read(meshes: Sequence[str], layouts: Sequence[str]) -> Reading:
    """Returns every layout with every mesh, and the pairs that are written as such.

    read(["data:8", "data:{2,4},model:2"], ["batch:data; heads:model", "layouts/*.txt"])
    """
    reading = Reading()
    own = _all(_lines(meshes, "--mesh_shape", reading), Mesh.parse, reading)
    candidates: dict[Candidate, None] = {}
    for line in _lines(layouts, "--layout", reading):
        mesh, separator, layout = line.text.rpartition("|")
        pairs = _all([_Line(line.where, mesh)], Mesh.parse, reading) if separator else own
        if not separator and not meshes:
            reading.problems.append(
                f"{line.where}: `{layout.strip()}` needs a mesh: give --mesh_shape, or write "
                f"`data:8 | {layout.strip()}`"
            )
        rules = _all([_Line(line.where, layout)], Layout.parse, reading)
        if len(candidates) + len(pairs) * len(rules) > MOST:
            reading.problems.append(f"{line.where}: there are more than {MOST:,} candidates")
            break
        for one in itertools.starmap(_candidate, itertools.product(pairs, rules)):
            if one in candidates and one not in reading.repeated:
                reading.repeated.append(one)
            candidates[one] = None
    reading.candidates = list(candidates)
    return reading


def read_topologies(texts: Sequence[str], slices: int) -> tuple[dict[str, Topology], list[str]]:
    """Returns the machines that are written, each once and by name, and what could not be read.

    read_topologies(["v5p:{4x4x4,8x8x8}", "h100:8x16"], slices=1)
    """
    problems: list[str] = []
    lines = [_Line("--topology", text) for text in texts]
    reading = Reading(problems=problems)
    machines = _all(lines, lambda text: Topology.parse(text, slices), reading)
    return {str(one): one for one in machines}, problems


def on_topologies(reading: Reading, topologies: Sequence[Topology]) -> Reading:
    """Returns candidates on each of some machines that their mesh covers.

    A mesh that covers no machine, and a machine that no mesh covers, cause a warning. They are
    problems if no candidate is left.
    """
    meshes = {one.mesh: Mesh.parse(one.mesh) for one in reading.candidates}
    why = {
        (text, str(one)): one.problems(mesh) for text, mesh in meshes.items() for one in topologies
    }
    names = [str(one) for one in topologies]
    candidates = [
        replace(one, topology=name)
        for one in reading.candidates
        for name in names
        if not why[one.mesh, name]
    ]
    covering, covered = {one.mesh for one in candidates}, {one.topology for one in candidates}
    problems = [
        _none(f"--mesh_shape: mesh {mesh} covers no topology", [why[mesh, name] for name in names])
        for mesh in meshes
        if mesh not in covering
    ]
    if not problems:
        problems = [
            _none(f"--topology: no mesh covers {name}", [why[mesh, name] for mesh in meshes])
            for name in names
            if meshes and name not in covered
        ]
    if candidates:
        for each in problems:
            warnings.warn(f"{each}\n  It is left out", stacklevel=2)
        problems = []
    if len(candidates) > MOST:
        problems.append(f"--topology: there are more than {MOST:,} candidates")
    return Reading(candidates, reading.repeated, reading.problems + problems)


def _none(what: str, reasons: Sequence[Sequence[str]]) -> str:
    """Returns a problem with its reasons, each on a line of its own if there are several."""
    lines = [reason for each in reasons for reason in each]
    return f"{what}: {lines[0]}" if len(lines) == 1 else "\n  ".join([f"{what}:", *lines])


def expanded(text: str) -> list[str]:
    """Returns every text that the alternatives in braces allow.

    >>> expanded("heads:{model,-}; batch:data")
    ['heads:model; batch:data', 'heads:-; batch:data']

    Raises:
        ValueError: a brace without its other half, braces in braces, or too many choices.
    """
    pieces = _BRACES.split(text)
    if any(brace in piece for piece in pieces[::2] for brace in "{}"):
        raise ValueError(
            f"`{text}` has a brace without its other half, or braces in braces; alternatives are "
            "written {data,model,-}"
        )
    alternatives = [
        [piece] if number % 2 == 0 else [one.strip() for one in piece.split(",")]
        for number, piece in enumerate(pieces)
    ]
    if math.prod(map(len, alternatives)) > MOST:
        raise ValueError(f"`{text}` stands for more than {MOST:,} texts")
    return ["".join(choice) for choice in itertools.product(*alternatives)]


def _candidate(mesh: Mesh, layout: Layout) -> Candidate:
    return Candidate(str(mesh), str(layout))


def _all(lines: Sequence[_Line], parse: Callable[[str], _Kind], reading: Reading) -> list[_Kind]:
    """Returns the values of lines, with all their alternatives; adds problems to `reading`."""
    values = []
    for line in lines:
        try:
            texts = expanded(line.text.strip())
        except ValueError as error:
            reading.problems.append(f"{line.where}: {error}")
            continue
        for text in texts:
            try:
                values.append(parse(text))
            except ValueError as error:
                reading.problems.append(f"{line.where}: {error}")
    return values


def _lines(texts: Sequence[str], flag: str, reading: Reading) -> list[_Line]:
    lines = []
    for text in texts:
        if ":" in text or not text.strip():
            lines.append(_Line(flag, text))
        else:
            lines += _lines_of_files(text, flag, reading)
    return lines


def _lines_of_files(pattern: str, flag: str, reading: Reading) -> Iterator[_Line]:
    files = [Path(name) for name in sorted(glob.glob(pattern, recursive=True))]
    files = [file for file in files if not file.is_dir()]
    if not files:
        reading.problems.append(
            f"{flag}: there is no file {pattern}; what is no file has a colon, as in data:8"
        )
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
            reading.problems.append(f"{flag}: cannot read {file}: {reason.lower()}")
            continue
        rows = [(number, line.partition("#")[0]) for number, line in enumerate(lines, 1)]
        nonempty = [_Line(f"{file}:{number}", line) for number, line in rows if line.strip()]
        if not nonempty:
            reading.problems.append(f"{flag}: {file} has no line to read")
        yield from nonempty
