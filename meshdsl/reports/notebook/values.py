"""Values: which function shows a value of which type in a notebook."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.reports.notebook import arrays, layouts
from meshdsl.tensors.named_array import NamedArray


@singledispatch
def show(value: Any) -> str | None:
    """Returns a value as HTML for a notebook; None: the notebook shows its text instead."""
    return None


show.register(NamedArray, arrays.show)
show.register(Layout, layouts.show_layout)
show.register(Mesh, layouts.show_mesh)
