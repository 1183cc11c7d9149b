"""Simulation: the time of a program's step on some hardware, before any compiler.

Every instruction is work of the device, a transfer, or a loop, in the steps of `lowering.costs.
streams`. What work costs comes from the table of the hardware (`layouts.costs`), or from its peaks
where there is none; what a transfer costs, from its links.

* A transfer that the hardware's compiler writes as asynchronous (`Hardware.asynchronous`) starts
  where its operands are ready, and the device waits for it where it is first read. All other ones
  make the device wait at once.
* Instructions that cost nothing, such as views and fused elementwise work, hand their operands on
  to their readers.

`simulate` gives the same `Schedule` as `lowering.backends.hlo.schedule` reads off a compiler's
schedule, so that one can be held against the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from meshdsl.layouts.costs import ELEMENTWISE, Costs, costs_of
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.attention_sizes import SCORES, AttentionSizes
from meshdsl.lowering.costs.links import links_of
from meshdsl.lowering.costs.roofline import LocalWork, local_work
from meshdsl.lowering.costs.schedule import WORK, Event, Schedule
from meshdsl.lowering.costs.streams import (
    PICOSECONDS,
    Choose,
    Key,
    Moment,
    Repeat,
    Start,
    Step,
    Steps,
    Wait,
    Work,
    moments,
)
from meshdsl.lowering.parameters import Scan, axes_of, parameters_of
from meshdsl.lowering.program import (
    Block,
    Instruction,
    SpmdProgram,
    Value,
    wire_of,
)

# How many products make scores, or their gradients, and how many read them.
_PRODUCTS_OF_ATTENTION = {"attention": (1, 1), "attention_gradient": (2, 3)}
_WITH_PRODUCTS = ("einsum", "convolve", *_PRODUCTS_OF_ATTENTION)
_PASSES_OVER_SCORES = 3  # they are written, and read for their sum and for the next product


def simulate(program: SpmdProgram, hardware: Hardware) -> Schedule:
    """Returns the time of a step: `simulate(f.lower(x), hardware("v5p")).seconds`."""
    costs = costs_of(hardware.name)
    origin = costs.origin if costs is not None else f"the peaks of {hardware.title}"
    written = _Writer(program.mesh, hardware, costs)
    steps = written.steps(program.block)
    events = written.events(moments(steps))
    seconds = steps.run().totals.time / PICOSECONDS
    return Schedule(seconds, events, {}, timed=True, origin=origin)


@dataclass
class _Writer:
    """Writes the steps of blocks.

    Attributes:
        known: what each step stands for, but waits.
    """

    mesh: Mesh
    hardware: Hardware
    costs: Costs | None
    known: dict[Step, Instruction] = field(default_factory=dict)

    def steps(self, block: Block) -> Steps:
        """Returns the steps of a block."""
        return Steps.of(_BlockWriter(self, block).run())

    def seconds(self, instruction: Instruction, work: LocalWork) -> float:
        """Returns the time of work."""
        peak, _ = work.seconds(self.hardware, instruction)
        if self.costs is None or not (work.flops or work.bytes):
            return peak
        if instruction.op == "einsum":
            return max(peak, self._product(self.costs, instruction))
        if instruction.op in _PRODUCTS_OF_ATTENTION:
            return max(peak, self._attention(self.costs, instruction))
        moved = self.costs.moved(ELEMENTWISE, work.bytes) if work.bytes else 0.0
        return max(peak, moved)

    def _product(self, costs: Costs, instruction: Instruction) -> float:
        batch, rows, inner, columns = product_sizes(instruction)
        # A TPU multiplies float32 in bfloat16, and rounds the operands where they are made.
        width = min(instruction.inputs[0].dtype.itemsize, 2)
        return costs.product(rows, inner, columns, width, batch)

    def stacks(self, instruction: Instruction) -> float:
        """Returns the time in which the stacks of a scan's results are filled with zeros."""
        if instruction.op != "scan" or self.costs is None:
            return 0.0
        results = instruction.outputs[parameters_of(instruction, Scan)["carries"] :]
        moved = sum(value.bytes for value in results)
        return self.costs.moved(ELEMENTWISE, moved) if moved else 0.0

    def _attention(self, costs: Costs, instruction: Instruction) -> float:
        """Returns the time of attention: its products, and its scores where they reach memory."""
        sizes = AttentionSizes.of(instruction)
        width = instruction.inputs[0].dtype.itemsize
        rows, columns = sizes.blocks
        count, features = sizes.scores / (rows * columns), sizes.features.size
        into_scores = costs.product(rows, features, columns, width, count)
        from_scores = costs.product(rows, columns, features, width, count)
        of_scores, of_features = _PRODUCTS_OF_ATTENTION[instruction.op]
        if not sizes.at_once:
            return of_scores * into_scores + of_features * from_scores
        # All scores reach memory. The gradient reads those of the forward pass.
        moved = _PASSES_OVER_SCORES * sizes.scores * SCORES.itemsize
        return into_scores + of_features * from_scores + costs.moved(ELEMENTWISE, moved)

    def transfer(self, instruction: Instruction, after: Iterable[Key]) -> Start:
        """Returns the start of a collective, which begins after some others have arrived."""
        axes = axes_of(instruction)
        sent = wire_of(instruction, self.mesh)
        seconds = self.hardware.seconds(instruction.op, sent, axes, self.mesh)
        pairs = instruction.params["pairs"] if instruction.op == "permute" else ()
        links = links_of(instruction.op, axes, self.mesh, pairs)
        step = Start(instruction, _picoseconds(seconds), links, tuple(after))
        self.known[step] = instruction
        return step

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
        place = f"{source.file.rsplit('/', 1)[-1]}:{source.line}" if source.line else ""
        name = instruction.op
        event = Event(name, name, name, place, start, seconds, exposed)
        if isinstance(moment.step, Work):
            return replace(event, kind=WORK, product=self._has_product(moment.step))
        if instruction.bodies:
            return replace(
                event,
                product=self._has_product(moment.step),
                count=instruction.runs,
                inside=self.events(moment.inside),
            )
        return replace(
            event,
            axes=axes_of(instruction),
            wire_bytes=wire_of(instruction, self.mesh),
            asynchronous=name in self.hardware.asynchronous,
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


class _BlockWriter:
    """Writes the steps of one block.

    Attributes:
        pending: for a value, the transfers that it comes from, also those that were waited for: a
            transfer may stand before this wait.
        ready: for a value, the position among the steps from which on it is there.
        starts: the transfers that start before the step at a position.
        started: the position of the start of a transfer.
    """

    def __init__(self, outer: _Writer, block: Block) -> None:
        self.outer = outer
        self.block = block
        self.work = local_work(block)
        self.steps: list[Step] = []
        self.pending: dict[Value, frozenset[Key]] = {}
        self.ready: dict[Value, int] = {}
        self.starts: dict[int, list[Start]] = {}
        self.started: dict[Key, int] = {}
        self.waited: set[Key] = set()

    def run(self) -> list[Step]:
        for instruction in self.block.instructions:
            if instruction.is_collective:
                self._transfer(instruction)
            elif instruction.bodies:
                self._arrive(instruction.inputs)
                if time := _picoseconds(self.outer.stacks(instruction)):
                    self._append(Work(time), instruction)
                self._append(self._loop(instruction), instruction)
                self._is_ready(instruction)
            else:
                self._work(instruction)
        self._arrive(self.block.outputs)
        self._wait(start.key for starts in self.starts.values() for start in starts)
        steps: list[Step] = []
        for at, step in enumerate([*self.steps, None]):
            steps += self.starts.get(at, ())
            if step is not None:
                steps.append(step)
        return steps

    def _work(self, instruction: Instruction) -> None:
        work = self.work.get(instruction)
        time = _picoseconds(self.outer.seconds(instruction, work)) if work else 0
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
        key: Key = instruction
        after = self._pending(instruction.inputs)
        start = self.outer.transfer(instruction, after)
        if instruction.op not in self.outer.hardware.asynchronous:
            self._wait(after)
            self.steps += [start, Wait(key)]
            self.waited.add(key)
            self._is_ready(instruction)
            return
        # It starts behind those that its operands come from.
        starts = (self.started.get(other, 0) for other in after)
        ready = max([self._ready(instruction.inputs), *starts])
        self.starts.setdefault(ready, []).append(start)
        self.started[key] = ready
        for value in instruction.outputs:
            self.pending[value], self.ready[value] = frozenset([key]), ready

    def _loop(self, instruction: Instruction) -> Step:
        bodies = tuple(self.outer.steps(body) for body in instruction.bodies)
        if instruction.op == "cond":
            return Choose(bodies)
        if len(bodies) == 1:
            return Repeat(bodies[0], instruction.runs)
        return Repeat(Steps.of(step for body in bodies for step in body.steps), instruction.runs)

    def _append(self, step: Step, instruction: Instruction) -> None:
        self.outer.known[step] = instruction
        self.steps.append(step)

    def _pending(self, values: Iterable[Value]) -> frozenset[Key]:
        return frozenset().union(*(self.pending.get(value, ()) for value in values))

    def _ready(self, values: Iterable[Value]) -> int:
        return max((self.ready.get(value, 0) for value in values), default=0)

    def _is_ready(self, instruction: Instruction) -> None:
        for value in instruction.outputs:
            self.ready[value] = len(self.steps)

    def _arrive(self, values: Iterable[Value]) -> None:
        """Waits for all transfers that some values need."""
        for value in values:
            self._wait(self.pending.get(value, ()))

    def _wait(self, keys: Iterable[Key]) -> None:
        for key in keys:
            if key not in self.waited:
                self.waited.add(key)
                self.steps.append(Wait(key))


def product_sizes(instruction: Instruction) -> tuple[int, int, int, int]:
    """Returns batch, rows, inner and columns of the product that an einsum is on one device."""
    first, *others = (value.local for value in instruction.inputs)
    second = others[0] if others else first
    result = instruction.outputs[0].local
    sizes: Mapping[str, int] = {d.name: d.size for shape in (first, second) for d in shape}
    batch = rows = inner = columns = 1
    for name, size in sizes.items():
        kept, left, right = name in result.names, name in first.names, name in second.names
        if left and right:
            batch, inner = (batch * size, inner) if kept else (batch, inner * size)
        elif left:
            rows *= size
        else:
            columns *= size
    return batch, rows, inner, columns


def _picoseconds(seconds: float) -> int:
    return round(seconds * PICOSECONDS)
