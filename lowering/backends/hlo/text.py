"""Text: the computations and instructions of an optimised HLO module, as XLA prints them.

An instruction is one line, `%name = result op(operands), attributes`; a computation is a name and
its lines in the order of the schedule. Nothing here knows what an instruction does.

Stack frames stand once, at the head of the module; an instruction names one by its number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

_NAME = re.compile(r"(?:^|\s)%?([\w.\-]+)$")  # after its type, if XLA prints one
_COMMENT = re.compile(r"/\*.*?\*/")
_LITERALS = ("constant", "parameter", "iota")
_BITS = re.compile(r"(?:pred|[a-z]+(\d+))")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([^\]]*)\]")
_SIZES = re.compile(r"(?:(?:<=)?\d+(?:,|$))*")  # of a bounded dim, the largest
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_NO_CYCLES = 1 << 62  # what the compiler writes where it has no estimate
_CALLS = ("calls", "to_apply", "called_computations")


@dataclass(frozen=True)
class Line:
    """An instruction: `%name = result op(operands), attributes`."""

    name: str
    result: str
    op: str
    arguments: str
    attributes: str

    @cached_property
    def operands(self) -> list[str]:
        """The names of the operands."""
        if self.op in _LITERALS:
            return []
        parts = parts_of(_COMMENT.sub("", self.arguments))
        return [match.group(1) for part in parts if (match := _NAME.search(part))]

    @property
    def called(self) -> list[str]:
        """The computations that it runs as a part of itself."""
        return self.named(*_CALLS)

    @property
    def branches(self) -> list[str]:
        """The computations of a conditional."""
        return self.named("branch_computations", "true_computation", "false_computation")

    @property
    def cycles(self) -> int | None:
        """The compiler's estimate of its cycles on a TPU; None where there is none."""
        match = _CYCLES.search(self.attributes)
        cycles = int(match.group(1)) if match else _NO_CYCLES
        return cycles if cycles < _NO_CYCLES else None

    @property
    def scope(self) -> str:
        """Where it comes from, as JAX calls it: `jit(step)/blocks/einsum/dot_general`."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match.group(1) if match else ""

    @property
    def frame(self) -> int:
        """The number of its stack frame, or 0."""
        match = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(match.group(1)) if match else 0

    def named(self, *attributes: str) -> list[str]:
        """Returns the computations that some attributes name: `calls=%x`, `branches={%x, %y}`."""
        names = []
        for attribute in attributes:
            match = re.search(rf"\b{attribute}=(?:\{{([^}}]*)\}}|(%?[\w.\-]+))", self.attributes)
            if match:
                names += re.findall(r"[\w.\-]+", match.group(1) or match.group(2))
        return names


@dataclass(frozen=True)
class Module:
    """The computations of a program by name, and their roots.

    Attributes:
        frames: by number, the file, the line and the caller's number of a stack frame.
    """

    computations: Mapping[str, Mapping[str, Line]]
    roots: Mapping[str, Line]
    entry: str
    frames: Mapping[int, Frame]

    @staticmethod
    def parse(text: str) -> Module:
        """Reads a module.

        Raises:
            ValueError: the text has no entry computation, or brackets that do not match.
        """
        computations: dict[str, dict[str, Line]] = {}
        roots: dict[str, Line] = {}
        name, entry = "", ""
        for row in text.splitlines():
            head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", row)
            if head:
                name = head.group(2)
                entry = name if head.group(1) else entry
                computations[name] = {}
            elif name and (line := _line(row)):
                computations[name][line.name] = line
                if row.lstrip().startswith("ROOT"):
                    roots[name] = line
        if not entry:
            raise ValueError("this is no HLO module: it has no ENTRY computation")
        return Module(computations, roots, entry, _frames(text))

    def plain(self, computation: str, name: str | None) -> Line | None:
        """Returns the line that makes a value, seen through copies."""
        lines = self.computations[computation]
        line = lines.get(name) if name else None
        while line is not None and line.op in ("copy", "bitcast", "copy-done", "copy-start"):
            line = lines.get(line.operands[0])
        return line

    def callers(self, line: Line) -> list[Frame]:
        """Returns the stack frames of a line, innermost first."""
        frames = []
        number = line.frame
        while number in self.frames:
            frames.append(self.frames[number])
            number = frames[-1].caller
        return frames


@dataclass(frozen=True)
class Frame:
    """One call: the file and the line, and the number of the frame of its caller, or 0."""

    file: str
    line: int
    caller: int


def sizes_of(result: str) -> list[int]:
    """Returns the bytes of the arrays of a type.

    >>> sizes_of("(bf16[8,128]{1,0}, s4[3], u32[]{:S(2)}, token[])")
    [2048, 2, 4]

    Raises:
        ValueError: a type, or a size, that is not known.
    """
    sizes = []
    for dtype, dims in _ARRAY.findall(result):
        if dtype == "token":
            continue
        match = _BITS.match(dtype)
        if match is None or not _SIZES.fullmatch(dims):
            raise ValueError(f"an array of unknown form: {dtype}[{dims}]")
        bits = int(match.group(1) or 8)
        sizes.append(-(-bits * math.prod(map(int, re.findall(r"\d+", dims))) // 8))
    return sizes


def parts_of(text: str) -> list[str]:
    """Returns the parts of a list, between the commas that stand in no brackets.

    >>> parts_of("(f32[8,128]{1,0}, u32[]), f32[2]{0:T(8,128)} %x")
    ['(f32[8,128]{1,0}, u32[])', 'f32[2]{0:T(8,128)} %x']
    """
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _line(row: str) -> Line | None:
    head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", row)
    if head is None:
        return None
    start = head.end()
    end = _closing(row, start) if row[start] == "(" else row.index(" ", start)
    opened = row.index("(", end)
    closed = _closing(row, opened)
    op = row[end:opened].strip()
    return Line(head.group(1), row[start:end], op, row[opened + 1 : closed - 1], row[closed:])


def _closing(row: str, start: int) -> int:
    """Returns the position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(row)):
        depth += (row[position] == "(") - (row[position] == ")")
        if depth == 0:
            return position + 1
    raise ValueError(f"brackets do not match: {row[:200]}")


def _frames(text: str) -> dict[int, Frame]:
    files = dict(re.findall(r'^(\d+) "([^"]*)"$', _table(text, "FileNames"), re.M))
    places = re.findall(
        r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", _table(text, "FileLocations"), re.M
    )
    lines = {number: (files[file], int(line)) for number, file, line in places}
    rows = re.findall(
        r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?",
        _table(text, "StackFrames"),
        re.M,
    )
    # XLA prints the number of the caller, or one more: then the first frame seems to call itself.
    more = int(any(number == caller for number, _, caller in rows))
    return {
        int(number): Frame(*lines[location], int(caller or 0) - more)
        for number, location, caller in rows
    }


def _table(text: str, title: str) -> str:
    """Returns the rows of a table at the head of a module."""
    match = re.search(rf"^{title}\n((?:\d+ .*\n)*)", text, re.M)
    return match.group(1) if match else ""
