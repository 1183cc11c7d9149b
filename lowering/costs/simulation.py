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
from dataclasses import dataclass, field

from meshdsl.layouts.costs import ELEMENTWISE, Costs, costs_of
from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.attention_sizes import SCORES, AttentionSizes
from meshdsl.lowering.costs.roofline import LocalWork, local_work
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
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.program import (
    Block,
    Instruction,
    SpmdProgram,
    Value,
    payload_bytes,
    wire_bytes,
)

# How many products make scores, or their gradients, and how many read them.
_PRODUCTS_OF_ATTENTION = {"attention": (1, 1), "attention_gradient": (2, 3)}
_PASSES_OVER_SCORES = 3  # they are written, and read for their sum and for the next product


def simulate(program: SpmdProgram, hardware: Hardware) -> Schedule:
    """Returns the time of a step: `simulate(f.lower(x), hardware("v5p")).seconds`."""
    costs = costs_of(hardware.name)
    origin = costs.origin if costs is not None else f"the peaks of {hardware.title}"
    written = _Writer(program.mesh, hardware, costs)
    steps = written.steps(program.block)
    events = [written.event(moment) for moment in moments(steps) if moment.step in written.known]
    seconds = steps.run().totals.time / PICOSECONDS
    return Schedule(seconds, tuple(events), {}, timed=True, origin=origin)


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

    def transfer(self, instruction: Instruction, key: Key) -> Start:
        """Returns the start of a collective."""
        axes = axes_of(instruction)
        sent = wire_bytes(
            instruction.op, payload_bytes(instruction, self.mesh), self.mesh.extent(axes)
        )
        seconds = self.hardware.seconds(instruction.op, sent, axes, self.mesh)
        step = Start(key, _picoseconds(seconds), tuple(self._links(instruction, axes)))
        self.known[step] = instruction
        return step

    def _links(self, instruction: Instruction, axes: tuple[str, ...]) -> Iterable[Link]:
        if instruction.op == "permute" and len(axes) == 1:
            stride = self.mesh.extent(self.mesh.names[self.mesh.names.index(axes[0]) + 1 :])
            size = self.mesh.sizes[axes[0]]
            source, target = next(pair for pair in instruction.params["pairs"])
            positions = (target // stride - source // stride) % size
            return [(axes[0], 1 if positions <= size // 2 else -1)]
        return [(axis, direction) for axis in axes for direction in (1, -1)]

    def event(self, moment: Moment) -> Event:
        """Returns what a moment of a run stands for."""
        instruction = self.known[moment.step]
        source = instruction.source
        start, seconds = moment.start / PICOSECONDS, moment.time / PICOSECONDS
        exposed = moment.wait / PICOSECONDS
        place = f"{source.file.rsplit('/', 1)[-1]}:{source.line}" if source.line else ""
        name = instruction.op
        if instruction.bodies:
            inside = tuple(self.event(m) for m in moment.inside if m.step in self.known)
            count = instruction.runs
            return Event(
                name, name, name, place, start, seconds, exposed, count=count, inside=inside
            )
        if not instruction.is_collective:
            product = instruction.op in ("einsum", "convolve")
            return Event(WORK, name, name, place, start, seconds, product=product)
        axes = axes_of(instruction)
        sent = wire_bytes(name, payload_bytes(instruction, self.mesh), self.mesh.extent(axes))
        return Event(
            name,
            name,
            name,
            place,
            start,
            seconds,
            exposed,
            axes,
            sent,
            asynchronous=name in self.hardware.asynchronous,
        )


class _BlockWriter:
    """Writes the steps of one block.

    Attributes:
        pending: for a value, the transfers that it waits for.
        ready: for a value, the position among the steps from which on it is there.
    """

    def __init__(self, outer: _Writer, block: Block) -> None:
        self.outer = outer
        self.block = block
        self.work = local_work(block)
        self.steps: list[Step] = []
        self.pending: dict[Value, frozenset[Key]] = {}
        self.ready: dict[Value, int] = {}
        self.starts: dict[int, list[Start]] = {}
        self.waited: set[Key] = set()

    def run(self) -> list[Step]:
        for instruction in self.block.instructions:
            if instruction.is_collective:
                self._transfer(instruction)
            elif instruction.bodies:
                self._arrive(instruction.inputs)
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
        waits = frozenset().union(*(self._pending(value) for value in instruction.inputs))
        ready = max((self.ready.get(value, 0) for value in instruction.inputs), default=0)
        for value in instruction.outputs:
            self.pending[value], self.ready[value] = waits, ready

    def _transfer(self, instruction: Instruction) -> None:
        key: Key = instruction
        start = self.outer.transfer(instruction, key)
        waits = frozenset().union(*(self._pending(value) for value in instruction.inputs))
        if instruction.op not in self.outer.hardware.asynchronous:
            self._wait(waits)
            self.steps += [start, Wait(key)]
            self.waited.add(key)
            self._is_ready(instruction)
            return
        ready = max((self.ready.get(value, 0) for value in instruction.inputs), default=0)
        after = tuple(key for key in waits if key not in self.waited)
        if after:  # it starts where the last of them has started, at the earliest
            ready = max(
                ready, *(at for at, s in self.starts.items() if {x.key for x in s} & {*after})
            )
        start = self._renewed(start, after)
        self.starts.setdefault(ready, []).append(start)
        for value in instruction.outputs:
            self.pending[value], self.ready[value] = frozenset([key]), ready

    def _renewed(self, start: Start, after: tuple[Key, ...]) -> Start:
        if not after:
            return start
        later = Start(start.key, start.time, start.links, after)
        self.outer.known[later] = self.outer.known.pop(start)
        return later

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

    def _pending(self, value: Value) -> frozenset[Key]:
        return self.pending.get(value, frozenset()) - self.waited

    def _is_ready(self, instruction: Instruction) -> None:
        for value in instruction.outputs:
            self.ready[value] = len(self.steps)

    def _arrive(self, values: Iterable[Value]) -> None:
        """Waits for all transfers that some values need."""
        for value in values:
            self._wait(self._pending(value))

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
