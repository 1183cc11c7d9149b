"""Automatic: a mesh and a layout that a search completes when a function's arguments are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshdsl.late import late
from meshdsl.layouts.automatic import AUTO, OpenLayout, read_layout
from meshdsl.layouts.hardware import hardware_of
from meshdsl.layouts.layout import Layout, LayoutLike
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.tracing.graph import Graph


@dataclass(frozen=True)
class Open:
    """What `mesh="auto"` or `layout="auto"` leaves open.

    Attributes:
        mesh: the given mesh; None: one of all devices.
        rules: the rules that the layout has in any case.
        hardware: the name of the hardware whose times decide.
    """

    mesh: Mesh | None
    rules: Layout
    hardware: str

    @property
    def devices(self) -> int | Mesh:
        return jax.device_count() if self.mesh is None else self.mesh

    def completed(self, graph: Graph, donated: Sequence[bool], options: Any) -> tuple[Mesh, Layout]:
        """Returns the mesh and the layout with which a graph is the fastest, by simulation."""
        find = late("layout of a graph")
        return find(graph, donated, self.devices, self.rules, self.hardware, options)

    def completed_for(
        self, recipe: Any, batch: Mapping[str, Any], options: Any
    ) -> tuple[Mesh, Layout]:
        """Returns the mesh and the layout with which the step of a recipe is the fastest."""
        find = late("layout of a recipe")
        return find(recipe, batch, self.devices, self.rules, self.hardware, options)


def opened(
    mesh: MeshLike | None, layout: LayoutLike | OpenLayout | None, backend: str
) -> Open | None:
    """Returns what a mesh and a layout leave open; None if nothing.

    Raises:
        ValueError: the layout is malformed, or the backend has no devices to make a mesh of.
    """
    parsed = read_layout(layout) if isinstance(layout, str) else layout
    any_mesh = isinstance(mesh, str) and mesh.strip() == AUTO
    if not any_mesh and not isinstance(parsed, OpenLayout):
        return None
    if not isinstance(parsed, OpenLayout) and parsed is not None:
        raise ValueError(
            f"mesh={AUTO!r} needs a layout that may have rules for it: layout={AUTO!r}, or "
            f'"{Layout.of(parsed)}; {AUTO}"'
        )
    given = None if any_mesh or mesh is None else Mesh.of(mesh)
    if given is None and not backend.startswith("jax"):
        raise ValueError(
            f"backend {backend!r} does not say how many devices there are: give a mesh with "
            f"layout={AUTO!r}"
        )
    known = hardware_of(jax.local_devices()[0].device_kind) if backend.startswith("jax") else None
    rules = parsed.rules if isinstance(parsed, OpenLayout) else Layout()
    return Open(given, rules, "cpu" if known is None else known.name)
