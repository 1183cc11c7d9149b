"""Learning-rate schedules: functions from the step (int32, no dims) to a rate (float32, no dims).

They run inside the traced step, on replicated scalars, so they cost no communication. Step 0 is the
first update. After its last step a schedule keeps its last value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias

import meshdsl.ops as ops
from meshdsl.ops.operation import of_trees
from meshdsl.optim.checks import RATE, as_step, is_whole, out_of_range
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.tensor import Tensor

P = ParamSpec("P")
Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""Gives the learning rate of a step: a function from s32[] to f32[]. Step 0 is the first update.

    def halving(step):  # every 1000 steps
        return 1e-3 * 0.5 ** md.floor(md.cast(step, "float32") / 1000)

    optimizer = md.optim.AdamW(halving)

`md.optim.schedules` has the usual ones. A schedule is traced with the step, so it is written in
operations of meshdsl, and Python's `if` cannot ask for the step.
"""


def _schedule(make: Callable[P, Schedule]) -> Callable[P, Schedule]:
    """Marks a function that makes schedules: they take a Python number for the step, too."""

    def prepare(step: Any) -> tuple[Tensor]:
        return (as_step(step),)

    @functools.wraps(make)
    def making(*args: P.args, **kwargs: P.kwargs) -> Schedule:
        made = make(*args, **kwargs)

        def rate(step: Tensor) -> Tensor:
            return made(step)

        rate.__qualname__ = f"schedules.{make.__name__}"
        return of_trees(prepare)(rate)

    return making


@_schedule
def constant(value: float) -> Schedule:
    """Returns `value` at every step.

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.constant(0.5)
        >>> [round(float(rate(step)), 3) for step in (0, 100)]
        [0.5, 0.5]
    """
    _check(value=value)
    return lambda step: ops.full([], value)


@_schedule
def linear(start: float, end: float, steps: int) -> Schedule:
    """Goes from `start` at step 0 to `end` at step `steps` in a straight line.

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.linear(1.0, 0.0, steps=4)
        >>> [round(float(rate(step)), 3) for step in (0, 1, 4, 9)]
        [1.0, 0.75, 0.0, 0.0]
    """
    _check(steps=steps, start=start, end=end)
    return lambda step: start + (end - start) * _fraction(step, steps)


@_schedule
def cosine(start: float, end: float, steps: int) -> Schedule:
    """Goes from `start` to `end` along half a cosine (Loshchilov and Hutter 2017, equation 5).

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.cosine(1.0, 0.0, steps=4)
        >>> [round(float(rate(step)), 3) for step in (0, 1, 2, 4, 9)]
        [1.0, 0.854, 0.5, 0.0, 0.0]
    """
    _check(steps=steps, start=start, end=end)
    return lambda step: (
        end + (start - end) * 0.5 * (1.0 + ops.cos(math.pi * _fraction(step, steps)))
    )


@_schedule
def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """Runs schedules one after another; each counts its steps from its own boundary.

    Args:
        boundaries: the steps at which the second, third, ... schedule begins, ascending.

    Raises:
        ValueError: the boundaries do not ascend, or are not one fewer than the schedules.

    Examples:
        >>> from meshdsl.optim import schedules
        >>> rate = schedules.join([schedules.linear(0.0, 1.0, 2), schedules.constant(0.5)], [4])
        >>> [float(rate(step)) for step in (0, 1, 2, 3, 4)]
        [0.0, 0.5, 1.0, 1.0, 0.5]
    """
    rising = all(map(is_whole, boundaries)) and list(boundaries) == sorted(boundaries)
    problems = [] if schedules else ["there are no schedules to join"]
    if schedules and (len(boundaries) != len(schedules) - 1 or not rising):
        problems.append(
            f"{len(schedules)} schedules need {len(schedules) - 1} rising boundaries, "
            f"got {list(boundaries)}"
        )
    problems += [
        f"schedule {number} is no function of the step: {schedule!r}"
        for number, schedule in enumerate(schedules)
        if not callable(schedule)
    ]
    if problems:
        raise ValueError("; ".join(problems))

    def joined(step: Tensor) -> Tensor:
        rate = schedules[0](step)
        for begins, schedule in zip(boundaries, schedules[1:], strict=True):
            rate = ops.where(step < begins, rate, schedule(step - begins))
        return rate

    return joined


@_schedule
def warmup_constant(peak: float, warmup_steps: int) -> Schedule:
    """Rises linearly from 0 to `peak`, then stays.

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.warmup_constant(1.0, warmup_steps=4)
        >>> [round(float(rate(step)), 3) for step in (0, 2, 4, 9)]
        [0.0, 0.5, 1.0, 1.0]
    """
    _check(warmup_steps=warmup_steps, peak=peak)
    return _warmed_up(peak, warmup_steps, constant(peak))


@_schedule
def warmup_cosine(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Rises linearly from 0 to `peak`, then falls along half a cosine to `end` at `total_steps`.

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.warmup_cosine(1.0, warmup_steps=2, total_steps=6)
        >>> [round(float(rate(step)), 3) for step in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check(warmup_steps=warmup_steps, total_steps=total_steps, peak=peak, end=end)
    return _warmed_up(peak, warmup_steps, cosine(peak, end, total_steps - warmup_steps))


@_schedule
def warmup_linear(peak: float, warmup_steps: int, total_steps: int, end: float = 0.0) -> Schedule:
    """Rises linearly from 0 to `peak`, then falls linearly to `end` at `total_steps`.

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.warmup_linear(1.0, warmup_steps=2, total_steps=6)
        >>> [round(float(rate(step)), 3) for step in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    _check(warmup_steps=warmup_steps, total_steps=total_steps, peak=peak, end=end)
    return _warmed_up(peak, warmup_steps, linear(peak, end, total_steps - warmup_steps))


@_schedule
def warmup_stable_decay(
    peak: float, warmup_steps: int, decay_steps: int, total_steps: int, end: float = 0.0
) -> Schedule:
    """Rises to `peak`, stays, and falls linearly to `end` in the last `decay_steps`.

    Hu et al. 2024, "MiniCPM", section 4.2; the linear fall is that of Haegele et al. 2024,
    "Scaling laws and compute-optimal training beyond fixed training durations".

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.warmup_stable_decay(1.0, 2, decay_steps=2, total_steps=8)
        >>> [round(float(rate(step)), 3) for step in (1, 2, 6, 7, 8)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    _check(
        warmup_steps=warmup_steps,
        decay_steps=decay_steps,
        total_steps=total_steps,
        peak=peak,
        end=end,
    )
    falling = linear(peak, end, decay_steps)
    stable = join([constant(peak), falling], [total_steps - decay_steps - warmup_steps])
    return _warmed_up(peak, warmup_steps, stable)


@_schedule
def warmup_inverse_square_root(peak: float, warmup_steps: int, end: float = 0.0) -> Schedule:
    """Rises linearly from 0 to `peak`, then falls as 1 / sqrt(step), to `end` and no lower.

    Vaswani et al. 2017, section 5.3. Without warm-up it falls from step 1 on.

    Raises:
        ValueError: a rate or a number of steps is out of range; all of them are reported.

    Examples:
        >>> rate = md.optim.schedules.warmup_inverse_square_root(1.0, warmup_steps=4)
        >>> [round(float(rate(step)), 3) for step in (2, 4, 16, 64)]
        [0.5, 1.0, 0.5, 0.25]
    """
    _check(warmup_steps=warmup_steps, peak=peak, end=end)
    begins = max(warmup_steps, 1)

    def falling(step: Tensor) -> Tensor:
        share = ops.cast(step, "float32") * (1.0 / begins)
        return ops.maximum(peak * ops.rsqrt(1.0 + share), end)

    return _warmed_up(peak, warmup_steps, falling)


NAMES = ("cosine", "linear", "wsd", "inverse_square_root", "constant")


def by_name(
    name: str,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    end: float = 0.0,
    decay_steps: int | None = None,
) -> Schedule:
    """Returns the schedule with warm-up of a name out of `NAMES`.

    Args:
        end: the lowest rate after the warm-up; "constant" stays at the peak.
        decay_steps: for how many steps "wsd" (warm-up, stable, decay) falls; by default a tenth.

    Raises:
        ValueError: the name is unknown, or numbers do not fit each other.

    Examples:
        >>> rate = md.optim.schedules.by_name("cosine", 1.0, warmup_steps=2, total_steps=6)
        >>> [round(float(rate(step)), 3) for step in (1, 2, 4, 6)]
        [0.5, 1.0, 0.5, 0.0]
    """
    _check(peak=peak, end=end)
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        raise ValueError(f"unknown schedule {name!r}; choose one of {', '.join(NAMES)}{hint}")
    if end > peak:
        raise ValueError(f"the lowest learning rate, {end}, is above the peak, {peak}")
    if name == "cosine":
        return warmup_cosine(peak, warmup_steps, total_steps, end)
    if name == "linear":
        return warmup_linear(peak, warmup_steps, total_steps, end)
    if name == "wsd":
        decay_steps = max(total_steps // 10, 1) if decay_steps is None else decay_steps
        return warmup_stable_decay(peak, warmup_steps, decay_steps, total_steps, end)
    if name == "inverse_square_root":
        return warmup_inverse_square_root(peak, warmup_steps, end)
    return warmup_constant(peak, warmup_steps)


def _prepared(learning_rate: float | Schedule, step: Any) -> tuple[float | Schedule, Tensor]:
    return learning_rate, as_step(step)


@of_trees(_prepared)
def rate_at(learning_rate: float | Schedule, step: Tensor) -> Tensor:
    """Returns the rate of a number or a schedule at a step.

    Raises:
        ValueError: the number is no rate.

    Examples:
        >>> print(md.optim.schedules.rate_at(0.5, 1))
        f32[] 0.5
        >>> print(md.optim.schedules.rate_at(md.optim.schedules.linear(1.0, 0.0, steps=4), 1))
        f32[] 0.75
    """
    schedule = learning_rate if callable(learning_rate) else constant(learning_rate)
    return schedule(step)


def _warmed_up(peak: float, warmup_steps: int, after: Schedule) -> Schedule:
    if warmup_steps == 0:
        return after
    return join([linear(0.0, peak, warmup_steps), after], [warmup_steps])


def _fraction(step: Tensor, steps: int) -> Tensor:
    """Returns the progress: from 0 at step 0 to 1 at `steps` and later."""
    return ops.minimum(ops.cast(step, "float32") * (1.0 / steps), 1.0)


def _check(
    *,
    steps: int = 1,
    warmup_steps: int = 0,
    decay_steps: int = 0,
    total_steps: int | None = None,
    **rates: float,
) -> None:
    """Raises one ValueError with every rate and number of steps that is out of range."""
    problems = out_of_range({name: (rate, RATE) for name, rate in rates.items()})
    counts = {"steps": steps, "warmup_steps": warmup_steps, "decay_steps": decay_steps}
    if total_steps is not None:
        counts["total_steps"] = total_steps
    fractions = [
        f"{name} must be a whole number, got {count}"
        for name, count in counts.items()
        if not is_whole(count)
    ]
    if fractions:
        raise ValueError("; ".join([*problems, *fractions]))
    if steps < 1:
        problems.append(f"a schedule needs at least 1 step, got {steps}")
    problems += [
        f"{name} must not be negative, got {counts[name]}"
        for name in ("warmup_steps", "decay_steps")
        if counts[name] < 0
    ]
    used = warmup_steps + decay_steps
    if total_steps is not None and used >= total_steps:
        problems.append(
            f"warm-up and decay take {used} steps, which leaves none of total_steps={total_steps}"
        )
    if problems:
        raise ValueError("; ".join(problems))
