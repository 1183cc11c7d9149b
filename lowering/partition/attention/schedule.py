"""Schedules of ring attention: which block of the memory a device attends to at which step.

The queries of a device stay. Blocks of the memory move past them, one device further in every step:
at the step of shift j, device i has the block of device i - j. The positions that are known before
the program runs decide which blocks are hidden from which devices. Hidden blocks are not computed
on, and blocks that no device needs are not sent. A block that every active device sees in full
needs no mask. A block at the same distance on all devices needs no positions, so fused kernels fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np

from meshdsl.lowering.communication.exchange import Interval

# What is masked in a block: nothing (`all`); what `causal` and the window hide at a known distance
# (`shifted`), or by positions given as operands (`positions`). `none`: no device sees any of it.
Way = Literal["all", "shifted", "positions", "none"]


class Step(NamedTuple):
    """What devices attend to after `shift` moves: forwards, or backwards if it is negative.

    Attributes:
        offset: of the first query's position from the block's first, where the way is `shifted`.
        active: which devices see something; None: all of them, or as the positions decide.
    """

    shift: int
    way: Way
    offset: int = 0
    active: tuple[bool, ...] | None = None

    @property
    def alike(self) -> tuple[Way, int, bool]:
        """The key that all steps of one loop share."""
        return self.way, self.offset, self.active is None


@dataclass(frozen=True)
class Sight:
    """What is known of the positions that each device attends to.

    Attributes:
        columns: the positions of each device's block of the memory, without pads.
        block: the number of positions of a block, with pads.
        rows: the positions of each device's queries, without pads; None: known only at run time.
    """

    causal: bool
    window: int | None
    columns: tuple[Interval, ...]
    block: int
    rows: tuple[Interval, ...] | None = None

    @property
    def masked(self) -> bool:
        """Whether positions hide anything."""
        return self.causal or self.window is not None


@dataclass(frozen=True)
class Schedule:
    """The steps of a ring.

    Attributes:
        own: the step at which every device has its own block.
        ahead: the steps of blocks that move forwards: shifts 1, 2, ...
        behind: the steps of blocks that move backwards: shifts -1, -2, ...
        pads: whether some device would see pads of the memory.
        circular: whether every device needs every block.
    """

    own: Step
    ahead: tuple[Step, ...]
    behind: tuple[Step, ...]
    pads: bool
    circular: bool = False

    @property
    def hops(self) -> int:
        """How many times a device sends a block, its own or another's."""
        return len(self.ahead) + len(self.behind)

    @property
    def steps(self) -> tuple[Step, ...]:
        return (self.own, *self.ahead, *self.behind)

    @property
    def by_positions(self) -> bool:
        """Whether some step needs the positions of queries and memory."""
        return any(step.way == "positions" for step in self.steps)

    def wraps(self, steps: Sequence[Step]) -> bool:
        """Whether a block that a device needs moves from the last device to the first, or back."""
        return self.circular or any(
            on and not 0 <= device - step.shift < len(step.active or ())
            for step in steps
            if step.way != "none"
            for device, on in enumerate(step.active or [True])
        )


@lru_cache(maxsize=1 << 10)
def schedule(sight: Sight) -> Schedule:
    """Returns the steps that send the fewest blocks; forwards if both directions send as many."""
    devices = len(sight.columns)
    seen = [_step(sight, shift) for shift in range(devices)]
    steps = [step for step, _ in seen]
    needed = [shift for shift in range(1, devices) if steps[shift].way != "none"]
    gaps = pairwise([0, *needed, devices])
    last, first = max(gaps, key=lambda gap: (gap[1] - gap[0], gap[1]))
    behind = [steps[shift]._replace(shift=shift - devices) for shift in range(first, devices)]
    own = steps[0]
    if own.way == "none":
        own = Step(0, "all", active=(False,) * devices)
    used = [0, *range(1, last + 1), *range(first, devices)]
    pads = any(seen[shift][1] for shift in used)
    return Schedule(own, tuple(steps[1 : last + 1]), tuple(reversed(behind)), pads)


def _step(sight: Sight, shift: int) -> tuple[Step, bool]:
    """Returns the step of a shift, and whether some device would see pads in it."""
    start, stop = (np.roll(bound, shift) for bound in _bounds(sight.columns))
    padded = stop - start < sight.block
    if sight.rows is None:
        if sight.masked:
            return Step(shift, "positions"), bool(padded.any())
        active = start < stop
        return _made(shift, "all", 0, active), bool((active & padded).any())
    low, high = _bounds(sight.rows)
    active, full = (start < stop) & (low < high), np.ones(len(low), bool)
    if sight.causal:
        active &= start < high
        full &= stop - 1 <= low
    if sight.window is not None:
        active &= low - stop + 1 < sight.window
        full &= high - 1 - start < sight.window
        if not sight.causal:
            active &= start - high + 1 < sight.window
            full &= stop - 1 - low < sight.window
    offsets = set((low - start)[active].tolist())
    hidden = np.zeros_like(padded) if not sight.causal else high <= stop
    if not active.any():
        return Step(shift, "none"), False
    if full[active].all():
        return _made(shift, "all", 0, active), bool((active & padded).any())
    way: Way = "shifted" if len(offsets) == 1 else "positions"
    offset = offsets.pop() if len(offsets) == 1 else 0
    return _made(shift, way, offset, active), bool((active & padded & ~hidden).any())


def _bounds(intervals: Sequence[Interval]) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(intervals, np.int64).reshape(-1, 2).T)  # type: ignore[return-value]


def _made(shift: int, way: Way, offset: int, active: np.ndarray) -> Step:
    if active.all():
        return Step(shift, way, offset)
    return Step(shift, way, offset, tuple(active.tolist()))
