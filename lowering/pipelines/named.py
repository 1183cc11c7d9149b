"""Named: the built-in schedules by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from meshdsl.lowering.pipelines.circular import Circular
from meshdsl.lowering.pipelines.interleaved import interleaved
from meshdsl.lowering.pipelines.one_chunk import gpipe, one_forward_one_backward
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.lowering.pipelines.zero_bubble import zb_h1, zbv


def _circular(stages: int, microbatches: int, rounds: int) -> Schedule:
    return Circular(stages, rounds, microbatches).schedule()


# The first schedules have any number of rounds. Each of the others has a fixed number of rounds.
WITH_ROUNDS: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "circular": _circular,
}
OF_ROUNDS: dict[str, tuple[int, Callable[[int, int], Schedule]]] = {
    "gpipe": (1, gpipe),
    "1f1b": (1, one_forward_one_backward),
    "zb-h1": (1, zb_h1),
    "zbv": (2, zbv),
}
NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "circular")
ROUNDS = 2  # of an interleaved schedule, which with one round is `1f1b`


def named(name: str, stages: int, microbatches: int, rounds: int | None = None) -> Schedule:
    """Returns a built-in schedule.

    named("interleaved", stages=4, microbatches=32, rounds=2)

    Args:
        name: one of `NAMES`.
        stages: the size of the mesh axis.
        microbatches: the number of microbatches of the batch.
        rounds: the number of chunks of a stage. With None, it is 2 for the schedules of
            `WITH_ROUNDS`. `zbv` has 2 rounds, and all others have 1.

    Raises:
        ValueError: There is no schedule of this name, the schedule cannot have this number of
            rounds, or a number is not positive.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"Did you mean `{near[0]}`? " if near else ""
        raise ValueError(
            f"there is no pipeline schedule `{name}`. {hint}The built-in ones are "
            f"{', '.join(NAMES)}; others are CSV files"
        )
    given = {"stages": stages, "microbatches": microbatches, "rounds": rounds}
    for key, value in given.items():
        if value is not None and value < 1:
            raise ValueError(f"{key}={value} of pipeline schedule `{name}`: give 1 or more")
    if name in WITH_ROUNDS:
        return WITH_ROUNDS[name](stages, microbatches, rounds or ROUNDS)
    own, make = OF_ROUNDS[name]
    if rounds not in (None, own):
        raise ValueError(
            f"pipeline schedule `{name}` has {own} chunk{'s' * (own > 1)} per stage, not {rounds}: "
            f"omit the rounds, or use one of {', '.join(WITH_ROUNDS)}"
        )
    return make(stages, microbatches)
