"""Families of emitters: modules with `EMITTERS`, each for some kinds of instruction."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def combined(*families: ModuleType) -> dict[str, Any]:
    """Returns the emitters of all families in one table; each kind is in one family only."""
    emitters: dict[str, Any] = {}
    for family in families:
        assert not (twice := emitters.keys() & family.EMITTERS), (
            f"{family.__name__} has {twice} again"
        )
        emitters |= family.EMITTERS
    return emitters
