"""Timeline: the step of one device as intervals of local work and of collectives, and its time.

Intervals follow each other in the order of the program. Consecutive instructions of one source line
are one interval. A loop is one interval; the intervals of its body are listed inside, once, with a
count. `lowering.costs.roofline` gives the time of local work; the wire bytes of a collective and
the hardware's links (`layouts.hardware`) give that of a collective.

So the total assumes no overlap. `overlapped_seconds` assumes full overlap: of local work and all
networks. A real step takes longer than the second, and with a good compiler less than the first.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.roofline import local_work
from meshdsl.lowering.naming import Names
from meshdsl.lowering.parameters import Scan, axes_of, parameters_of
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, wire_of
from meshdsl.tensors.dtypes import BFLOAT16
from meshdsl.tracing.source import Source

LOCAL = ("compute", "memory")


@dataclass(frozen=True)
class Interval:
    """Consecutive work of a device; the figures are those of one execution.

    Attributes:
        kind: `local` work, a collective, or `scan`, `while`, `cond`.
        name: the last tensor that it computes, or the tensors that it sends; for a scan, its dim.
        phase: forward, backward or update.
        count: for a loop, how often it runs the intervals inside; else 1.
        times: seconds by limit: `compute`, `memory` (bandwidth), or mesh axes, as `over model`.
        axes: the axes of a collective.
        flops, bytes: operations of products, and bytes moved to and from memory.
        wire_bytes: bytes that the device sends.
        memory_bytes: the most memory that the device uses meanwhile; None if it is not known.
        inside: the intervals of a loop's body, or of the branch of a cond that takes longer.
    """

    kind: str
    name: str
    source: Source
    phase: str
    count: int = 1
    times: Mapping[str, float] = field(default_factory=dict)
    axes: tuple[str, ...] = ()
    flops: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    memory_bytes: int | None = None
    inside: tuple[Interval, ...] = ()

    @property
    def seconds(self) -> float:
        """The time of one execution; for a loop, of all its iterations."""
        return sum(self.times.values())

    @property
    def limit(self) -> str:
        """The limit with most of its time."""
        return max(self.times, key=lambda limit: self.times[limit], default="memory")


@dataclass(frozen=True)
class Timeline:
    """A step of one device: its intervals, and the hardware they are for.

    Attributes:
        slow: the mesh axes that cross the slow network.
    """

    hardware: Hardware
    slow: frozenset[str]
    intervals: tuple[Interval, ...]

    @cached_property
    def times(self) -> Mapping[str, float]:
        """Seconds by limit, most first."""
        totals: collections.Counter[str] = collections.Counter()
        for interval in self.intervals:
            totals.update(interval.times)
        return dict(totals.most_common())

    @property
    def seconds(self) -> float:
        """The time of the step, if nothing overlaps."""
        return sum(self.times.values())

    @property
    def overlapped_seconds(self) -> float:
        """The time of the step, if all collectives overlap with local work."""
        local = sum(self.times.get(limit, 0.0) for limit in LOCAL)
        return max([local, *(t for limit, t in self.times.items() if limit not in LOCAL)])

    @property
    def limit(self) -> str:
        """The limit with most of the step's time: `compute`, `memory`, `over` axes; else empty."""
        return next(iter(self.times), "")

    def used(self, flops: float) -> float:
        """Returns the share of the half-precision peak that some flops per step are."""
        peak = self.hardware.peak(BFLOAT16)
        return flops / (self.seconds * peak) if self.seconds else 0.0

    def walk(self) -> Iterator[Interval]:
        """Yields every interval, outer ones first."""
        waiting = list(reversed(self.intervals))
        while waiting:
            interval = waiting.pop()
            yield interval
            waiting += reversed(interval.inside)


def timeline(
    program: SpmdProgram,
    hardware: Hardware,
    names: Names,
    phases: Mapping[Instruction, str],
) -> Timeline:
    """Returns the step of a program on some hardware.

    Args:
        names: the names of its values.
        phases: the phase of every instruction of the outermost block.
    """
    writer = _Writer(program, hardware, names)
    intervals = [
        interval
        for phase, run in itertools.groupby(program.block.instructions, phases.__getitem__)
        for interval in writer.intervals(run, program.block, phase)
    ]
    return Timeline(hardware, hardware.slow_axes(program.mesh), tuple(intervals))


def over(axes: Iterable[str], mesh: Mesh) -> str:
    """Returns the limit of a collective: `over data+model`, in the order of the mesh."""
    return f"over {'+'.join(sorted(axes, key=mesh.names.index))}"


class _Writer:
    def __init__(self, program: SpmdProgram, hardware: Hardware, names: Names) -> None:
        self.mesh = program.mesh
        self.hardware = hardware
        self.names = names
        self.curve = program.memory.curve
        self.work = {}
        for block in _blocks(program.block):
            self.work.update(local_work(block))

    def intervals(
        self, instructions: Iterable[Instruction], block: Block, phase: str
    ) -> Iterator[Interval]:
        """Yields the intervals of consecutive instructions."""

        def key(instruction: Instruction) -> tuple[object, ...]:
            alone = instruction.is_collective or instruction.bodies
            return (instruction,) if alone else (instruction.source,)

        timed = (i for i in instructions if not self._is_free(i))
        for _, run in itertools.groupby(timed, key):
            first, *rest = run
            if first.is_collective:
                yield self._collective(first, phase)
            elif first.bodies:
                yield self._loop(first, phase)
            else:
                yield self._local([first, *rest], phase)

    def _is_free(self, instruction: Instruction) -> bool:
        work = self.work.get(instruction)
        return work is not None and not work.flops and not work.bytes

    def _local(self, run: list[Instruction], phase: str) -> Interval:
        times: collections.Counter[str] = collections.Counter()
        for instruction in run:
            seconds, limit = self.work[instruction].seconds(self.hardware, instruction)
            times[limit] += seconds  # type: ignore[assignment]
        named = [
            self.names[v] for instruction in run for v in instruction.outputs if v in self.names
        ]
        return Interval(
            kind="local",
            name=named[-1] if named else run[-1].op,
            source=run[0].source,
            phase=phase,
            times=dict(times),
            flops=sum(self.work[instruction].flops for instruction in run),
            bytes=sum(self.work[instruction].bytes for instruction in run),
            memory_bytes=self._memory_bytes(run),
        )

    def _collective(self, instruction: Instruction, phase: str) -> Interval:
        axes = axes_of(instruction)
        sent = wire_of(instruction, self.mesh)
        seconds = self.hardware.seconds(instruction.op, sent, axes, self.mesh)
        return Interval(
            kind=instruction.op,
            name=", ".join(dict.fromkeys(self.names.get(v, "") for v in instruction.inputs)),
            source=instruction.source,
            phase=phase,
            times={over(axes, self.mesh): seconds},
            axes=axes,
            wire_bytes=sent,
            memory_bytes=self._memory_bytes([instruction]),
        )

    def _loop(self, instruction: Instruction, phase: str) -> Interval:
        bodies = [tuple(self.intervals(b.instructions, b, phase)) for b in instruction.bodies]
        if instruction.op == "cond":
            inside = max(bodies, key=lambda body: sum(i.seconds for i in body))
        else:
            inside = tuple(itertools.chain(*bodies))
        times: collections.Counter[str] = collections.Counter()
        for interval in inside:
            for limit, seconds in interval.times.items():
                times[limit] += instruction.runs * seconds  # type: ignore[assignment]
        return Interval(
            kind=instruction.op,
            name=parameters_of(instruction, Scan)["dim"] if instruction.op == "scan" else "",
            source=instruction.source,
            phase=phase,
            count=instruction.runs,
            times=dict(times),
            flops=sum(i.flops for i in inside) * instruction.runs,
            bytes=sum(i.bytes for i in inside) * instruction.runs,
            wire_bytes=sum(i.wire_bytes for i in inside) * instruction.runs,
            memory_bytes=self._memory_bytes([instruction]),
            inside=inside,
        )

    def _memory_bytes(self, run: Iterable[Instruction]) -> int | None:
        return max(
            (self.curve[instruction] for instruction in run if instruction in self.curve),
            default=None,
        )


def _blocks(block: Block) -> Iterator[Block]:
    yield block
    for instruction in block.instructions:
        for body in instruction.bodies:
            yield from _blocks(body)
