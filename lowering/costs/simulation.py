"""Simulation: the time of a program's step on some hardware, before any compiler.

Every instruction is work of the device, a transfer, or a loop, in the steps of `lowering.costs.
streams`. What work costs comes from the table of the hardware (`layouts.costs`), or from its peaks
where there is none; what a transfer costs, from its links.

* A collective is one transfer or several (`lowering.transfers`). One that the hardware's compiler
  writes as asynchronous (`Hardware.asynchronous`) starts where its operands are ready, and the
  device waits for it where it is first read. All other ones make the device wait at once.
* Links of a torus serve what is ready first (`lowering.costs.flights`).
* Where the device would wait, other work that is ready goes first (`lowering.costs.filling`).
* Instructions that cost nothing, such as views and fused elementwise work, hand their operands on
  to their readers.

`simulate` gives the same `Schedule` as `lowering.backends.hlo.schedule` reads off a compiler's
schedule, so that one can be held against the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshdsl.layouts.calibration import calibration_of
from meshdsl.layouts.costs import ELEMENTWISE, Costs, costs_of
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.attention_sizes import scored_before
from meshdsl.lowering.costs.attention import PRODUCTS as PRODUCTS_OF_ATTENTION
from meshdsl.lowering.costs.attention import attention_seconds
from meshdsl.lowering.costs.filling import filled
from meshdsl.lowering.costs.flights import Flight, Sent, queued
from meshdsl.lowering.costs.links import links_of
from meshdsl.lowering.costs.measured import MeasuredCosts
from meshdsl.lowering.costs.products import GROUPED, product_sizes
from meshdsl.lowering.costs.roofline import LocalWork, local_work, works_alike
from meshdsl.lowering.costs.schedule import WORK, Event, Schedule
from meshdsl.lowering.costs.streams import (
    PICOSECONDS,
    Choose,
    Key,
    Link,
    Moment,
    Repeat,
    Start,
    Step,
    Steps,
    Wait,
    Work,
    moments,
)
from meshdsl.lowering.instructions import Fusion, kinds_with
from meshdsl.lowering.parameters import Scan, parameters_of
from meshdsl.lowering.program import (
    Block,
    Instruction,
    SpmdProgram,
    Value,
    wire_bytes,
)
from meshdsl.lowering.transfers import Chain, Transfer, chains_of, in_one_transfer
from meshdsl.tensors.dtypes import is_float8
from meshdsl.tracing.source import Source

# How many products make scores, or their gradients, and how many read them.
_WITH_PRODUCTS = ("einsum", "convolve", *GROUPED, *PRODUCTS_OF_ATTENTION)
_PRICED_BY_SIZES = {"einsum", *GROUPED, *PRODUCTS_OF_ATTENTION}  # whatever they move
# Kinds whose time is that of elementwise work.
_AS_ELEMENTWISE = kinds_with(
    lambda kind: (
        kind.elementwise
        or kind.fusion in (Fusion.VIEW, Fusion.FUSED, Fusion.REDUCTION)
        or (kind.moves or kind.cheap or kind.in_place or kind.constant)
        or kind.name in ("concat", "assemble")
    )
)
_NOTHING: frozenset[Key] = frozenset()


def simulate(program: SpmdProgram, hardware: Hardware, fused: bool = True) -> Schedule:
    """Returns the time of a step: `simulate(f.lower(x), hardware("v5p")).seconds`.

    Args:
        fused: whether a compiler fuses elementwise work; False: a framework runs one operation
            after another.
    """
    written = _Writer.of(program, hardware, fused)
    steps = written.program(program.block)
    events = written.events(moments(steps))
    seconds = steps.run().totals.time / PICOSECONDS
    measured, estimated = written.measured, written.estimated
    if measured is not None:
        origin, estimated = measured.calibration.origin, measured.estimated
    elif written.costs is not None:
        origin = written.costs.origin
    else:
        origin = f"the peaks of {hardware.title}"
    return Schedule(seconds, events, {}, timed=True, origin=origin, estimated=estimated)


def step_seconds(program: SpmdProgram, hardware: Hardware) -> float:
    """Returns `simulate(program, hardware).seconds`, without saying where they go."""
    return Simulator(hardware).seconds(program)


class Simulator:
    """Simulates programs on some hardware, and remembers what they share.

    A program that was changed in one place has the other blocks and instructions of the program
    before, so only what changed is written and run again. The seconds are those of `simulate`.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self._writers: dict[Mesh, _Writer] = {}

    def seconds(self, program: SpmdProgram) -> float:
        """Returns the time of a step."""
        if program.mesh not in self._writers:
            self._writers[program.mesh] = _Writer.of(program, self.hardware)
        steps = self._writers[program.mesh].program(program.block)
        return steps.run().totals.time / PICOSECONDS


def priced_work(
    program: SpmdProgram, hardware: Hardware
) -> list[tuple[Instruction, tuple[Instruction, ...], float, int]]:
    """Returns all work of a program: each instruction, the loops around it, seconds of one run.

    The seconds are such that no share of the work takes less than its share of them.

    The last figure is the bytes that a run moves to and from memory, which takes a least time; 0 of
    products and attention, whose time follows from their sizes. Of the branches of a `cond` it has
    the first. Instructions that cost nothing are left out.
    """
    writer = _Writer.of(program, hardware)
    products = hardware.products if writer.measured is None else "alone"

    def within(block: Block, loops: tuple[Instruction, ...]) -> Iterator:
        work = local_work(block, writer.fused, products)
        scored = scored_before(block.instructions)
        for instruction in block.instructions:
            if instruction.bodies:
                bodies = instruction.bodies[: 1 if instruction.op == "cond" else None]
                for body in bodies:
                    yield from within(body, (*loops, instruction))
            elif instruction in work:
                own = instruction not in scored
                seconds = writer.seconds(instruction, work[instruction], own, least=True)
                if seconds:
                    moves = instruction.op not in _PRICED_BY_SIZES
                    yield instruction, loops, seconds, work[instruction].bytes if moves else 0

    return [*within(program.block, ())]


def sending_seconds(
    hardware: Hardware,
    mesh: Mesh,
    kind: str,
    wire: float,
    axes: Sequence[str],
    least: bool = False,
) -> float:
    """Returns the time of a collective that sends some bytes, by the table of the hardware.

    Args:
        least: whether a bound is wanted (see `Hardware.least_seconds`).
    """
    if least and hardware.torus:
        return hardware.least_seconds(kind, wire, axes, mesh)
    table = costs_of(hardware.name)
    return _sending(hardware, mesh, table and table.on(hardware), kind, wire, axes)


def _sending(
    hardware: Hardware,
    mesh: Mesh,
    costs: Costs | None,
    kind: str,
    sent: float,
    axes: Sequence[str],
) -> float:
    """Returns the time of a collective: by the table on one switch, elsewhere by the links."""
    devices = mesh.extent(axes)
    on_switch = not hardware.torus and not hardware.slow_axes(mesh).intersection(axes)
    if costs is not None and on_switch and devices > 1:
        payload = sent / wire_bytes(kind, 1.0, devices)
        measured = costs.collective(kind, devices, payload)
        if measured is not None:
            return measured
    return hardware.seconds(kind, sent, axes, mesh)


@dataclass
class _Writer:
    """Writes the steps of blocks.

    Attributes:
        fused: whether a compiler fuses elementwise work.
        costs: the table of the hardware; `measured`: its calibration; at most one of them.
        known: what each step stands for, but waits.
        blocks: the steps of the blocks that were written.
        works: the last block with some inputs, its work, and the picoseconds of its instructions.
        times: the picoseconds of instructions, by their work; `by_bytes`: of elementwise work
            without products, by the bytes that it moves.
        collectives: what is sent for each collective.
        estimated: the kinds of work that the table lacks, and what stands for each.
    """

    mesh: Mesh
    hardware: Hardware
    costs: Costs | None
    fused: bool = True
    measured: MeasuredCosts | None = None
    known: dict[Step, Instruction] = field(default_factory=dict)
    blocks: dict[Block, Steps] = field(default_factory=dict)
    works: dict[tuple[Value, ...], _Works] = field(default_factory=dict)
    times: dict[tuple[Instruction, int, int, bool], int] = field(default_factory=dict)
    by_bytes: dict[int, int] = field(default_factory=dict)
    collectives: dict[Instruction, tuple[Sent, ...]] = field(default_factory=dict)
    estimated: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def of(program: SpmdProgram, hardware: Hardware, fused: bool = True) -> _Writer:
        """Returns what writes the steps of a program; see `simulate`."""
        calibration = calibration_of(hardware.name)
        if calibration is not None:
            measured = MeasuredCosts(calibration, program.mesh)
            return _Writer(program.mesh, hardware, None, fused, measured)
        table = costs_of(hardware.name)
        return _Writer(program.mesh, hardware, table and table.on(hardware), fused)

    def program(self, block: Block) -> Steps:
        """Returns the steps of a program: those of its block, after its call."""
        dispatch = 0.0 if self.measured is None else self.measured.dispatch(block)
        if not dispatch:
            return self.steps(block)
        call = Work(_picoseconds(dispatch))
        self.known[call] = Instruction("call", (), ())
        return Steps.of([call, *_BlockWriter(self, block).run()])

    def steps(self, block: Block) -> Steps:
        """Returns the steps of a block."""
        if block not in self.blocks:
            self.blocks[block] = Steps.of(_BlockWriter(self, block).run())
        return self.blocks[block]

    def work(self, block: Block) -> _Works:
        """Returns the work of a block."""
        before = self.works.get(block.inputs)
        if before is not None and works_alike(block, before.block):
            known = replace(before, block=block)
        else:
            products = self.hardware.products if self.measured is None else "alone"
            known = _Works(block, local_work(block, self.fused, products))
        self.works[block.inputs] = known
        return known

    def time(self, instruction: Instruction, work: LocalWork, own: bool = False) -> int:
        """Returns the picoseconds of work; `own`: see `seconds`."""
        if self.measured is None and instruction.op in _AS_ELEMENTWISE and not work.flops:
            # As for most instructions, only the bytes count.
            if work.bytes not in self.by_bytes:
                self.by_bytes[work.bytes] = _picoseconds(self.seconds(instruction, work))
            return self.by_bytes[work.bytes]
        key = instruction, work.flops, work.bytes, own
        if key not in self.times:
            self.times[key] = _picoseconds(self.seconds(instruction, work, own))
        return self.times[key]

    def seconds(
        self, instruction: Instruction, work: LocalWork, own: bool = False, least: bool = False
    ) -> float:
        """Returns the time of work.

        Args:
            own: whether a gradient of attention computes the scores itself.
            least: whether a bound is wanted (see `attention_seconds`).
        """
        if self.measured is not None:
            return self.measured.work(instruction, work)
        if self.costs is not None and instruction.op in PRODUCTS_OF_ATTENTION:
            # Hidden scores, which `peak` counts, cost nothing.
            return attention_seconds(self.costs, instruction, own, least)
        peak, _ = work.seconds(self.hardware, instruction)
        if self.costs is None or not (work.flops or work.bytes):
            return peak
        if instruction.op in ("einsum", *GROUPED):
            return max(peak, self._product(self.costs, instruction))
        moved = self.moved(work.bytes)
        if instruction.op not in _AS_ELEMENTWISE:
            self.estimated[instruction.op] = (
                "work at its peak" if peak > moved else "elementwise work on as many bytes"
            )
        return max(peak, moved)

    def _product(self, costs: Costs, instruction: Instruction) -> float:
        batch, rows, inner, columns = product_sizes(instruction)
        dtype, flops = instruction.inputs[0].dtype, self.hardware.flops
        # Floats of 8 bits are multiplied in bfloat16 where nothing is made for them.
        # So are all grouped products of 8 bits.
        in_bfloat16 = instruction.op in GROUPED or (is_float8(dtype) and not self.hardware.float8)
        width = 2 if in_bfloat16 and dtype.itemsize == 1 else dtype.itemsize
        if flops.get(width) == flops.get(2):
            # A TPU multiplies float32 in bfloat16, and rounds the operands where they are made.
            width = min(width, 2)
        return costs.product(rows, inner, columns, width, batch)

    def stacks(self, instruction: Instruction) -> float:
        """Returns the time in which the stacks of a scan's results are filled with zeros.

        On TPUs they begin uninitialised.
        """
        if instruction.op != "scan" or self.hardware.torus:
            return 0.0
        results = instruction.outputs[parameters_of(instruction, Scan)["carries"] :]
        return self.moved(sum(value.bytes for value in results))

    def moved(self, moved_bytes: float) -> float:
        """Returns the time of elementwise work that moves some bytes to and from memory."""
        if not moved_bytes:
            return 0.0
        if self.measured is not None:
            return self.measured.sharing * self.measured.moved(moved_bytes)
        if self.costs is None:
            return moved_bytes / self.hardware.memory_bandwidth
        return self.costs.moved(ELEMENTWISE, moved_bytes)

    def sent(self, instruction: Instruction) -> tuple[Sent, ...]:
        """Returns what is sent for a collective: chains of transfers, with their times."""
        if instruction not in self.collectives:
            if self.measured is not None:
                chains: tuple[Chain, ...] = (in_one_transfer(instruction, self.mesh),)
            else:
                chains = chains_of(instruction, self.mesh, self.hardware)
            self.collectives[instruction] = tuple(
                Sent(chain, tuple(self._flight(instruction, one) for one in chain.transfers))
                for chain in chains
            )
        return self.collectives[instruction]

    def _flight(self, instruction: Instruction, transfer: Transfer) -> Flight:
        kind, axes, sent = transfer.kind, transfer.axes, transfer.wire_bytes
        if self.measured is not None:
            seconds = self.measured.transfer(instruction)
        else:
            seconds = _sending(self.hardware, self.mesh, self.costs, kind, sent, axes)
        pairs = instruction.params["pairs"] if kind == "permute" else ()
        beside = kind in self.hardware.asynchronous and not transfer.alone
        links = links_of(kind, axes, self.mesh, pairs)
        return Flight(transfer, _picoseconds(seconds), links, beside)

    def events(self, run: Iterable[Moment]) -> tuple[Event, ...]:
        """Returns what moments stand for, without loops that do nothing."""
        return tuple(
            self.event(moment)
            for moment in run
            if moment.inside or not isinstance(moment.step, Repeat | Choose)
        )

    def event(self, moment: Moment) -> Event:
        """Returns what a moment of a run stands for."""
        instruction = self.known[moment.step]
        source = instruction.source
        start, seconds = float(moment.start / PICOSECONDS), float(moment.time / PICOSECONDS)
        exposed, hidden = float(moment.wait / PICOSECONDS), float(moment.hidden / PICOSECONDS)
        name = instruction.op
        event = Event(name, name, name, _place(source), start, seconds, exposed)
        if isinstance(moment.step, Work):
            return replace(event, kind=WORK, product=self._has_product(moment.step))
        if instruction.bodies:
            return replace(
                event,
                product=self._has_product(moment.step),
                count=instruction.runs,
                inside=self.events(moment.inside),
            )
        assert isinstance(moment.step, Start) and isinstance(moment.step.key, Flight)
        flight = moment.step.key
        return replace(
            event,
            source=_place(flight.transfer.source),
            axes=flight.transfer.axes,
            wire_bytes=flight.transfer.wire_bytes,
            asynchronous=flight.beside,
            product=any(map(self._has_product, moment.beside)),
            hidden=hidden,
        )

    def _has_product(self, step: Step) -> bool:
        """Whether work has a product of matrices, by itself or in a loop or a branch."""
        if isinstance(step, Repeat):
            return any(map(self._has_product, step.body.steps))
        if isinstance(step, Choose):
            return any(self._has_product(one) for branch in step.branches for one in branch.steps)
        return isinstance(step, Work) and self.known[step].op in _WITH_PRODUCTS


@dataclass(frozen=True)
class _Works:
    """The work of a block's instructions, and the picoseconds of those that are known."""

    block: Block
    work: Mapping[Instruction, LocalWork]
    times: dict[Instruction, int] = field(default_factory=dict)


class _BlockWriter:
    """Writes the steps of one block.

    Attributes:
        pending: for a value, the transfers that it comes from, also those that were waited for: a
            transfer may stand before this wait.
        ready: for a value, the position among the steps from which on it is there.
        starts: the transfers whose operands are there before the step at a position.
        started: this position of a transfer.
        times, loops: the work of instructions, and the steps of those with bodies, as far as they
            are known.
        scored: the gradients of attention that read scores of an attention in the block.
    """

    def __init__(self, outer: _Writer, block: Block) -> None:
        self.outer = outer
        self.block = block
        known = outer.work(block)
        self.work, self.times = known.work, known.times
        self.scored = scored_before(block.instructions)
        self.loops: dict[Instruction, Step] = {}
        self.steps: list[Step] = []
        self.pending: dict[Value, frozenset[Key]] = {}
        self.ready: dict[Value, int] = {}
        self.starts: dict[int, list[Start]] = {}
        self.started: dict[Key, int] = {}
        self.waited: set[Key] = set()

    def run(self) -> list[Step]:
        for instruction in filled(self.block, self._cost):
            if instruction.is_collective:
                self._transfer(instruction)
            elif instruction.bodies:
                self._arrive(instruction.inputs)
                if time := _picoseconds(self.outer.stacks(instruction)):
                    self._append(Work(time), instruction)
                self._append(self._repeated(instruction), instruction)
                self._is_ready(instruction)
            else:
                self._work(instruction)
        self._arrive(self.block.outputs)
        self._wait(start.key for starts in self.starts.values() for start in starts)
        in_turn = not self.outer.hardware.torus
        return queued(self.steps, self.starts, _duration, in_turn) if self.starts else self.steps

    def _cost(self, instruction: Instruction) -> tuple[int, tuple[Link, ...]]:
        """Returns the picoseconds of an instruction, and its links if it travels beside work."""
        if instruction.is_collective:
            flights = [one for sent in self.outer.sent(instruction) for one in sent.flights]
            links = dict.fromkeys(link for one in flights if one.beside for link in one.links)
            return sum(one.time for one in flights), tuple(links)
        if instruction.bodies:
            return _duration(self._repeated(instruction)), ()
        return self._time(instruction), ()

    def _time(self, instruction: Instruction) -> int:
        """Returns the picoseconds of work."""
        time = self.times.get(instruction)
        if time is None:
            work, own = self.work.get(instruction), instruction not in self.scored
            time = self.times[instruction] = self.outer.time(instruction, work, own) if work else 0
        return time

    def _repeated(self, instruction: Instruction) -> Step:
        if instruction not in self.loops:
            self.loops[instruction] = self._loop(instruction)
        return self.loops[instruction]

    def _work(self, instruction: Instruction) -> None:
        time = self._time(instruction)
        if time:
            self._arrive(instruction.inputs)
            self._append(Work(time), instruction)
            self._is_ready(instruction)
            return
        # It costs nothing: whoever reads its results waits for its operands.
        waits, ready = self._pending(instruction.inputs), self._ready(instruction.inputs)
        for value in instruction.outputs:
            self.pending[value], self.ready[value] = waits, ready

    def _transfer(self, instruction: Instruction) -> None:
        for sent in self.outer.sent(instruction):
            pending, ready = self._pending(sent.chain.inputs), self._ready(sent.chain.inputs)
            for flight in sent.flights:
                ready = self._start(instruction, flight, pending, ready)
                pending = frozenset([flight]) if flight.beside else _NOTHING
            for value in sent.chain.outputs:
                self.pending[value], self.ready[value] = pending, ready

    def _start(
        self, instruction: Instruction, flight: Flight, after: frozenset[Key], ready: int
    ) -> int:
        """Starts a transfer after others, and returns the position at which it has begun."""
        start = Start(flight, flight.time, flight.links, tuple(after))
        self.outer.known[start] = instruction
        if not flight.beside:
            self._wait(after)
            self.steps += [start, Wait(flight)]
            self.waited.add(flight)
            return len(self.steps)
        # It starts behind those that its operands come from.
        ready = max([ready, *(self.started.get(other, 0) for other in after)])
        self.starts.setdefault(ready, []).append(start)
        self.started[flight] = ready
        return ready

    def _loop(self, instruction: Instruction) -> Step:
        bodies = tuple(self.outer.steps(body) for body in instruction.bodies)
        measured = self.outer.measured
        if measured is not None and (copies := _picoseconds(measured.slices(instruction))):
            step = Work(copies)
            self.outer.known[step] = instruction
            bodies = tuple(Steps.of([step, *body.steps]) for body in bodies)
        if instruction.op == "cond":
            return Choose(bodies)
        if len(bodies) == 1:
            return Repeat(bodies[0], instruction.runs)
        return Repeat(Steps.of(step for body in bodies for step in body.steps), instruction.runs)

    def _append(self, step: Step, instruction: Instruction) -> None:
        self.outer.known[step] = instruction
        self.steps.append(step)

    def _pending(self, values: Iterable[Value]) -> frozenset[Key]:
        pending = [keys for value in values if (keys := self.pending.get(value))]
        return pending[0].union(*pending[1:]) if pending else _NOTHING

    def _ready(self, values: Iterable[Value]) -> int:
        return max([self.ready.get(value, 0) for value in values], default=0)

    def _is_ready(self, instruction: Instruction) -> None:
        for value in instruction.outputs:
            self.ready[value] = len(self.steps)

    def _arrive(self, values: Iterable[Value]) -> None:
        """Waits for all transfers that some values need."""
        for value in values:
            if keys := self.pending.get(value):
                self._wait(keys)

    def _wait(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self.waited:
                self.waited.add(key)
                self.steps.append(Wait(key))


def _duration(step: Step) -> int:
    """Returns the picoseconds of work, or of a loop or a branch on idle links."""
    return step.time if isinstance(step, Work) else Steps.of([step]).run().totals.time


def _place(source: Source) -> str:
    """Returns the file and line of a source, as reports name it."""
    return f"{source.file.rsplit('/', 1)[-1]}:{source.line}" if source.line else ""


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)
