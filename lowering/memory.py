"""Memory: the most bytes that one device holds at once, from the lifetimes of a program's values.

The model is that of a compiler that runs the instructions in the order written:

* The program's inputs are held throughout. A donated input that an output can take the place of
  (same dims, dtype and layout) is free after its last use.
* Every other value has a buffer from its instruction to its last use; the program's outputs keep
  theirs to the end. Renaming, reshaping and barriers make views and need none.
* Elementwise results, broadcasts, casts, transposes and ramps need no buffer where everything that
  reads them can compute them in passing: other elementwise instructions and reductions, and what
  stacks the results of a scan. What they read then lives until it is read there. An elementwise
  result may take the place of an operand that is used for the last time.
* A scan holds its results while it runs, the carry in place of its start where that is not used
  again, and on top of them the peak of its body. The body reads one slice of each stacked input at
  a time and writes one slice of each stacked result as soon as it is computed.

Schedulers reorder, duplicate cheap work and pack buffers imperfectly, and workspaces of library
calls are not counted: expect the compiled program within about a third of this.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshdsl.lowering.program import Block, Instruction, SpmdProgram, Value
from meshdsl.ops.elementwise import ELEMENTWISE
from meshdsl.source import UNKNOWN, Source

_FUSIBLE = ELEMENTWISE | {"shift_right", "broadcast", "transpose", "full", "iota", "device_index"}
_READS_IN_PASSING = _FUSIBLE | {"sum", "max", "min"}
_VIEWS = frozenset(["rename", "reshape", "barrier"])


@dataclass(frozen=True, slots=True)
class Held:
    """One buffer at the peak: the value it was made for, by which line, and its bytes.

    `kind` is "input", or "forward" or "backward" after the line that made the value; `path` is that
    of an input. What a scan's body holds is listed like everything else.
    """

    value: Value
    source: Source
    bytes: int
    kind: str
    path: str = ""


@dataclass(frozen=True, slots=True)
class Memory:
    """The moment at which a device holds the most.

    Attributes:
        peak_bytes: what it holds then.
        source: the line whose instruction runs then.
        held: the buffers of that moment, largest first; their bytes add up to `peak_bytes`.
    """

    peak_bytes: int
    source: Source
    held: tuple[Held, ...]

    @property
    def by_kind(self) -> Mapping[str, int]:
        """Bytes of inputs, of forward values and of backward values."""
        found = {"input": 0, "forward": 0, "backward": 0}
        for one in self.held:
            found[one.kind] += one.bytes
        return found


def memory(program: SpmdProgram) -> Memory:
    """Returns what one device holds at the program's peak."""
    block = program.block
    kept = set(block.inputs) - set(reusable(program))
    paths = dict(zip(block.inputs, program.input_paths, strict=True))
    peak = _Liveness(block, block.inputs, kept, block.outputs).run()
    held = [
        Held(value, source, value.bytes, "input", paths[value])
        if value in paths
        else Held(value, source, value.bytes, "backward" if source.backward else "forward")
        for value, source in peak.held
        if value.bytes
    ]
    ordered = sorted(held, key=lambda one: -one.bytes)
    return Memory(peak.bytes, peak.source, tuple(ordered))


def reusable(program: SpmdProgram) -> list[Value]:
    """Returns the donated inputs whose buffers fit an output."""
    free = collections.Counter((v.shape, v.dtype, v.layout) for v in program.block.outputs)
    found = []
    donated = program.details.get("donated", ())
    for value, given in zip(program.block.inputs, donated, strict=False):
        key = (value.shape, value.dtype, value.layout)
        if given and free[key]:
            free[key] -= 1
            found.append(value)
    return found


@dataclass(frozen=True, slots=True)
class _Peak:
    bytes: int
    source: Source
    held: tuple[tuple[Value, Source], ...]


class _Liveness:
    """The lifetimes of one block's buffers.

    Args:
        owned: inputs whose buffers count here (the others count where they were made).
        kept: inputs that are never free.
        last: the outputs that are held to the end.
    """

    def __init__(
        self, block: Block, owned: Sequence[Value], kept: set[Value], last: Sequence[Value]
    ) -> None:
        self.block = block
        self.owned = [v for v in owned]
        self.kept = kept
        self.maker = {v: i for i in block.instructions for v in i.outputs}
        self.readers: dict[Value, list[Instruction | None]] = collections.defaultdict(list)
        for instruction in block.instructions:
            for value in instruction.inputs:
                self.readers[value].append(instruction)
        self.last = set(last)
        for value in last:
            self.readers[value].append(None)
        self.fused: set[Value] = set()
        for instruction in reversed(block.instructions):
            if instruction.op in _FUSIBLE and self._in_passing(instruction.outputs[0]):
                self.fused.update(instruction.outputs)
        self.buffers: dict[Value, tuple[Value, ...]] = {}
        self.ends = self._ends()

    def _in_passing(self, value: Value) -> bool:
        """Whether every reader of a value can compute it as it goes, so that it has no buffer."""
        readers = self.readers[value]
        return not value.shape or all(r is not None and r.op in _READS_IN_PASSING for r in readers)

    def _reads(self, value: Value) -> tuple[Value, ...]:
        """Returns the buffers that reading a value reads."""
        known = self.buffers.get(value)
        if known is None:
            maker = self.maker.get(value)
            if maker is None or not (value in self.fused or maker.op in _VIEWS):
                known = (value,)
            elif maker.op == "barrier":
                known = self._reads(maker.inputs[maker.outputs.index(value)])
            else:
                known = tuple(dict.fromkeys(b for v in maker.inputs for b in self._reads(v)))
            self.buffers[value] = known
        return known

    def _ends(self) -> dict[Value, int]:
        """Returns, for every buffer, the position of the instruction that needs it last."""
        ends: dict[Value, int] = {}
        for position, instruction in enumerate(self.block.instructions):
            for value in self._runs(instruction):
                ends[value] = position
        for value in (*self.kept, *(b for v in self.last for b in self._reads(v))):
            ends[value] = len(self.block.instructions)
        return ends

    def _runs(self, instruction: Instruction) -> Iterable[Value]:
        """Returns the buffers that an instruction reads at its place in the program."""
        if instruction.op in _VIEWS or instruction.outputs[0] in self.fused:
            return ()
        return dict.fromkeys(b for v in instruction.inputs for b in self._reads(v))

    def run(self) -> _Peak:
        """Goes through the block once."""
        held: dict[Value, Source] = dict.fromkeys(self.owned, UNKNOWN)
        total = sum(v.bytes for v in held)
        peak = _Peak(total, UNKNOWN, tuple(held.items()))
        for position, instruction in enumerate(self.block.instructions):
            if instruction.op in _VIEWS or instruction.outputs[0] in self.fused:
                continue
            dying = [v for v in self._runs(instruction) if self.ends[v] == position and v in held]
            made = dict.fromkeys(instruction.outputs, instruction.source)
            inner = _Peak(0, UNKNOWN, ())
            if instruction.body is not None:
                inner = _body_peak(instruction)
                in_place = _starts(instruction, dying)
            else:
                in_place = _replaced(instruction, dying)
            for value in in_place:
                del held[value]
                total -= value.bytes
            held.update(made)
            total += sum(v.bytes for v in made)
            if total + inner.bytes > peak.bytes:
                everything = (*held.items(), *inner.held)
                peak = _Peak(total + inner.bytes, instruction.source, everything)
            for value in (*dying, *made):
                if value in held and self.ends.get(value, -1) <= position:
                    del held[value]
                    total -= value.bytes
        return peak


def _replaced(instruction: Instruction, dying: Sequence[Value]) -> list[Value]:
    """Returns the dying operand whose buffer an elementwise result takes."""
    if instruction.op not in _FUSIBLE:
        return []
    (out,) = instruction.outputs
    return [value for value in dying if value.bytes == out.bytes][:1]


def _starts(scan: Instruction, dying: Sequence[Value]) -> list[Value]:
    """Returns the starts of a scan's carries whose buffers the carries take."""
    consts, carries = scan.params["consts"], scan.params["carries"]
    return [v for v in scan.inputs[consts : consts + carries] if v in set(dying)]


def _body_peak(scan: Instruction) -> _Peak:
    """Returns what one iteration of a scan holds on top of the scan's own inputs and results."""
    body: Block = scan.params["body"]
    fixed, carries = scan.params["consts"] + scan.params["carries"], scan.params["carries"]
    passed = [v for v in body.inputs[fixed:]]
    inner = _Liveness(body, (), set(), body.outputs[:carries])
    inner.owned = [v for v in passed if not inner._in_passing(v)]
    return inner.run()
