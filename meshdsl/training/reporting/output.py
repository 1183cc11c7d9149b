"""Output: lines that are told, without which a command goes on, and the results it was asked for.

A command goes on if nobody reads what it tells, as after `| head`.
"""

from __future__ import annotations

import os
import select
import sys
from typing import TextIO


def tell(text: str, error: bool = False) -> None:
    """Prints a line on standard output or error, unless it is closed."""
    stream = sys.stderr if error else sys.stdout
    try:
        if stream is not None:  # it has been closed
            print(text, file=stream, flush=True)
    except OSError:
        hush(stream)


def give(text: str) -> None:
    """Writes a result on standard output at once, for `--out=-`.

    Raises:
        BrokenPipeError: nobody reads it any more, which ends the command quietly.
        ValueError: it cannot be written, as to a full disk.
    """
    if sys.stdout is None:
        raise ValueError("cannot write to standard output: it is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        hush(sys.stdout)  # else Python tries to write the rest when it ends
        raise ValueError(f"cannot write to standard output: {error.strerror}") from error


def hush(stream: TextIO | None) -> bool:
    """Returns whether a stream is closed; later writes to a closed one are dropped."""
    if stream is None or not _closed(stream):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    return True


def _closed(stream: TextIO) -> bool:
    """Returns whether nobody reads what a stream writes."""
    try:
        stream.flush()
    except OSError:
        return True
    try:  # a stream without a buffer, as of PYTHONUNBUFFERED=1, has nothing left to flush
        poll = select.poll()
        poll.register(stream.fileno(), 0)  # what is asked for beside errors: nothing
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):  # it has no file of its own, or is closed by Python
        return False
