"""The version of this package's code, which all processes of a job must share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2]


def code_version(folder: Path = _PACKAGE) -> str:
    """Returns a hash of all source files and tables of this package.

    In a checkout, some of its folders are links, which `Path.rglob` does not follow.
    """
    files = [
        Path(parent) / name
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if name.endswith((".py", ".json"))
    ]
    total = hashlib.sha256()
    for file in sorted(files):
        total.update(str(file.relative_to(folder)).encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:12]
