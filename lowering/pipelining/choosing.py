"""Choosing: the schedule of a pipeline, where the options leave it open.

Of the programs that fit into memory, it is that of the least simulated time. These are tried:

| way | what it changes |
|---|---|
| `circular` of one round | |
| of two, of four rounds | a smaller bubble, fewer activations; more is sent, and chunks are dealt |
| `zbv` | two rounds that turn around: the activations of `1f1b` in about the time of `circular` |
| | of one round, and four times its sends: only if no way before fits |
| `1f1b` | as few activations, more ticks, one round: likewise |

No other built-in schedule is: on ticks that stages share, each takes as many as `circular`, or
more. `zb-h1` and `zbv` compute gradients of inputs and of weights in one tick: apart, each of them
would compute the activations again.

Where the hardware is not known, only the memory is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from meshdsl.layouts.hardware import Hardware
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelines.named import ROUNDS
from meshdsl.lowering.pipelines.running import RunningPipeline
from meshdsl.lowering.program import Alternative, Decision, SpmdProgram

_ROUNDS = (2, 4)
_GAIN = 0.01  # rounds that gain less are not worth a larger program
_BUBBLE = 0.02  # of less than that, there is nothing to gain


def least_bubble(options: Options) -> float:
    """Returns the least share of a round's bubble that a pipeline waits, where time decides."""
    if options.pipeline == "auto":
        return 1 / (options.pipeline_rounds or max(_ROUNDS))
    if options.pipeline == "circular":
        return 1 / (options.pipeline_rounds or ROUNDS)
    return 1.0 if options.pipeline in ("gpipe", "1f1b") else 0.0


@dataclass(frozen=True)
class _Way:
    """A way to write the pipeline."""

    options: Options
    program: SpmdProgram
    alternative: Alternative


def choose_pipeline(
    lower: Callable[[Options], SpmdProgram],
    first: SpmdProgram,
    options: Options,
    hardware: Hardware | None,
) -> tuple[Options, Decision | None]:
    """Returns the options of the schedule to take, and what was decided by its time.

    Args:
        lower: returns the program by some options.
        first: the program of the usual schedule, of one round.
        hardware: None: its times are not known.
    """
    room = options.memory
    if room is None and hardware is not None:
        room = hardware.memory_bytes

    def way(name: str, program: SpmdProgram, **changes: str | int) -> _Way:
        seconds = 0.0
        if hardware is not None:
            from meshdsl.lowering.costs.simulation import step_seconds

            seconds = step_seconds(program, hardware)
        chosen = replace(options, **changes)  # type: ignore[arg-type]
        return _Way(chosen, program, Alternative(name, seconds, program.peak_bytes))

    def fits(way: _Way) -> bool:
        return room is None or way.program.peak_bytes <= room

    ways = [way("1 round", first, pipeline="circular", pipeline_rounds=1)]
    assert first.pipeline is not None
    for rounds in _rounds(first.pipeline) if hardware is not None else ():
        changed = replace(options, pipeline="circular", pipeline_rounds=rounds)
        ways.append(way(f"{rounds} rounds", lower(changed), pipeline_rounds=rounds))
        if not _faster(ways[-1], ways[-2]):
            break
    if not any(map(fits, ways)):
        for name, rounds in [("zbv", 2), ("1f1b", 1)]:
            if first.pipeline.fits(rounds):
                program = lower(replace(options, pipeline=name, pipeline_rounds=rounds))
                ways.append(way(name, program, pipeline=name, pipeline_rounds=rounds))
    best = _best([w for w in ways if fits(w)]) or min(ways, key=lambda w: w.program.peak_bytes)
    rest = [w for w in ways if w is not best]
    other = _best([w for w in rest if fits(w)]) or _best(rest)
    if other is None:
        return best.options, None
    decision = Decision("pipeline", best.alternative, other.alternative, fits(other))
    return best.options, decision if hardware is not None else None


def _rounds(pipeline: RunningPipeline) -> list[int]:
    """Returns the numbers of rounds to try: those that fill no chunk up any further."""
    if pipeline.bubble < _BUBBLE:
        return []
    return [rounds for rounds in _ROUNDS if pipeline.fits(rounds)]


def _best(ways: list[_Way]) -> _Way | None:
    """Returns the fastest way; an earlier one, if that is hardly slower."""
    best = None
    for way in ways:
        if best is None or _faster(way, best):
            best = way
    return best


def _faster(way: _Way, than: _Way) -> bool:
    return way.alternative.seconds < (1 - _GAIN) * than.alternative.seconds
