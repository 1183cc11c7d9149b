"""Traffic: an estimate of what the axes of a point send, from programs with a single axis.

For each role that an axis may have, the step is lowered once on a mesh with this axis alone. The
estimate is that each axis of a point sends the same as alone, of tensors that the other axes
divide. It says which points are lowered first; it is no bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshdsl.layouts.hardware import Hardware
from meshdsl.lowering.costs.simulation import sending_seconds
from meshdsl.lowering.program import Block, Instruction, SpmdProgram, payload_bytes, wire_bytes
from meshdsl.search.facts import Facts, Work
from meshdsl.search.space import Point, Structure
from meshdsl.search.splits import Split
from meshdsl.training.microbatches import MICROBATCH

ALONE = 4  # the size of the single axis
_SHARDS = ("all_to_all", "permute")  # they send shards, not the replicated tensor
_EXPOSED = 0.4  # about the share of asynchronous collectives for which devices wait


@dataclass(frozen=True)
class Sent:
    """A collective of a program with a single axis.

    Attributes:
        moved: the tensor that it moves, as work that takes no time, and how often.
        payload: in bytes.
    """

    kind: str
    moved: Work
    payload: int


def sent_by(program: SpmdProgram) -> tuple[Sent, ...]:
    """Returns the collectives of a program, a row for each tensor if one moves several."""
    counts: Counter[tuple] = Counter()
    rows: dict[tuple, Sent] = {}
    for row in _within(program, program.block, ()):
        moved = row.moved
        dims = tuple(sorted(moved.dims.items()))
        key = row.kind, dims, row.payload, moved.stacks, moved.repeated
        counts[key] += moved.runs
        rows[key] = row
    return tuple(
        replace(row, moved=replace(row.moved, runs=counts[key])) for key, row in rows.items()
    )


def _within(program: SpmdProgram, block: Block, loops: tuple[Instruction, ...]) -> Iterator[Sent]:
    for instruction in block.instructions:
        for body in instruction.bodies:
            yield from _within(program, body, (*loops, instruction))
        for part in instruction.parts if instruction.is_collective else ():
            dims = {dim.name: dim.size for dim in part.inputs[0].shape}
            over = [loop.params.get("dim", "") for loop in loops]
            runs = math.prod(loop.runs for loop in loops)
            stacks = frozenset(name for name in over if name and name != MICROBATCH)
            moved = Work(dims, 0.0, runs, 0, stacks, MICROBATCH in over)
            yield Sent(part.op, moved, payload_bytes(part, program.mesh))


class Traffic:
    """Estimates what points send.

    Args:
        lower: lowers the step of a structure with one axis, in the facts' microbatches; None if the
            layout does not fit it.
        stored: whether structures that store the state are lowered, too. Otherwise storing the
            state changes no estimate, and fewer programs are lowered.
    """

    def __init__(
        self,
        facts: Facts,
        hardware: Hardware,
        lower: Callable[[Structure], SpmdProgram | None],
        stored: bool = True,
    ) -> None:
        self.facts, self.hardware, self.lower, self.stored = facts, hardware, lower, stored
        self._alone: dict[Structure, tuple[Sent, ...]] = {}
        self._known: dict[tuple, float] = {}

    def seconds(self, point: Point) -> float:
        """Returns an estimate of how long devices wait for the collectives of a point."""
        structure, total = point.structure, 0.0
        parts = np.array([point.variant.microbatches])
        for number, (role, axis) in enumerate(zip(structure.roles, structure.axes, strict=True)):
            # A pipeline sends one permute per tick, beside its work.
            if role.kind == "stack" or point.sizes[number] == 1:
                continue
            storing = self.stored and axis in structure.storing[0]
            storage = structure.storage if storing else ""
            alone = Structure((role,), (role.name,), storage, structure.stored if storage else ())
            others = np.array([[1 if i == number else n for i, n in enumerate(point.sizes)]])
            split = Split(self.facts, structure, others, parts)
            send = partial(sending_seconds, self.hardware, point.mesh, axes=[axis])
            size = point.sizes[number]
            total += sum(self._time(row, split, size, send) for row in self._sent(alone))
        return total

    def _sent(self, alone: Structure) -> tuple[Sent, ...]:
        if alone not in self._alone:
            program = self.lower(alone)
            self._alone[alone] = () if program is None else sent_by(program)
        return self._alone[alone]

    def _time(self, sent: Sent, split: Split, size: int, send: Callable[..., float]) -> float:
        row = sent.moved
        share = float(split.share(row.dims)[0] * split.parts(row.dims)[0])
        runs = float(split.work(row)[0]) / share * row.runs
        payload = sent.payload * share * (ALONE / size if sent.kind in _SHARDS else 1.0)
        seconds = runs * send(kind=sent.kind, wire=wire_bytes(sent.kind, payload, size))
        return seconds * (_EXPOSED if sent.kind in self.hardware.asynchronous else 1.0)
