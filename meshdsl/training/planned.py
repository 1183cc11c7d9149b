"""Planned: the layout that a search chose for a run, kept in its workdir.

A run that goes on has the same layout, unless its flags, machine or settings differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

FILE = "plan.json"


def kept(workdir: str | os.PathLike[str] | None) -> tuple[dict[str, str], dict[str, str]] | None:
    """Returns what `keep` wrote; None if the workdir has no file of it that can be read."""
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
    """Writes the plan of a run.

    Args:
        asked: what the search was for: another plan is made if it differs.
        found: the mesh, the layout and other values that the search chose.
    """
    path = Path(workdir) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"asked": dict(asked), "found": dict(found)}, indent=2)
    partial = path.with_name(f"{FILE}.{os.getpid()}")
    partial.write_text(text + "\n")
    partial.replace(path)
