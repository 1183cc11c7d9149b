"""Lines of output. The command goes on if the output is closed, as after `| head`."""

from __future__ import annotations

import os
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


def hush(stream: TextIO | None) -> bool:
    """Returns whether a stream is closed; later writes to a closed one are dropped."""
    if stream is None:
        return False
    try:
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        return True
    return False
