"""Families of emitters: modules with `EMITTERS`, each for some kinds of instructions."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def gathered(*families: ModuleType) -> dict[str, Any]:
    """Returns the emitters of all families; each kind has one."""
    found: dict[str, Any] = {}
    for family in families:
        assert not (twice := found.keys() & family.EMITTERS), f"{family.__name__} has {twice} again"
        found |= family.EMITTERS
    return found
