"""Errors of reading a checkpoint: damage is distinguished from other failures to read.

Guarantees:
    A checkpoint is damaged only if a file is missing, cut off or not as it was written. Any other
    failure, such as of memory, a limit of the system or a network disk, is an error that leaves all
    checkpoints alone.
    All processes raise the same error, whichever of them fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from meshdsl.training.checkpointing.seals import Damaged
from meshdsl.training.processes.joining import gathered

_LONGEST = 500  # characters of a reason
# What TensorStore says of files that are gone, cut off or changed.
_FORMAT = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION")


@contextmanager
def sorted_errors(checkpoint: Path) -> Iterator[None]:
    """Sorts errors of its block, which reads a checkpoint; every process enters it.

    If the block fails in one process, all processes raise the same error.

    Raises:
        Damaged: the checkpoint is not as it was saved.
        ValueError: it cannot be read for another reason.
    """
    damaged, failed, cause = None, None, None
    try:
        yield
    except Exception as error:  # storage libraries raise many kinds
        cause = error
        damaged = damage_of(error)
        failed = _reason(error) if damaged is None else None
    reports = [json.loads(text) for text in gathered(json.dumps([damaged, failed]))]
    if problem := _listed([each[1] for each in reports]):
        raise ValueError(
            f"cannot read checkpoint {checkpoint}: {problem}. Nothing has been changed, and it may "
            "be whole: put right what failed and start again, with a larger mesh if memory does "
            "not suffice; or move the checkpoint away to go on from the one before it"
        ) from cause
    if problem := _listed([each[0] for each in reports]):
        raise Damaged(problem) from cause


def damage_of(error: Exception) -> str | None:
    """Returns the damaged file if an error names one, with what is wrong with it; else None."""
    text = str(error)
    by_system = "os error" in text.lower() and not text.startswith("NOT_FOUND")
    formats = isinstance(error, ValueError) and text.startswith(_FORMAT)
    known = (Damaged, FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError)
    return _reason(error) if not by_system and (formats or isinstance(error, known)) else None


def entries(read: Callable[[], Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns some entries of the description of a checkpoint, which `read` returns.

    Raises:
        Damaged: the description is missing, or lacks these entries.
        OSError: it cannot be read.
    """
    try:
        description = read()
        return {name: description[name] for name in names}
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its description cannot be read ({error})") from error


def _reason(error: Exception) -> str:
    """Returns the first line of an error, or its type if it has no text."""
    return ((str(error).strip() or type(error).__name__).splitlines()[0])[:_LONGEST]


def _listed(problems: Sequence[str | None]) -> str | None:
    """Returns the problems of all processes as one line; None if there are none.

    Args:
        problems: one per process. Several are numbered.
    """
    if len(problems) == 1:
        return problems[0]
    return "; ".join(f"process {n}: {text}" for n, text in enumerate(problems) if text) or None
