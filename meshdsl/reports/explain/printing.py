"""Printing: a program as one reads it.

One line for what one source line computes, as a formula, with the type of the result (local size
over global size where a dim is split) and the place in the source. Collectives, marked in the
margin, tell what a device sends on the wire (× how often) and where the moved value is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from meshdsl.lowering.collectives import REDUCING
from meshdsl.lowering.costs.units import show_bytes, show_flops
from meshdsl.lowering.expressions import Expressions
from meshdsl.lowering.naming import Names
from meshdsl.lowering.parameters import Loop, Scan, While, axes_of, parameters_of
from meshdsl.lowering.program import (
    Block,
    Instruction,
    SpmdProgram,
    Value,
    payload_bytes,
    wire_bytes,
)
from meshdsl.reports.explain.lines import wrapped
from meshdsl.tensors.dtypes import short

_FORMULA, _TYPE = 66, 50  # the widest that these columns get; what is longer pushes what follows
_WIDTH = 116
Row = tuple[str, str, str] | str

_LEGEND = (
    "* moves data between devices: bytes one device sends × how often,\n"
    "  ← the line whose partial sums it adds up, → the line that needs it moved"
)


def show(program: SpmdProgram) -> str:
    """Returns the program as text."""
    return "\n".join(_Printer(program).lines())


@dataclass(frozen=True)
class _Times:
    """How often a line runs: `known` times, in every iteration of a while loop if it is in one."""

    known: int = 1
    iterations: bool = False

    def __str__(self) -> str:
        known = f" ×{self.known}" if self.known > 1 else ""
        return known + (" × iterations" if self.iterations else "")


class _Printer:
    def __init__(self, program: SpmdProgram) -> None:
        self.program = program
        self.names = Names(program)

    def lines(self) -> Iterable[str]:
        program = self.program
        devices = f"{program.mesh.size} device{'s' if program.mesh.size > 1 else ''}"
        where = f" on {program.mesh}" if program.mesh.axes else ""
        yield f"program {program.name}{where}, {devices}"
        if str(program.layout):
            yield f"layout {program.layout}"
        of, sent = "per device", f"{show_bytes(program.wire_bytes)} sent on the wire"
        if partitioner := program.partitioner:
            of, sent = "of the whole", f"what is sent is {partitioner}'s choice"
        peak, flops = show_bytes(program.peak_bytes), show_flops(program.flops)
        yield f"{of}: {peak} at the peak, {sent}, {flops}"
        if program.collectives:
            yield _LEGEND
        for note in program.notes:
            yield from wrapped("note: ", note, _WIDTH)
        block, inputs, outputs = program.block, program.input_paths, program.output_paths
        yield from self._boundary("inputs", list(zip(block.inputs, inputs, strict=True)))
        results = list(zip(block.outputs, outputs, strict=True))
        changed = [end for end in results if end[0] not in self.names.replacing]
        yield from self._boundary("outputs", changed)
        if len(changed) < len(results):
            word = "and " if changed else ""
            yield f"  {word}{len(results) - len(changed)} that replace inputs, where these were"
        yield ""
        yield from _aligned(list(self._block(block, _Times(), "")))

    def _boundary(self, title: str, values: Sequence[tuple[Value, str]]) -> Iterable[str]:
        yield ""
        yield f"{title}, per device"
        rows = [(path or "result", self._type(v), show_bytes(v.bytes)) for v, path in values]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        for (path, kind, size), (value, _) in zip(rows, values, strict=True):
            line = f"  {path:<{widths[0]}}  {kind:<{widths[1]}}  {size:>{widths[2]}}"
            name = self.names[value]
            yield line if name == path.split("/")[-1] else f"{line}  as {name}"

    def _type(self, value: Value) -> str:
        return short(value.dtype) + value.layout.show(value.shape, self.program.mesh)

    def _block(self, block: Block, times: _Times, indent: str) -> Iterable[Row]:
        expressions = self.names.expressions[block]
        special = {"cond": self._cond, "scan": self._scan, "while": self._while}
        for instruction in expressions.lines:
            if instruction.bodies:
                yield from special[instruction.op](instruction, expressions, times, indent)
            elif len(instruction.parts) > 1:
                yield from self._together(instruction, expressions, times, indent)
            else:
                yield self._line(instruction, expressions, times, indent)

    def _together(
        self, instruction: Instruction, expressions: Expressions, times: _Times, indent: str
    ) -> Iterable[Row]:
        """Yields a joined collective: what it sends, then each of its tensors with its line."""
        parts, axes = instruction.parts, "+".join(axes_of(instruction))
        head = f"{indent}* {instruction.op} over {axes} of {len(parts)} tensors together"
        yield head, self._sent(instruction, times), ""
        for part in parts:
            text, place = self._sends(part, expressions)
            yield f"{indent}    {text}", "", place

    def _line(
        self, instruction: Instruction, expressions: Expressions, times: _Times, indent: str
    ) -> Row:
        if instruction.is_collective:
            text, place = self._sends(instruction, expressions)
            return f"{indent}* {text}", self._sent(instruction, times), place
        kind = self._type(instruction.outputs[0])
        text = self._makes(instruction, expressions)
        return f"{indent}  {text}", kind, str(instruction.source)

    def _sends(self, instruction: Instruction, expressions: Expressions) -> tuple[str, str]:
        """Returns the statement of a collective, with the line that uses it (→) or made it (←)."""
        arrow = "←" if instruction.op in REDUCING else "→"
        return self._makes(instruction, expressions), f"{arrow} {instruction.source}"

    def _makes(self, instruction: Instruction, expressions: Expressions) -> str:
        results = ", ".join(self.names[value] for value in instruction.outputs)
        return f"{results} = {expressions.text(instruction, self.names)}"

    def _sent(self, instruction: Instruction, times: _Times) -> str:
        payload = payload_bytes(instruction, self.program.mesh)
        devices = self.program.mesh.extent(axes_of(instruction))
        sent = f"{show_bytes(wire_bytes(instruction.op, payload, devices))} wire"
        return f"{sent}{times}"

    def _scan(
        self, scan: Instruction, expressions: Expressions, times: _Times, indent: str
    ) -> Iterable[Row]:
        params, names = parameters_of(scan, Scan), self.names
        body = params["body"]
        consts, fixed = params["consts"], params["consts"] + params["carries"]
        order = ", last first" if params["reverse"] else ""
        head = f"{indent}  scan {params['dim']}={params['length']}{order}"
        yield head, "", str(scan.source)
        inside = indent + "    "
        yield from self._carries(scan, expressions, inside)
        yield from _listed(f"{inside}over  ", (names[v] for v in body.inputs[fixed:]))
        yield from _listed(f"{inside}reads ", (names[v] for v in body.inputs[:consts]))
        yield from self._block(body, replace(times, known=times.known * params["length"]), inside)
        yield from self._ends_of_carries(scan, inside)
        yield from self._stacked(scan, inside)

    def _while(
        self, loop: Instruction, expressions: Expressions, times: _Times, indent: str
    ) -> Iterable[Row]:
        names, params = self.names, parameters_of(loop, While)
        condition, body, consts = params["condition"], params["body"], params["consts"]
        inside, turns = indent + "    ", replace(times, iterations=True)
        yield f"{indent}  while", "", str(loop.source)
        yield from self._carries(loop, expressions, inside)
        captured = zip(condition.inputs[:consts], body.inputs[:consts], strict=True)
        yield from _listed(f"{inside}reads ", (names[v] for _, v in captured))
        yield from self._block(condition, turns, inside)
        yield f"{inside}go on while {names[condition.outputs[0]]}"
        yield from self._block(body, turns, inside)
        yield from self._ends_of_carries(loop, inside)

    def _cond(
        self, cond: Instruction, expressions: Expressions, times: _Times, indent: str
    ) -> Iterable[Row]:
        names, inside = self.names, indent + "    "
        predicate = expressions.operand(cond.inputs[0], names)
        for head, body in zip((f"if {predicate}", "else"), cond.bodies, strict=True):
            yield f"{indent}  {head}", "", str(cond.source)
            yield from self._block(body, times, inside)
            for inner, outer in zip(body.outputs, cond.outputs, strict=True):
                yield f"{inside}gives {names[outer]} = {names[inner]}", self._type(outer), ""

    def _carries(self, loop: Instruction, expressions: Expressions, indent: str) -> Iterable[Row]:
        """Yields the names and the initial values of a loop's carries."""
        params = parameters_of(loop, Loop)
        body, first = params["body"], params["consts"]
        last = first + params["carries"]
        for outer, inner in zip(loop.inputs[first:last], body.inputs[first:last], strict=True):
            start = f"{indent}carry {self.names[inner]} = {expressions.operand(outer, self.names)}"
            yield start, self._type(inner), ""

    def _ends_of_carries(self, loop: Instruction, indent: str) -> Iterable[Row]:
        params, names = parameters_of(loop, Loop), self.names
        body, first = params["body"], params["consts"]
        for position in range(params["carries"]):
            inner, after = body.inputs[first + position], body.outputs[position]
            end = names[loop.outputs[position]]
            yield f"{indent}next  {names[inner]} = {names[after]}, at the end {end}"

    def _stacked(self, scan: Instruction, indent: str) -> Iterable[str]:
        """Yields what a scan stacks: `q` within is `q[layers]` after it."""
        params = parameters_of(scan, Scan)
        carries, suffix = params["carries"], f"[{params['dim']}]"
        words = []
        pairs = zip(params["body"].outputs[carries:], scan.outputs[carries:], strict=True)
        for inner, outer in pairs:
            name = self.names[inner]
            same = self.names[outer] == name + suffix
            words.append(name if same else f"{name} as {self.names[outer]}")
        total = show_bytes(sum(value.bytes for value in scan.outputs[carries:]))
        yield from _listed(
            f"{indent}stack ", [*words[:-1], *(f"{w} ({total})" for w in words[-1:])]
        )


def _aligned(rows: Sequence[Row]) -> Iterable[str]:
    """Yields rows of formula, type or wire bytes, and place in columns; texts go between as is."""
    cells = [row for row in rows if not isinstance(row, str)]
    formula = min(_FORMULA, max((len(row[0]) for row in cells), default=0))
    kind = min(_TYPE, max((len(row[1]) for row in cells), default=0))
    for row in rows:
        if isinstance(row, str):
            yield row
        else:  # a short type makes room for a long formula
            line = f"{row[0]:<{formula}}  {row[1]}"
            yield f"{line:<{formula + kind + 2}}  {row[2]}".rstrip()


def _listed(head: str, words: Iterable[str]) -> list[str]:
    """Returns `head` and words with commas, in as many lines as they need."""
    text = ", ".join(words)
    return wrapped(head, text, _WIDTH) if text else []
