"""Finds out which entries of a batch a loss reads that the batch does not have.

A KeyError alone does not say whose key is missing: the loss may look up other things. So the loss
is traced once more, with a batch that records what is read. A near name stands in for a missing
one, so that one error lists all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from meshdsl.tensors.dims import nearest
from meshdsl.tracing.source import raiser


class MissingEntry(ValueError):
    """A loss reads an entry that the batch does not have."""


def missing_entry(
    error: KeyError, loss: Callable[[Any, Any], Any], params: Any, batch: Any
) -> MissingEntry | None:
    """Returns the error to raise instead; None if the missing key is none of the batch's.

    Args:
        error: what the loss has raised, with its traceback.
        loss, params, batch: the call that has raised it, in a trace that is thrown away.
    """
    if not isinstance(batch, Mapping) or not error.args or error.args[0] in batch:
        return None
    recorded = _Recorded(batch)
    with suppress(Exception):  # what was read until then is known
        loss(params, recorded)
    lacking = [name for name in recorded.read if name not in batch]
    if error.args[0] not in lacking:
        return None
    hints = [_hinted(str(name), list(map(str, batch))) for name in lacking]
    source = raiser(error)
    return MissingEntry(
        f"the loss reads {', '.join(map(str, recorded.read))} of a batch that has "
        f"{', '.join(map(str, batch))}: no {', '.join(hints)}\n"
        f"  at {source}  {source.code}".rstrip()
    )


def _hinted(name: str, known: list[str]) -> str:
    near = " or ".join(f"`{other}`" for other in nearest(name, known))
    return f"`{name}` (did you mean {near}?)" if near else f"`{name}`"


class _Recorded(dict):
    """A batch that lists the entries that are read, in the order of their first reading."""

    def __init__(self, batch: Mapping[Any, Any]) -> None:
        super().__init__(batch)
        self.read: dict[Any, None] = {}

    def __getitem__(self, name: Any) -> Any:
        self.read[name] = None
        return super().__getitem__(name)

    def __missing__(self, name: Any) -> Any:
        for other in nearest(str(name), map(str, self)):
            if other in self:
                return super().__getitem__(other)
        raise KeyError(name)
