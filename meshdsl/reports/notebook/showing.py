"""Showing: a tree of arrays or specs, and where a layout puts each of them on a mesh.

Nothing runs and no device is needed, so any machine shows what 4,096 devices would hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshdsl.layouts.layout import Layout, LayoutLike, Rule
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.html.elements import Child, Html, tag, ticked
from meshdsl.reports.notebook import trees
from meshdsl.reports.notebook.blocks import tensor_grid
from meshdsl.reports.notebook.cells import cell, head, quiet
from meshdsl.reports.notebook.chips import axis_chip
from meshdsl.reports.notebook.trees import Node
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import short

_GRIDS = 6
_PROBLEMS = 20


def show(
    tree: Any, layout: LayoutLike | None = None, mesh: MeshLike | None = None, path: str = "params"
) -> Shown:
    """Shows a model or any tree of arrays, and where a layout would put each of them.

        md.show(model)  # in a notebook; print(md.show(model)) elsewhere
        md.show(model, "params/embed:data; d_ff:model", mesh="data:4,model:2")

    Dims have colours, the tree folds, and one device's share of every array is beside it. A grid
    of the devices shows what each one holds, once for every way in which arrays are split. Nothing
    is computed, and `md.spec` leaves will do.

    Args:
        tree: a `md.Module`, or dicts, lists and dataclasses of arrays or specs.
        layout: rules, as in `md.jit`; None: where the arrays are.
        mesh: the mesh that the layout is for.
        path: what the paths of arrays start with; scopes of rules apply to them.

    Raises:
        ValueError: malformed mesh or layout; a layout without a mesh, or a mesh without a layout;
            an axis that the mesh lacks.

    Examples:
        >>> class Mlp(md.Module):
        ...     w_in: md.Tensor
        ...     w_out: md.Tensor
        >>> embed, d_ff = md.dims(embed=4, d_ff=8)
        >>> mlp = Mlp(md.spec([embed, d_ff]), md.spec([d_ff, embed]))
        >>> print(md.show(mlp, "d_ff:model", mesh="model:2"))
        2 arrays, 64 elements, 256 B; on model:2, a device holds 128 B
        params/w_in   f32[embed=4, d_ff=4/8]  64 B of 128 B  d_ff:model
        params/w_out  f32[d_ff=4/8, embed=4]  64 B of 128 B  d_ff:model
    """
    if layout is None and mesh is None:
        return Shown(trees.tree(tree, path=path))
    if layout is None or mesh is None:
        missing, given = ("layout", "mesh") if layout is None else ("mesh", "layout")
        raise ValueError(
            f"md.show: a {given} needs a {missing} beside it, as in "
            'md.show(model, "embed:data", mesh="data:4")'
        )
    rules, own_mesh = Layout.of(layout), Mesh.of(mesh)
    problems: list[str] = []

    def placing(value: Any, at: str) -> tuple[TensorLayout, Mesh]:
        where, conflicts = rules.resolve(value.dims, at)
        problems.extend(f"`{at}`: {conflict}" for conflict in conflicts)
        for axis in sorted(where.split_axes - own_mesh.sizes.keys()):
            near = did_you_mean(axis, own_mesh.names)
            raise ValueError(f"md.show: no axis `{axis}` in mesh `{own_mesh}`{near}")
        return where, own_mesh

    root = trees.tree(tree, placing, path=path)
    return Shown(root, own_mesh, rules, tuple(problems))


@dataclass(frozen=True)
class Shown:
    """A tree with where its arrays are; prints as text, and shows as HTML in a notebook.

    Attributes:
        root: the outermost node.
        mesh, layout: what they were asked for; None: arrays as they are.
        problems: one line for each conflict of rules.
    """

    root: Node
    mesh: Mesh | None = None
    layout: Layout | None = None
    problems: tuple[str, ...] = ()

    @property
    def idle(self) -> list[Rule]:
        """The rules that split no array of the tree."""
        arrays = [(leaf.path, leaf.value.dims) for leaf in self._arrays()]
        return [
            rule
            for rule in (self.layout.rules if self.layout else ())
            if not any(d.find(rule.dim) and rule.applies_to(path) for path, d in arrays)
        ]

    def _arrays(self) -> list[Node]:
        return [leaf for leaf in trees.leaves(self.root) if hasattr(leaf.value, "dims")]

    def __str__(self) -> str:
        """Returns one line per array: its path, its dims, and its bytes."""
        rows = [self._line(leaf) for leaf in self._arrays()]
        widths = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
        lines = [f"{p:{widths[0]}}  {kind:{widths[1]}}  {size}" for p, kind, size in rows]
        return "\n".join([self._total(), *lines, *self._notes()])

    __repr__ = __str__

    def _line(self, leaf: Node) -> tuple[str, str, str]:
        layout, mesh = leaf.where or (TensorLayout(), Mesh())
        size = show_bytes(leaf.bytes)
        if leaf.local_bytes < leaf.bytes:
            size = f"{show_bytes(leaf.local_bytes)} of {size}"
        kind = short(leaf.value.dtype) + layout.show(leaf.value.dims, mesh)
        return leaf.path, kind, f"{size}  {layout}" if layout.splits else size

    def _total(self) -> str:
        root = self.root
        arrays = f"{root.arrays:,} array{'' if root.arrays == 1 else 's'}"
        text = f"{arrays}, {root.count:,} elements, {show_bytes(root.bytes)}"
        if self.mesh is None:
            return text
        return f"{text}; on {self.mesh}, a device holds {show_bytes(root.local_bytes)}"

    def _notes(self) -> list[str]:
        notes = list(self.problems[:_PROBLEMS])
        if more := len(self.problems) - len(notes):
            notes.append(f"… and {more:,} more conflicts")
        notes += [f"`{rule}` splits no array here" for rule in self.idle]
        return notes

    def _repr_html_(self) -> str:
        """Returns the tree, and the grids of devices, for notebooks."""
        first: list[Child] = [quiet(self._total())]
        if self.mesh is not None:
            first = [[axis_chip(name, self.mesh) for name in self.mesh.names], *first]
        if self.layout is not None:
            first.append(tag("code", str(self.layout)))
        conflicts = len(self.problems[:_PROBLEMS])
        notes = [
            tag("p", ticked(note), class_="warn" if number < conflicts else "quiet")
            for number, note in enumerate(self._notes())
        ]
        return cell(head(first), notes, trees.drawing(self.root), *self._grids())

    def _grids(self) -> Iterator[Html]:
        """Yields a grid for each way in which arrays are split, those of most bytes first."""
        ways: dict[tuple[TensorLayout, Mesh], list[Node]] = {}
        for leaf in self._arrays():
            if leaf.where is not None and leaf.where[1].size > 1:
                ways.setdefault(leaf.where, []).append(leaf)
        ordered = sorted(ways.items(), key=lambda way: -sum(leaf.bytes for leaf in way[1]))
        for (layout, mesh), arrays in ordered[:_GRIDS]:
            largest = max(arrays, key=lambda leaf: leaf.bytes)
            share = show_bytes(sum(leaf.local_bytes for leaf in arrays))
            count = f"{len(arrays):,} array{'s' if len(arrays) > 1 else ''}"
            words = f" {count}, {share} on a device; such as {largest.path}"
            title = tag("summary", tag("code", str(layout)), quiet(words))
            grid = tensor_grid(largest.value.dims, layout, mesh)
            yield tag("details", title, grid, open=layout is ordered[0][0][0])
        if len(ordered) > _GRIDS:
            more = len(ordered) - _GRIDS
            yield tag("p", f"… and {more:,} more ways to split arrays", class_="quiet")
