"""Selection: the rows of an explanation that belong to some parts of the model.

A part is named as in a layout's scope: `mlp`, `blocks/*/query`, `Attention*`. It is searched for in
the path of a tensor, its name in the source, and the file and function of its line, in upper or
lower case. Commas separate several: `mlp,attention`. Only rows are selected: every total is
that of the whole program. The row `listed` is the sum of the rows that are selected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import splitext
from typing import TYPE_CHECKING

from meshdsl.layouts.layout import matches
from meshdsl.lowering.placement.keeping import Kept
from meshdsl.lowering.program import Value
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tracing.source import Source

if TYPE_CHECKING:
    from meshdsl.lowering.costs.timeline import Interval
    from meshdsl.reports.explain.explanation import Explanation, Parameter, Part, Traffic

MANY = 4


@dataclass(frozen=True)
class Selection:
    """The rows of a report that are shown: all, or those of the parts `only`."""

    report: Explanation
    only: str = ""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """With one row for many that are alike; see `together`."""
        return together([one for one in self.report.parameters if self._has((one.path,))])

    @cached_property
    def traffic(self) -> tuple[Traffic, ...]:
        return tuple(one for one in self.report.traffic if self._has(one.what, one.source))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return tuple(
            one
            for one in self.report.parts
            if self._has((one.buffer.path, one.name), one.buffer.source)
        )

    @cached_property
    def part_rows(self) -> tuple[Part, ...]:
        """The parts, with one row for many that are alike; see `parts_together`."""
        return parts_together(self.parts)

    @cached_property
    def inputs(self) -> tuple[tuple[str, Value], ...]:
        return tuple((path, value) for path, value in self.report.inputs if self._has((path,)))

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        intervals = self.report.timeline.intervals
        return tuple(one for one in intervals if self._has((one.name,), one.source))

    @cached_property
    def kept(self) -> tuple[Kept, ...]:
        return tuple(one for one in self.report.kept if self._has((one.path,)))

    @property
    def note(self) -> str:
        """What is left out, in a sentence; an empty string if nothing is."""
        if not self.only:
            return ""
        return (
            f"only the rows of `{self.only}` are listed; every sum and total is that of the whole "
            f"program{', but for `listed`: what these rows send' * bool(self.report.traffic)}"
        )

    def check(self) -> None:
        """Raises ValueError if no row belongs to one of the parts, with the nearest names."""
        for part in self._wanted:
            one = Selection(self.report, part)
            if not (one.parameters or one.traffic or one.parts or one.inputs or one.intervals):
                raise ValueError(self._unknown(part))

    def _unknown(self, part: str) -> str:
        paths = [path for path, _ in self.report.inputs]
        places = [_of_source(each.buffer.source) for each in self.report.parts]
        names = {word for text in [*paths, *places] for word in text.split("/") if word}
        hint = did_you_mean(part.rpartition("/")[2], sorted(names)) or "."
        return (
            f"--only={part}: no path, file or function of this step has such a part{hint} "
            "Write parts as in a layout's scope: mlp,blocks/*/query"
        )

    @cached_property
    def _wanted(self) -> tuple[str, ...]:
        """The parts, if not all rows are shown."""
        parts = tuple(part.strip() for part in self.only.split(",") if part.strip())
        return parts or (self.only,) * bool(self.only)

    def _has(self, names: Iterable[str], source: Source | None = None) -> bool:
        if not self.only:
            return True
        texts = [text for name in names for text in (name, name.partition("[")[0])]
        texts += [] if source is None else [_of_source(source)]
        return any(matches(part.lower(), text.lower()) for part in self._wanted for text in texts)


def _of_source(source: Source) -> str:
    """Returns the file and the functions around a line as a path: `meshdsl/nn/mlp/Mlp/__call__`."""
    if not source.line:
        return ""
    file = splitext(source.place.rpartition(":")[0])[0]
    functions = [part for part in source.function.split(".") if not part.startswith("<")]
    return "/".join([file, *functions])


def together(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
    """Returns parameters with one row for those of `MANY` layers or more.

    They have the same dims, dtype and layout, and their paths differ in numbers only. The row's
    path has `*` for these: a scope that all of them fit, and maybe others of another size.
    """
    rows = _rows([(one.path, one.value) for one in parameters])
    return tuple(replace(parameters[at], path=path, count=count) for at, path, count in rows)


def parts_together(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Returns buffers with one row for inputs of `MANY` layers or more, largest rows first."""
    inputs = [one for one in parts if one.buffer.path]
    rows = [
        replace(inputs[at], buffer=replace(inputs[at].buffer, path=path), count=count)
        for at, path, count in _rows([(one.buffer.path, one.buffer.value) for one in inputs])
    ]
    rest = [one for one in parts if not one.buffer.path]
    return tuple(sorted([*rows, *rest], key=lambda one: -one.bytes))


def _rows(values: Sequence[tuple[str, Value]]) -> list[tuple[int, str, int]]:
    """Returns of each row its first value, its path, and how many values it stands for."""
    groups: dict[object, list[int]] = {}
    for at, (path, value) in enumerate(values):
        parts = tuple("*" if part.isdecimal() else part for part in path.split("/"))
        groups.setdefault((parts, value.shape, value.dtype, value.layout), []).append(at)
    rows = []
    for group in groups.values():
        if len(group) < MANY:
            rows += [(at, values[at][0], 1) for at in group]
            continue
        paths = zip(*(values[at][0].split("/") for at in group), strict=True)
        path = "/".join(part if len({part, *rest}) == 1 else "*" for part, *rest in paths)
        rows.append((group[0], path, len(group)))
    return sorted(rows)
