"""Ring attention: blocks of the memory travel from device to device past the queries.

Liu et al. (2023), "Ring attention with blockwise transformers for near-infinite context". Blocks
move by `permute`, and the next block moves while the present one is computed on. In the forward
pass, results are combined one by one, weighed by the log-sum-exp of their scores (an online
softmax). In the backward pass, the gradients of a block travel with it, in the dtype in which
partial sums are added up. They start at its first stop, so they are home after as many moves as the
block makes. Equal steps become a `scan`, so the program does not grow with the number of devices.
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
class Computed:
    """The results of a step.

    Attributes:
        stay: results that belong to the queries.
        travel: the gradients of the block, which travel with it.
    """

    stay: list[Value]
    travel: list[Value] = field(default_factory=list)


@dataclass(frozen=True)
class Ring:
    """Devices in a ring, and what they attend to at each step.

    Attributes:
        axes: of the mesh, in the order in which they split the memory.
        moving: the names of the operands that travel, in the order of a block's values.
        compute: writes a step's attention.
        combine: combines the results that stay, of the steps so far and of one more.
        sent: the dtypes in which gradients of blocks travel; empty in the forward pass.
    """

    axes: tuple[str, ...]
    schedule: Schedule
    moving: tuple[str, ...]
    compute: Callable[[BlockBuilder, Operands], Computed]
    combine: Callable[[BlockBuilder, list[Value], list[Value]], list[Value]]
    sent: tuple[np.dtype, ...] = ()

    def run(self, builder: BlockBuilder, operands: Operands) -> Computed:
        """Writes all steps; blocks and their gradients return to their device at the end."""
        blocks = [operands.values[name] for name in self.moving]
        passes = [(1, self.schedule.ahead), (-1, self.schedule.behind)]
        under_way = {
            way: self._send(builder, blocks, way, self.schedule.wraps(steps))
            for way, steps in passes
            if steps
        }
        own = self.schedule.own
        own_block = self.compute(builder, operands.at(own, self._active(builder, own)))
        stay, home = own_block.stay, own_block.travel
        for way, steps in passes:
            if steps:
                part = _Pass(self, way, steps, operands)
                stay, returned = part.run(builder, under_way[way], stay)
                back = self._send(builder, returned, -way * len(steps))
                home = [
                    _add(builder, h, cast(builder, b, h.dtype))
                    for h, b in zip(home, back, strict=True)
                ]
        return Computed(stay, home)

    def _send(
        self, builder: BlockBuilder, values: Sequence[Value], shift: int, wraps: bool = True
    ) -> list[Value]:
        """Writes the permutes that move every value by `shift` devices."""
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
        literal = builder.one("literal", (), dims, BOOL, TensorLayout(), data=data)
        own = TensorLayout.of({"device": self.axes})
        return builder.one("slice", (literal,), dims, BOOL, own, axes=self.axes, dim="device")

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
    operands: Operands

    def run(
        self, builder: BlockBuilder, blocks: list[Value], stay: list[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Writes the steps; returns the results that stay and the gradients that travel.

        Args:
            blocks: those of the first step.
            stay: the results of the steps so far.
        """
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
        """Returns how many steps from `place` on may be one loop; the last step never is."""
        kind = self.steps[place].alike
        alike = takewhile(lambda step: step.alike == kind, self.steps[place:-1])
        return max(1, len(list(alike)))

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
        values = {**self.operands.values, **dict(zip(ring.moving, blocks, strict=True))}
        operands = Operands(values, self.operands.params, self.operands.gradient_inputs)
        if step.way == "positions" and active is None:
            active = seen(builder, operands, ring.axes)
        computed = ring.compute(builder, operands.at(step, active))
        added = computed.travel
        if arrived:
            wide = [cast(builder, a, k.dtype) for a, k in zip(arrived, added, strict=True)]
            added = [_add(builder, *pair) for pair in zip(wide, added, strict=True)]
        gone = [cast(builder, a, to) for a, to in zip(added, ring.sent, strict=True)]
        return following, gone, ring.combine(builder, stay, computed.stay)

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
        inner_of: dict[Value, Value] = {}

        def inside(value: Value) -> Value:
            if value not in inner_of:
                inner_of[value] = inner.value(value.shape, value.dtype, value.layout)
            return inner_of[value]

        fixed = {n: v for n, v in self.operands.values.items() if n not in self.ring.moving}
        consts = dict.fromkeys([*fixed.values(), *self.operands.gradient_inputs])
        operands = Operands(
            {name: inside(v) for name, v in fixed.items()},
            self.operands.params,
            [inside(v) for v in self.operands.gradient_inputs],
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
        turn = _Pass(self.ring, self.way, self.steps, operands)
        after = turn._step(
            inner, steps[0], active, starts[:first], starts[first:second], starts[second:]
        )
        inputs = [*(inner_of[v] for v in consts), *starts, *([row] if stacked else [])]
        params: Scan = {
            "body": inner.finish(inputs, [v for part in after for v in part]),
            "length": len(steps),
            "dim": "ring",
            "consts": len(consts),
            "carries": len(carried),
            "reverse": False,
        }
        results = [(v.shape, v.dtype, v.layout) for v in carried]
        results_of_scan = list(builder.add("scan", [*consts, *carried, *stacked], results, params))
        return results_of_scan[:first], results_of_scan[first:second], results_of_scan[second:]


def seen(builder: BlockBuilder, operands: Operands, axes: tuple[str, ...]) -> Value:
    """Writes whether `causal` and the window let a device attend to some of a block: a scalar."""
    rows, columns = (operands.values[name] for name in POSITIONS)

    def most(op: str, value: Value) -> Value:
        varying = TensorLayout().add_partial(value.layout.split_axes | {*axes}, "varying")
        over = tuple(value.shape.names)
        return builder.one(op, (value,), Shape(), value.dtype, varying, over=over)

    def one(op: str, dtype: np.dtype, *values: Value) -> Value:
        varying = TensorLayout().add_partial(
            {a for v in values for a in v.layout.partial_axes}, "varying"
        )
        return builder.one(op, values, Shape(), dtype, varying)

    def ahead(later: Value, earlier: Value, by: int) -> Value:
        """Whether the earliest of some positions is at most `by` after the latest of others."""
        extremes = most("min", later), most("max", earlier)
        behind = one("subtract", extremes[0].dtype, *extremes)
        return one("less_equal", BOOL, behind, builder.number(by, behind.dtype))

    window, causal = operands.params["window"], operands.params["causal"]
    reached = [ahead(columns, rows, 0 if causal else window - 1)]
    if window is not None:
        reached.append(ahead(rows, columns, window - 1))
    return reached[0] if len(reached) == 1 else one("logical_and", BOOL, *reached)


# Arithmetic.


def _add(builder: BlockBuilder, x: Value, y: Value) -> Value:
    return builder.one("add", (x, y), x.shape, x.dtype, x.layout)


def added(builder: BlockBuilder, so_far: list[Value], more: list[Value]) -> list[Value]:
    """Combines gradients: their sums."""
    return [_add(builder, *pair) for pair in zip(so_far, more, strict=True)]


def merged(builder: BlockBuilder, so_far: list[Value], more: list[Value]) -> list[Value]:
    """Combines the results of two parts of a memory, each with the log-sum-exp of its scores."""
    (mixed, sums), (other, of_other) = so_far, more

    def one(op: str, *operands: Value, like: Value) -> Value:
        return builder.one(op, operands, like.shape, like.dtype, like.layout)

    total = one("logaddexp", sums, of_other, like=sums)
    parts = []
    for part, scores in ((mixed, sums), (other, of_other)):
        weight = one("exp", one("subtract", scores, total, like=sums), like=sums)
        parts.append(one("multiply", part, weight, like=mixed))
    return [one("add", *parts, like=mixed), total]
