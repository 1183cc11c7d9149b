"""Values: which function shows a value of which type in a notebook."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.html.elements import place, tag
from meshdsl.reports.notebook import arrays, graphs, inspections, layouts, trees
from meshdsl.reports.notebook.cells import cell, head, quiet
from meshdsl.reports.notebook.chips import dim_chip, dim_chips
from meshdsl.running.inspection import Inspection
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.module import Module
from meshdsl.tensors.named_array import NamedArray, Spec
from meshdsl.tracing.graph import Graph, TracedTensor


@singledispatch
def show(value: Any) -> str | None:
    """Returns a value as HTML for a notebook; None: the notebook shows its text instead."""
    return None


show.register(NamedArray, arrays.show)
show.register(Layout, layouts.show_layout)
show.register(Mesh, layouts.show_mesh)
show.register(Module, trees.show)
show.register(Graph, graphs.show)
show.register(Inspection, inspections.show)


@show.register
def _(spec: Spec) -> str:
    size = spec.dims.volume * spec.dtype.itemsize
    return cell(head(tag("code", short(spec.dtype)), dim_chips(spec.dims), quiet(show_bytes(size))))


@show.register
def _(tensor: TracedTensor) -> str:
    kind = tag("code", short(tensor.dtype))
    return cell(head(kind, dim_chips(tensor.dims), quiet("traced at"), place(tensor.source)))


@show.register
def _(shape: Shape) -> str:
    return cell(head(dim_chips(shape)))


@show.register
def _(dim: Dimension) -> str:
    return cell(head(dim_chip(dim)))
