"""Flags whose name means something else in another command than a user may think."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_OF_SWEEP = {
    "rounds": "is of `meshdsl sweep --measure=run`: how often it comes to each candidate. The "
    "rounds of a pipeline are --pipeline_rounds"
}


def of_other_commands(arguments: Sequence[str], command: str) -> Iterator[str]:
    """Yields the problems of a command line with flags that its command would not read.

    Most flags of other commands do no harm, so that one line of flags suits several commands, and
    so do all of them in a file of `--config`. Those here are taken for others.
    """
    given = {a.lstrip("-").partition("=")[0] for a in arguments if a.startswith("-")}
    for name, says in _OF_SWEEP.items():
        if name in given and command != "sweep":
            yield f"--{name} {says}"
