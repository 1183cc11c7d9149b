"""Ring attention: blocks of the memory travel from device to device past the queries.

Liu et al. (2023), "Ring attention with blockwise transformers for near-infinite context". What is
to be attended to moves by `permute`, and the next block is on its way while the present one is
computed on. Forwards, results are weighed by the log-sum-exp of their scores as they come (an
online softmax). Backwards, the gradients of a block travel with it: they start at its first stop,
so that they are home after as many moves as the block makes, and are sent in the dtype of what they
are gradients of. Steps that are alike are a `scan`, so programs do not grow with the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import Permute, Scan
from meshdsl.lowering.partition.attention.operands import POSITIONS, Operands, cast
from meshdsl.lowering.partition.attention.schedule import Schedule, Step
from meshdsl.lowering.program import Pairs, Value
from meshdsl.lowering.writing.builder import BOOL, BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape

HIDDEN = -1e30  # the log-sum-exp of a query that sees nothing


@dataclass(frozen=True)
class Kept:
    """What a step computes, and what becomes of it.

    Attributes:
        stay: results that belong to the queries.
        travel: those that belong to the block: its gradients.
    """

    stay: list[Value]
    travel: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Ring:
    """Devices in a circle, and what they attend to at each step.

    Attributes:
        axes: of the mesh, in the order in which they split the memory.
        moving: the names of what travels, in the order in which it is listed.
        compute: writes a step's attention.
        combine: joins what stays of the steps so far and of one more.
        sent: the dtypes in which gradients of blocks travel; none of them forwards.
    """

    axes: tuple[str, ...]
    schedule: Schedule
    moving: tuple[str, ...]
    compute: Callable[[BlockBuilder, Operands], Kept]
    combine: Callable[[BlockBuilder, list[Value], list[Value]], list[Value]]
    sent: tuple[np.dtype, ...] = ()

    def run(self, builder: BlockBuilder, given: Operands) -> Kept:
        """Writes all steps; blocks and their gradients are at home again at the end."""
        blocks = [given.values[name] for name in self.moving]
        passes = [(1, self.schedule.ahead), (-1, self.schedule.behind)]
        under_way = {
            way: self._send(builder, blocks, way, self.schedule.wraps(steps))
            for way, steps in passes
            if steps
        }
        own = self.schedule.own
        kept = self.compute(builder, given.at(own, self._active(builder, own)))
        stay, home = kept.stay, kept.travel
        for way, steps in passes:
            if steps:
                part = _Pass(self, way, steps, given)
                stay, returned = part.run(builder, under_way[way], stay)
                back = self._send(builder, returned, -way * len(steps))
                home = [
                    _add(builder, h, cast(builder, b, h.dtype))
                    for h, b in zip(home, back, strict=True)
                ]
        return Kept(stay, home)

    def _send(
        self, builder: BlockBuilder, values: Sequence[Value], shift: int, wraps: bool = True
    ) -> list[Value]:
        """Writes what moves every value by so many devices."""
        mesh = builder.mesh
        devices = mesh.extent(self.axes)
        pairs = [
            (group[place], group[(place + shift) % devices])
            for group in mesh.groups(*self.axes)
            for place in range(devices)
            if wraps or 0 <= place + shift < devices
        ]
        params: Permute = {
            "axes": self.axes,
            "pairs": Pairs(sorted(pairs)),
            "mesh_axes": mesh.names,
        }
        return [builder.one("permute", (v,), v.shape, v.dtype, v.layout, **params) for v in values]

    def table(self, builder: BlockBuilder, steps: Sequence[Step]) -> Value:
        """Writes which steps this device takes part in: bool[device, ring]."""
        data = np.array([step.active for step in steps]).T
        dims = Shape([Dimension("device", data.shape[0]), Dimension("ring", data.shape[1])])
        whole = builder.one("literal", (), dims, BOOL, TensorLayout(), data=data)
        own = TensorLayout.of({"device": self.axes})
        return builder.one("slice", (whole,), dims, BOOL, own, axes=self.axes, dim="device")

    def _active(self, builder: BlockBuilder, step: Step) -> Value | None:
        if step.active is None:
            return None
        return self.scalar(builder, self.table(builder, [step]))

    def scalar(self, builder: BlockBuilder, value: Value) -> Value:
        varying = TensorLayout().add_partial(self.axes, "varying")
        return builder.one("reshape", (value,), Shape(), value.dtype, varying)


@dataclass(frozen=True)
class _Pass:
    """The steps in which blocks travel in one direction."""

    ring: Ring
    way: int
    steps: tuple[Step, ...]
    given: Operands

    def run(
        self, builder: BlockBuilder, blocks: list[Value], stay: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Writes the steps, given the blocks of the first; returns what stays and what travels."""
        gone: list[Value] = []  # gradients of the blocks
        place = 0
        while place < len(self.steps):
            run = self._alike(place) if gone or not self.ring.sent else 1
            if run > 1:
                steps = self.steps[place : place + run]
                blocks, gone, stay = self._loop(builder, steps, blocks, gone, stay)
            else:
                last = place == len(self.steps) - 1
                step = self.steps[place]
                active = self.ring._active(builder, step)
                blocks, gone, stay = self._step(builder, step, active, blocks, gone, stay, last)
            place += run
        return stay, gone

    def _alike(self, place: int) -> int:
        """Returns how many steps from a place on may be one loop: all but the very last."""
        kind = self.steps[place].alike
        found = takewhile(lambda step: step.alike == kind, self.steps[place:-1])
        return max(1, len(list(found)))

    def _step(
        self,
        builder: BlockBuilder,
        step: Step,
        active: Value | None,
        blocks: list[Value],
        gone: list[Value],
        stay: list[Value],
        last: bool = False,
    ) -> tuple[list[Value], list[Value], list[Value]]:
        ring = self.ring
        following = blocks if last else self.send_on(builder, blocks)
        arrived = ring._send(builder, gone, self.way)
        if step.way == "none":
            return following, arrived, stay
        values = {**self.given.values, **dict(zip(ring.moving, blocks, strict=True))}
        given = Operands(values, self.given.params, self.given.ends)
        if step.way == "positions" and active is None:
            active = seen(builder, given, ring.axes)
        kept = ring.compute(builder, given.at(step, active))
        added = kept.travel
        if arrived:
            wide = [cast(builder, a, k.dtype) for a, k in zip(arrived, added, strict=True)]
            added = [_add(builder, *pair) for pair in zip(wide, added, strict=True)]
        gone = [cast(builder, a, to) for a, to in zip(added, ring.sent, strict=True)]
        return following, gone, ring.combine(builder, stay, kept.stay)

    def send_on(self, builder: BlockBuilder, blocks: list[Value]) -> list[Value]:
        return self.ring._send(builder, blocks, self.way, self.ring.schedule.wraps(self.steps))

    def _loop(
        self,
        builder: BlockBuilder,
        steps: Sequence[Step],
        blocks: list[Value],
        gone: list[Value],
        stay: list[Value],
    ) -> tuple[list[Value], list[Value], list[Value]]:
        """Writes a scan over steps that are alike."""
        inner = BlockBuilder(builder.mesh)
        inner.source = builder.source
        held: dict[Value, Value] = {}

        def inside(value: Value) -> Value:
            if value not in held:
                held[value] = inner.value(value.shape, value.dtype, value.layout)
            return held[value]

        fixed = {n: v for n, v in self.given.values.items() if n not in self.ring.moving}
        consts = dict.fromkeys([*fixed.values(), *self.given.ends])
        given = Operands(
            {name: inside(v) for name, v in fixed.items()},
            self.given.params,
            [inside(v) for v in self.given.ends],
        )
        carried = [*blocks, *gone, *stay]
        starts = [inner.value(v.shape, v.dtype, v.layout) for v in carried]
        first, second = len(blocks), len(blocks) + len(gone)
        active, stacked = None, []
        if steps[0].active is not None:
            stacked = [self.ring.table(builder, steps)]
            one = Shape([stacked[0].shape[0]])
            row = inner.value(one, BOOL, stacked[0].layout)
            active = self.ring.scalar(inner, row)
        turn = _Pass(self.ring, self.way, self.steps, given)
        ends = turn._step(
            inner, steps[0], active, starts[:first], starts[first:second], starts[second:]
        )
        inputs = [*(held[v] for v in consts), *starts, *([row] if stacked else [])]
        params: Scan = {
            "body": inner.finish(inputs, [v for part in ends for v in part]),
            "length": len(steps),
            "dim": "ring",
            "consts": len(consts),
            "carries": len(carried),
            "reverse": False,
        }
        results = [(v.shape, v.dtype, v.layout) for v in carried]
        found = list(builder.add("scan", [*consts, *carried, *stacked], results, params))
        return found[:first], found[first:second], found[second:]


def seen(builder: BlockBuilder, given: Operands, axes: tuple[str, ...]) -> Value:
    """Writes whether `causal` and the window leave a device anything of a block: a scalar."""
    rows, columns = (given.values[name] for name in POSITIONS)

    def most(op: str, value: Value) -> Value:
        held = TensorLayout().add_partial(value.layout.split_axes | {*axes}, "varying")
        over = tuple(value.shape.names)
        return builder.one(op, (value,), Shape(), value.dtype, held, over=over)

    def one(op: str, dtype: np.dtype, *operands: Value) -> Value:
        held = TensorLayout().add_partial(
            {a for v in operands for a in v.layout.partial_axes}, "varying"
        )
        return builder.one(op, operands, Shape(), dtype, held)

    def ahead(later: Value, earlier: Value, by: int) -> Value:
        """Whether the earliest of some positions is at most `by` after the latest of others."""
        ends = most("min", later), most("max", earlier)
        behind = one("subtract", ends[0].dtype, *ends)
        return one("less_equal", BOOL, behind, builder.number(by, behind.dtype))

    window, causal = given.params["window"], given.params["causal"]
    found = [ahead(columns, rows, 0 if causal else window - 1)]
    if window is not None:
        found.append(ahead(rows, columns, window - 1))
    return found[0] if len(found) == 1 else one("logical_and", BOOL, *found)


# Arithmetic.


def _add(builder: BlockBuilder, x: Value, y: Value) -> Value:
    return builder.one("add", (x, y), x.shape, x.dtype, x.layout)


def added(builder: BlockBuilder, so_far: list[Value], more: list[Value]) -> list[Value]:
    """Joins gradients: their sums."""
    return [_add(builder, *pair) for pair in zip(so_far, more, strict=True)]


def merged(builder: BlockBuilder, so_far: list[Value], more: list[Value]) -> list[Value]:
    """Joins results of two parts of a memory, each with the log-sum-exp of its scores."""
    (mixed, sums), (other, of_other) = so_far, more

    def one(op: str, *operands: Value, like: Value) -> Value:
        return builder.one(op, operands, like.shape, like.dtype, like.layout)

    total = one("logaddexp", sums, of_other, like=sums)
    parts = []
    for part, held in ((mixed, sums), (other, of_other)):
        weight = one("exp", one("subtract", held, total, like=sums), like=sums)
        parts.append(one("multiply", part, weight, like=mixed))
    return [one("add", *parts, like=mixed), total]
