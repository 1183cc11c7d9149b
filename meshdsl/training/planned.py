"""Planned: the layout that a search has found for a run, kept in its workdir.

A run that goes on takes the same one, as long as the same is asked for.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

FILE = "plan.json"


def kept(workdir: str | os.PathLike[str] | None) -> tuple[dict[str, str], dict[str, str]] | None:
    """Returns what was asked for, and what was found; None if the workdir has nothing readable."""
    if workdir is None:
        return None
    try:
        record = json.loads((Path(workdir) / FILE).read_text())
        return dict(record["asked"]), dict(record["found"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(
    workdir: str | os.PathLike[str], asked: Mapping[str, str], found: Mapping[str, str]
) -> None:
    """Writes what was asked for, and what was found."""
    path = Path(workdir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"asked": dict(asked), "found": dict(found)}, indent=2)
    partial = path.with_name(f"{FILE}.{os.getpid()}")
    partial.write_text(text + "\n")
    partial.replace(path)
