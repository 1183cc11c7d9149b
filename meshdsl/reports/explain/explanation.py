"""Explain: what a training step keeps on each device and sends between them, before it runs.

Everything is read off the `SpmdProgram`; nothing is run or allocated. The path of an input says
what it is: those with a part `optimizer` are optimizer state, others with a part `params` are
parameters, the rest is the batch and the like.

Memory is that of the moment when a device holds most (see `costs.memory`), so that the parts add
up to the peak:

* gradients: values made by the backward pass that have the dims of a parameter.
* copies: other values that have the dims of a parameter: parameters cast, or moved to where they
  are used, and parameters and optimizer state after the update.
* activations: other values that the forward pass made outside of the loop that runs at the peak.
  During the backward pass these are the values kept for it.
* working: everything else, such as the values of the layer that is being computed.

A step has three phases. `backward` goes from the first to the last line that differentiation added,
so recomputed values in between belong to it. `update` follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from meshdsl.late import late
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.memory import Buffer, Memory
from meshdsl.lowering.costs.schedule import Schedule
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.lowering.costs.timeline import Timeline, timeline
from meshdsl.lowering.naming import Names
from meshdsl.lowering.placement.keeping import Kept
from meshdsl.lowering.program import (
    Block,
    Instruction,
    SpmdProgram,
    Value,
    payload_bytes,
    wire_bytes,
    wire_of,
)
from meshdsl.reports.explain.advice import advice, to_be_faster
from meshdsl.reports.explain.alternatives import Alternative, compared
from meshdsl.reports.explain.decisions import notes_of
from meshdsl.reports.explain.limits import dtype_of_products, faster
from meshdsl.reports.explain.pads import Pads, pads
from meshdsl.reports.explain.pipeline import PipelineReport, pipeline_report
from meshdsl.reports.explain.selection import Selection
from meshdsl.search.changes import Tried
from meshdsl.tensors.dims import Shape
from meshdsl.tracing.source import Source

PHASES = ("forward", "backward", "update")
PARTS = ("parameters", "optimizer", "batch", "gradients", "copies", "activations", "working")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter and where it is; the local sizes and bytes are those of one device.

    Attributes:
        count: how many there are of the same kind, if this is a row for all of them. Their paths
            differ in numbers, for which `path` has `*`.
    """

    path: str
    value: Value
    count: int = 1

    @property
    def bytes(self) -> int:
        """Of all of them together."""
        return self.count * self.value.bytes


@dataclass(frozen=True, slots=True)
class Traffic:
    """The collectives of one kind that one line of the source causes, over a whole step.

    Attributes:
        what: the tensors that are moved, as `str(program)` calls them; `dims` are theirs.
        count: tensors moved per step; those of a joined collective count one each.
        payload_bytes: the larger of local operand and local result, over all executions.
        wire_bytes: what one device sends, over all executions.
    """

    kind: str
    what: tuple[str, ...]
    dims: Shape
    axes: tuple[str, ...]
    phase: str
    source: Source
    count: int
    payload_bytes: int
    wire_bytes: float


@dataclass(frozen=True, slots=True)
class Part:
    """One buffer at the peak, and the part of the table it counts to.

    Attributes:
        count: how many there are of the same kind, if this is a row for all of them. The paths of
            these inputs differ in numbers, for which that of `buffer` has `*`.
    """

    part: str
    name: str
    buffer: Buffer
    count: int = 1

    @property
    def bytes(self) -> int:
        """Of all of them together."""
        return self.count * self.buffer.bytes


@dataclass(frozen=True)
class Explanation:
    """What a program keeps and sends; `str()` gives the report.

    Attributes:
        batch: the largest input that is neither parameter nor optimizer state.
        wire_bytes: what one device sends per step. A `cond` counts by its worse branch, though the
            traffic lists both. A `while` loop counts by one iteration.
        collectives: how many collectives send that; a joined one counts as one.
        unsure: which of these two, `cond` and `while`, the program has.
        inputs: every input by its path: parameters, the optimizer's state, the batch.
        parts: every buffer at the peak, largest first.
        advice: the next things to try for less memory, or an empty string.
        timeline: the step as intervals, with the hardware that it is for, at its peaks.
        simulated: the step as events, by the costs of operations on that hardware.
        pads: what is lost where sizes do not divide.
        faster: the next things to try for a shorter step, or an empty string.
        dtype: that of the operands of most products; None: there are no products.
        alternatives: the step as it is and by other options, if those were given and differ.
        pipeline: the pipeline that the program runs, if any.
        notes: inputs and results that look like others, but follow other rules of the layout; and
            inputs that decide a choice only, so that their gradient is zero.
        kept: weights gathered once for both passes, since the peak has room for them.
        changes: the step as it is, and with single changes that were tried; empty: none were.
        search: the command that looks for several changes at once, where none of those tried fits;
            or an empty string.
        only: the parts of the model whose rows reports list (`selection`); empty: all.
    """

    name: str
    mesh: Mesh
    layout: Layout
    batch: Value | None
    parameters: tuple[Parameter, ...]
    traffic: tuple[Traffic, ...]
    wire_bytes: float
    collectives: int
    unsure: frozenset[str]
    memory: Memory
    parts: tuple[Part, ...]
    flops: int
    advice: str
    timeline: Timeline
    simulated: Schedule
    pads: Pads
    faster: str
    dtype: np.dtype | None
    alternatives: tuple[Alternative, ...]
    notes: tuple[str, ...] = ()
    pipeline: PipelineReport | None = None
    kept: tuple[Kept, ...] = ()
    inputs: tuple[tuple[str, Value], ...] = ()
    changes: tuple[Tried, ...] = ()
    search: str = ""
    only: str = ""

    @cached_property
    def shown(self) -> Selection:
        """The rows that reports list: all, or those of `only`."""
        return Selection(self, self.only)

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters together, over the whole mesh."""
        return sum(parameter.value.shape.volume for parameter in self.parameters)

    @property
    def bytes_of(self) -> Mapping[str, int]:
        """Bytes per device at the peak, by part; they add up to `memory.peak_bytes`."""
        totals = dict.fromkeys(PARTS, 0)
        for part in self.parts:
            totals[part.part] += part.buffer.bytes
        return totals

    def __str__(self) -> str:
        return late("explanation as text")(self)

    def html(self) -> str:
        """Returns the report as one HTML page that needs nothing else."""
        return late("report as page")(self)

    def _repr_html_(self) -> str:
        """Returns the report for notebooks."""
        return late("report as fragment")(self)


def explain(
    program: SpmdProgram,
    hardware: str = "v5p",
    others: Mapping[str, SpmdProgram] = MappingProxyType({}),
    changes: Sequence[Tried] = (),
) -> Explanation:
    """Explains a program; meant for training steps, but any will do.

        print(explain(f.lower(x), hardware="h100"))

    Args:
        hardware: for the time of a step, a name of `layouts.hardware` or a calibration's file.
        others: the same program by other options, each with the flag that asks for it.
        changes: the step as it is, and with single changes that were tried (`search.changes`).

    Raises:
        ValueError: the hardware is not known, or its file cannot be read.
    """
    device = find_hardware(hardware)
    program, *rest = (stored_on(one, device) for one in (program, *others.values()))
    others = dict(zip(others, rest, strict=True))
    names = Names(program)
    phases = dict(_phases(program.block))
    inputs = list(zip(program.block.inputs, program.input_paths, strict=True))
    kinds = input_parts(program.input_paths)
    parameters = tuple(Parameter(p, v) for v, p in inputs if kinds[p] == "parameters")
    fed = [value for value, path in inputs if kinds[path] == "batch"]
    parts = tuple(_parts(program, parameters, names, phases))
    traffic = _traffic(program, names, phases)
    step = timeline(program, device, names, phases)
    return Explanation(
        name=program.name,
        mesh=program.mesh,
        layout=program.layout,
        batch=max(fed, key=lambda v: v.shape.volume, default=None),
        parameters=parameters,
        traffic=traffic,
        wire_bytes=program.wire_bytes,
        collectives=_count(program),
        unsure=frozenset(i.op for i, _ in program.block.walk()) & {"cond", "while"},
        memory=program.memory,
        parts=parts,
        flops=program.flops,
        advice=advice(program, parts, changes),
        timeline=step,
        simulated=simulate(program, device),
        pads=pads(program, [(part.name, part.buffer) for part in parts]),
        faster="; ".join(filter(None, [faster(program, step, traffic), to_be_faster(changes)])),
        dtype=dtype_of_products(program),
        alternatives=compared(program, others, device),
        pipeline=pipeline_report(program, step),
        notes=(*program.notes, *notes_of(program.decisions)),
        kept=program.kept,
        inputs=tuple((path, value) for value, path in inputs),
        changes=tuple(changes),
    )


def stored_on(program: SpmdProgram, device: Hardware) -> SpmdProgram:
    """Returns a program whose memory is that of a device, whatever it was lowered for."""
    return program if program.tile == device.tile else replace(program, tile=device.tile)


def input_part(path: str) -> str:
    """Returns the part of the table that an input counts to."""
    words = path.split("/")
    if "optimizer" in words:
        return "optimizer"
    return "parameters" if "params" in words else "batch"


def input_parts(paths: Sequence[str]) -> dict[str, str]:
    """Returns the part of the table that each input counts to.

    Several inputs may mirror the same parameter. The one with the shortest path is that parameter;
    the others, such as a momentum, are optimizer state.
    """
    parts = {path: input_part(path) for path in paths}
    first: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: path.count("/")):
        of = path.rpartition("params/")[2]
        if parts[path] == "parameters" and first.setdefault(of, path) != path:
            parts[path] = "optimizer"
    return parts


def _phases(block: Block) -> Iterator[tuple[Instruction, str]]:
    """Yields the instructions of the outermost block with the phase of the step they belong to."""
    computing = [
        n for n, i in enumerate(block.instructions) if i.source.backward and not i.is_collective
    ]
    first, last = (computing[0], computing[-1]) if computing else (len(block.instructions),) * 2
    for position, instruction in enumerate(block.instructions):
        if first <= position <= last or instruction.source.backward:
            yield instruction, "backward"
        else:
            yield instruction, "forward" if position < first else "update"


def _count(program: SpmdProgram) -> int:
    """Returns how many collectives there are; a cond counts by the branch that sends more."""

    def sent(one: Instruction) -> float:
        return wire_of(one, program.mesh)

    return sum(times for one, times in program.block.counted(sent) if one.is_collective)


def _traffic(
    program: SpmdProgram, names: Names, phases: Mapping[Instruction, str]
) -> tuple[Traffic, ...]:
    grouped: dict[tuple, Traffic] = {}
    for outermost, phase in phases.items():
        for one, times in Block((), (outermost,), ()).walk():
            if not one.is_collective:
                continue
            for part in one.parts:  # each tensor has a row of its own, joined or not
                axes, dims = tuple(part.params["axes"]), part.outputs[0].shape
                payload = payload_bytes(part, program.mesh)
                sent = wire_bytes(part.op, payload, program.mesh.extent(axes))
                when = "backward" if part.source.backward else phase
                key = (part.op, part.source, axes, dims, when)
                before = grouped.get(key)
                moved = (names.get(part.inputs[0], ""),)
                grouped[key] = Traffic(
                    kind=part.op,
                    what=tuple(dict.fromkeys((before.what if before else ()) + moved)),
                    dims=dims,
                    axes=axes,
                    phase=when,
                    source=part.source,
                    count=times + (before.count if before else 0),
                    payload_bytes=times * payload + (before.payload_bytes if before else 0),
                    wire_bytes=times * sent + (before.wire_bytes if before else 0),
                )
    largest_first = sorted(grouped.values(), key=lambda t: -t.wire_bytes)
    return tuple(sorted(largest_first, key=lambda t: PHASES.index(t.phase)))


def _parts(
    program: SpmdProgram,
    parameters: tuple[Parameter, ...],
    names: Names,
    phases: Mapping[Instruction, str],
) -> Iterator[Part]:
    shapes = {frozenset(parameter.value.shape) for parameter in parameters}
    outermost = {value: phase for i, phase in phases.items() for value in i.outputs}
    kinds = input_parts(program.input_paths)
    for buffer in program.memory.buffers:
        if buffer.kind == "input":
            part = kinds[buffer.path]
        elif frozenset(buffer.value.shape) in shapes:
            part = "gradients" if buffer.source.backward else "copies"
        else:
            part = "activations" if outermost.get(buffer.value) == "forward" else "working"
        yield Part(part, names.get(buffer.value, ""), buffer)
