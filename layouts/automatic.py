"""Automatic: layouts that a search completes, `batch:data; auto`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh

AUTO = "auto"
_WORD = re.compile(r"(?<![^;,\s])auto(?![^;,\s])")


@dataclass(frozen=True)
class OpenLayout:
    """Rules that a search adds others to; it prints as the text that `read_layout` reads."""

    rules: Layout

    def __str__(self) -> str:
        return "; ".join(filter(None, [str(self.rules), AUTO]))


def read_layout(text: str) -> Layout | OpenLayout:
    """Reads a layout, or one that a search completes; raises as `Layout.parse`.

    >>> str(read_layout("batch:data; auto"))
    'batch:data; auto'
    """
    if _WORD.search(text) is None:
        return Layout.parse(text)
    return OpenLayout(Layout.parse(_WORD.sub(" " * len(AUTO), text)))


def read_mesh(text: str) -> Mesh | str:
    """Reads a mesh, or `auto`; raises as `Mesh.parse`."""
    return AUTO if text.strip() == AUTO else Mesh.parse(text)


def is_auto(value: Any) -> bool:
    """Whether a value is left to a search, at least in part."""
    return isinstance(value, OpenLayout) or (isinstance(value, str) and value == AUTO)
