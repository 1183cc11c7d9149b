"""Reading a checkpoint: whether it is damaged, or only cannot be read at the moment.

Guarantees:
    Damaged is only what is missing, cut off or not as it was written. Whatever else fails, such as
    memory, a limit of the system or a network disk, is an error that leaves all checkpoints alone.
    What one process finds, all of them are told.
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
def reading(checkpoint: Path) -> Iterator[None]:
    """Reads a checkpoint in its block, in every process; what fails in one of them ends all.

    Raises:
        Damaged: what is read is not what was saved.
        ValueError: it cannot be read for another reason.
    """
    damaged, failed, cause = None, None, None
    try:
        yield
    except Exception as error:  # storage libraries raise many kinds
        cause = error
        damaged = damage_told(error)
        failed = _reason(error) if damaged is None else None
    found = [json.loads(text) for text in gathered(json.dumps([damaged, failed]))]
    if told := _listed([each[1] for each in found]):
        raise ValueError(
            f"cannot read checkpoint {checkpoint}: {told}. Nothing has been changed, and it may "
            "be whole: put right what failed and start again, with a larger mesh if memory does "
            "not suffice; or move the checkpoint away to go on from the one before it"
        ) from cause
    if told := _listed([each[0] for each in found]):
        raise Damaged(told) from cause


def damage_told(error: Exception) -> str | None:
    """Returns the damage that an error names, else None: the file, and what is wrong with it."""
    text = str(error)
    by_system = "os error" in text.lower() and not text.startswith("NOT_FOUND")
    formats = isinstance(error, ValueError) and text.startswith(_FORMAT)
    known = (Damaged, FileNotFoundError, json.JSONDecodeError, UnicodeDecodeError, SafetensorError)
    return _reason(error) if not by_system and (formats or isinstance(error, known)) else None


def entries(read: Callable[[], Any], names: Sequence[str]) -> dict[str, Any]:
    """Returns some entries of the description of a checkpoint, which `read` returns.

    Raises:
        Damaged: it is not there, or does not have them.
        OSError: it cannot be read.
    """
    try:
        found = read()
        return {name: found[name] for name in names}
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"its description cannot be read ({error})") from error


def _reason(error: Exception) -> str:
    """Returns the first line of an error, or its kind where it says nothing."""
    return ((str(error).strip() or type(error).__name__).splitlines()[0])[:_LONGEST]


def _listed(told: Sequence[str | None]) -> str | None:
    """Returns what processes tell, by their numbers if there are several."""
    if len(told) == 1:
        return told[0]
    return "; ".join(f"process {n}: {text}" for n, text in enumerate(told) if text) or None
