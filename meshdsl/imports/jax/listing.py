"""The inferred names of a function's dims, for review: its lines, each with what it computes.

A name that follows from what the user said stands as it is; one that was made up has a `?`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.extend.core as jex

from meshdsl.imports.jax.inference import Frame, labels
from meshdsl.imports.jax.naming import Naming, Origin
from meshdsl.tensors.dtypes import short
from meshdsl.tracing.source import UNKNOWN, Source


@dataclass(frozen=True)
class Share:
    """How many positions of a function's arrays have names that follow from the user's.

    Positions of size one and those along which all elements are equal do not count.
    """

    known: int
    every: int

    def __str__(self) -> str:
        percent = 100 * self.known / self.every if self.every else 100.0
        return f"{percent:.1f} % of {self.every:,} dims have names that follow from yours"


def share(naming: Naming, frame: Frame) -> Share:
    """Counts the positions of the arrays of a frame and of its bodies."""
    known = every = 0
    for dims in frame.dims.values():
        for node, weak in zip(dims.nodes, dims.weak, strict=True):
            if not weak:
                every += 1
                known += naming.name(node).origin is not Origin.TELLING
    inner = [share(naming, body) for bodies in frame.bodies.values() for body in bodies]
    return Share(known + sum(s.known for s in inner), every + sum(s.every for s in inner))


def listing(title: str, naming: Naming, frame: Frame, paths: Sequence[str]) -> str:
    """Returns the arguments with their dims, and each line of the function with its result."""
    arguments = [_typed(naming, frame, v) for v in frame.jaxpr.invars]
    results = [_typed(naming, frame, v) for v in frame.jaxpr.outvars]
    width = max(map(len, paths), default=0)
    lines = [f"{title}: {share(naming, frame)}", "", "arguments"]
    lines += [f"  {path:<{width}}  {t}" for path, t in zip(paths, arguments, strict=True)]
    rows = list(_merged(_rows(naming, frame)))
    place = max((len(source.place) for source, _ in rows), default=0)
    code = min(max((len(source.code) for source, _ in rows), default=0), 60)
    lines += ["", "lines"]
    for source, typed in rows:
        lines.append(f"  {source.place:<{place}}  {source.code[:60]:<{code}}  {typed}")
    lines += ["", "results", *(f"  {typed}" for typed in results)]
    return "\n".join(lines)


def _rows(naming: Naming, frame: Frame) -> Iterator[tuple[Source, str]]:
    """Yields the lines of a frame in order, with what each equation computes."""
    for number, equation in enumerate(frame.jaxpr.eqns):
        for body in frame.bodies.get(number, ()):
            yield from _rows(naming, body)
        source = frame.sources[number]
        if source.file != UNKNOWN.file and equation.outvars:
            yield source, _typed(naming, frame, equation.outvars[0])


def _merged(rows: Iterator[tuple[Source, str]]) -> Iterator[tuple[Source, str]]:
    """Yields one row for each run of a line, with its last result; repeated rows once."""
    seen = set()
    last: tuple[Source, str] | None = None
    for row in rows:
        if last is not None and last[0] != row[0] and last not in seen:
            seen.add(last)
            yield last
        last = row
    if last is not None and last not in seen:
        yield last


def _typed(naming: Naming, frame: Frame, atom: Any) -> str:
    """Returns `f32[batch=8, wv_1?=4]`."""
    aval: Any = atom.aval
    if isinstance(atom, jex.Literal):
        return f"{short(aval.dtype)}[]"
    names = labels(naming, frame, atom)
    rows = zip(names, frame.of(atom).nodes, aval.shape, strict=True)
    dims = [
        f"{name}{'?' if naming.name(node).origin is Origin.TELLING else ''}={size}"
        for name, node, size in rows
        if size != 1 or naming.name(node).origin is not Origin.TELLING
    ]
    kind = "key" if aval.dtype.name.startswith("key") else short(aval.dtype)
    return f"{kind}[{', '.join(dims)}]"
