"""Readers: functions from the text of a flag to its value.

They raise ValueError for a text that stands for no value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from meshdsl.layouts.automatic import AUTO
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.backends import BACKENDS
from meshdsl.lowering.options import PIPELINES
from meshdsl.optim import schedules
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import as_dtype, is_float

Reader = Callable[[str], Any]


def whole(least: int) -> Reader:
    """Reads whole numbers of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            number = least - 1
        if number < least:
            raise ValueError(f"needs a whole number of at least {least}, got {text!r}")
        return number

    return read


def count_of_steps(text: str) -> int:
    """Reads a number of steps, at least 1; of a time it says how many steps that is."""
    return _steps(text, "")


def steps_of_checkpoints(text: str) -> int:
    """Reads what `count_of_steps` does; of a time it says which flag takes it."""
    return _steps(text, "checkpoint_minutes")


def _steps(text: str, by_minutes: str) -> int:
    """Reads a number of steps; for a time the error names the flag for minutes, if there is one."""
    try:
        return int(whole(1)(text))
    except ValueError as error:
        try:
            seconds = duration(text)
        except ValueError:
            raise error from None
        advice = (
            f"A time in steps is {seconds:,.0f} / step_seconds; metrics.jsonl of a run has "
            "step_seconds"
        )
        if by_minutes:
            advice = f"For a time write --{by_minutes}={seconds / 60:g}"
        raise ValueError(f"counts steps: {error}. {advice}") from None


def or_auto(reader: Reader) -> Reader:
    """Reads what another reader does, or `auto`: the best that a search finds."""
    return or_word(AUTO, reader)


def or_word(word: str, reader: Reader) -> Reader:
    """Reads what another reader does, or a word."""

    def read(text: str) -> Any:
        return text if text == word else reader(text)

    return read


def number(text: str) -> float:
    """Reads a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"needs a number of at least 0, got {text!r}")
    return value


def share(text: str) -> float:
    """Reads a share in percent: `2%` is 0.02."""
    try:
        value = float(text.removesuffix("%")) if text.endswith("%") else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise ValueError(f"needs a share from 0% to 100%, as in 2%, got {text!r}")
    return value / 100


def backend(text: str) -> str:
    """Reads the name of a backend."""
    if text not in BACKENDS:
        hint = did_you_mean(text, BACKENDS)
        raise ValueError(f"unknown backend {text!r}; choose one of {', '.join(BACKENDS)}{hint}")
    return text


def hardware_name(text: str) -> str:
    """Reads the name of a kind of hardware, or that of a file that `calibrate` wrote."""
    from meshdsl.layouts.calibration import find_hardware

    find_hardware(text)
    return text


def other_program(text: str) -> str:
    """Reads what `compile` compares with: `jax_auto`, or a function of the user's."""
    if text != "jax_auto" and ":" not in text:
        raise ValueError(
            "needs jax_auto, or a function that makes a plain JAX program, as in "
            f"my_step.py:program, got {text!r}{did_you_mean(text, ['jax_auto'])}"
        )
    return text


def one_layout(text: str) -> Layout:
    """Reads a layout on the mesh of another one."""
    if "|" in text:
        raise ValueError(
            f"takes a layout on the mesh of --mesh_shape, not a mesh beside it: {text!r}. `sweep` "
            'ranks pairs of mesh and layout (--layout="data:16 | batch:data"), and `plan '
            "--against` compares the best plan with such a pair"
        )
    return Layout.parse(text)


def floating(text: str) -> str:
    """Reads a floating-point dtype; returns its name."""
    if not is_float(dtype := as_dtype(text)):
        raise ValueError(f"needs a floating-point dtype, got {text!r}")
    return dtype.name


_PERIODS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "y": 365 * 86_400.0}
_PERIOD = re.compile(r"([0-9_,]+(?:\.[0-9]+)?) *([A-Za-z]*)")


def duration(text: str) -> float:
    """Reads a time above 0, in seconds: `50000h`, `5min`, `90s`."""
    match = _PERIOD.fullmatch(text.strip())
    digits = match[1].replace("_", "").replace(",", "") if match else ""
    seconds = float(digits) * _PERIODS.get(match[2], 0.0) if match and digits else 0.0
    if not seconds:
        listed = ", ".join(_PERIODS)
        raise ValueError(f"needs a time, as 50000h or 5min (units: {listed}), got {text!r}")
    return seconds


def minutes(text: str) -> float:
    """Reads a time above 0, in minutes: `10`, `90s`, `2h`."""
    try:
        value = float(text)
    except ValueError:
        return duration(text) / 60
    if not 0 < value < float("inf"):
        raise ValueError(f"needs a number of minutes above 0, or a time, as 90s, got {text!r}")
    return value


_UNITS = {unit + "B": 1000**power for power, unit in enumerate(["", "k", "M", "G", "T"])}
_UNITS |= {unit + "iB": 1024**power for power, unit in enumerate(["K", "M", "G", "T"], 1)}
_SIZE = re.compile(r"([0-9_]+(?:\.[0-9]+)?) *([A-Za-z]*)")


def size(text: str) -> int:
    """Reads a number of bytes: `16GiB`, `95GB`, `1.5MiB`, `4096`."""
    match = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or (match[2] or "B").lower() not in units:
        listed = ", ".join(_UNITS)
        raise ValueError(f"needs a size, as 16GiB, 95GB or 4096 (units: {listed}), got {text!r}")
    return int(float(match[1].replace("_", "")) * units[(match[2] or "B").lower()])


def one_of(*choices: str) -> Reader:
    """Reads one of several words."""

    def read(text: str) -> str:
        if text not in choices:
            hint = did_you_mean(text, choices)
            raise ValueError(f"unknown choice {text!r}; choose one of {', '.join(choices)}{hint}")
        return text

    return read


def schedule(text: str) -> str:
    """Reads the name of a schedule of the learning rate."""
    if text in PIPELINES or text.endswith(".csv"):
        raise ValueError(
            f"{text!r} is a schedule of a pipeline: --pipeline={text}. This one is the learning "
            f"rate's: {', '.join(schedules.NAMES)}"
        )
    return str(one_of(*schedules.NAMES)(text))


def truth(text: str) -> bool:
    """Reads yes or no."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(f"needs true or false, got {text!r}")
    return words[text.lower()]


def remat(text: str) -> str:
    """Reads what a model's backward pass keeps, by `meshdsl.models.remat`, or `auto`."""
    from meshdsl.models.remat import read

    return text if text == AUTO else read(text)


def some_of(*choices: str) -> Reader:
    """Reads words of a given set, separated by commas; an empty text has none."""

    def read(text: str) -> tuple[str, ...]:
        words = words_of(text)
        problems = [
            f"unknown choice {word!r}; choose from {', '.join(choices)}"
            f"{did_you_mean(word, choices)}"
            for word in words
            if word not in choices
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return words

    return read


def words_of(text: str) -> tuple[str, ...]:
    """Reads any words, separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())
