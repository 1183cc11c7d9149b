"""TensorLayout: where one tensor is on a mesh.

Each dim is split over a tuple of axes (major first); each remaining axis is *replicated* or
*partial*: along a partial axis every device holds one summand (or max operand, ...) of the value.
The kind `varying` marks a value that belongs to its device alone and has no global meaning, such as
a local index. An axis occurs once. Layouts do not depend on the order of a tensor's dims. There is
one object for all layouts that are equal, so that comparing and hashing them takes no Python code.

The axes of a dim cut it one after the other, each into equal blocks, the last of them padded: 5
over a=2, b=2 are blocks of 3 over a, each of blocks of 2 over b: 01 2- | 34 --. So taking the last
axis away joins blocks into one that the layout without it has. What pads (`-`) hold is undefined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from meshdsl.layouts.mesh import Mesh
from meshdsl.tensors.cuts import Cuts
from meshdsl.tensors.dims import Dimension, Shape

Kind = Literal["sum", "max", "min", "varying"]
Splits: TypeAlias = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True, eq=False, init=False)
class TensorLayout:
    """The split dims (sorted by name, unsplit ones left out) and the partial axes (sorted)."""

    splits: Splits = ()
    partial: tuple[tuple[str, Kind], ...] = ()

    def __new__(
        cls, splits: Splits = (), partial: tuple[tuple[str, Kind], ...] = ()
    ) -> TensorLayout:
        known = _known.get((splits, partial))
        if known is not None:
            return known
        self = object.__new__(cls)
        object.__setattr__(self, "splits", splits)
        object.__setattr__(self, "partial", partial)
        used = [axis for _, axes in splits for axis in axes] + [axis for axis, _ in partial]
        assert len(set(used)) == len(used), f"an axis occurs twice in {self}"
        return _known.setdefault((splits, partial), self)

    def __reduce__(self) -> tuple:
        return TensorLayout, (self.splits, self.partial)

    @staticmethod
    def of(
        splits: Mapping[str, Iterable[str]], partial: Mapping[str, Kind] | None = None
    ) -> TensorLayout:
        """Builds the normal form from plain mappings."""
        kept = ((dim, tuple(axes)) for dim, axes in splits.items())
        return TensorLayout(
            tuple(sorted((dim, axes) for dim, axes in kept if axes)),
            tuple(sorted((partial or {}).items())),
        )

    def axes(self, dim: str) -> tuple[str, ...]:
        """Returns the axes that split `dim`, major first."""
        for name, axes in self.splits:
            if name == dim:
                return axes
        return ()

    def dim_of(self, axis: str) -> str | None:
        """Returns the dim that `axis` splits, or None."""
        for name, axes in self.splits:
            if axis in axes:
                return name
        return None

    @property
    def split_axes(self) -> frozenset[str]:
        return frozenset(axis for _, axes in self.splits for axis in axes)

    @property
    def partial_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.partial)

    def split(self, dim: str, axes: Iterable[str]) -> TensorLayout:
        """Returns this layout with `dim` split over exactly `axes`."""
        return TensorLayout.of({**dict(self.splits), dim: tuple(axes)}, dict(self.partial))

    def add_partial(self, axes: Iterable[str], kind: Kind = "sum") -> TensorLayout:
        """Returns this layout, partial over `axes` as well."""
        return _with_partial(self, tuple(axes), kind)

    def complete(self) -> TensorLayout:
        """Returns this layout without its partial axes (they become replicated)."""
        return TensorLayout(self.splits) if self.partial else self

    def drop(self, axes: Iterable[str]) -> TensorLayout:
        """Returns this layout with `axes` replicated: neither splitting a dim nor partial."""
        return _without(self, frozenset(axes))

    def restrict(self, names: Iterable[str]) -> TensorLayout:
        """Returns this layout for a tensor that has only the dims `names`; partials are kept."""
        if not self.splits:
            return self
        kept = set(names)
        return TensorLayout(
            tuple((dim, axes) for dim, axes in self.splits if dim in kept), self.partial
        )

    def rename(self, names: Mapping[str, str]) -> TensorLayout:
        """Returns this layout with dims renamed."""
        return TensorLayout.of(
            {names.get(dim, dim): axes for dim, axes in self.splits}, dict(self.partial)
        )

    def local(self, shape: Shape, mesh: Mesh) -> Shape:
        """Returns the shape of one device's shard, pads included."""
        return _local(self, shape, mesh) if self.splits else shape

    def cuts(self, shape: Shape, mesh: Mesh) -> Cuts:
        """Returns how dims are cut where shards have pads; see `meshdsl.tensors.cuts`."""
        held = dict(self.splits)
        counts = [tuple(mesh.sizes[axis] for axis in held.get(name, ())) for name in shape.names]
        found = [
            tuple(n for n in levels if n > 1) if dim.size % math.prod(levels) else ()
            for dim, levels in zip(shape, counts, strict=True)
        ]
        return tuple(found) if any(found) else ()

    def even(self, shape: Shape, mesh: Mesh) -> TensorLayout:
        """Returns this layout where it needs no pads: each dim keeps its first axes that fit."""
        kept = {}
        for dim, axes in self.splits:
            size = shape.get(dim).size
            fitting = [n for n in range(len(axes) + 1) if size % mesh.extent(axes[:n]) == 0]
            kept[dim] = axes[: max(fitting)]
        return TensorLayout.of(kept, dict(self.partial))

    def show(self, shape: Shape, mesh: Mesh) -> str:
        """Returns `[batch=8/16, embed=256]`: local size over global size where they differ."""
        parts = []
        for dim, here in zip(shape, self.local(shape, mesh), strict=True):
            parts.append(f"{dim}" if here == dim else f"{dim.name}={here.size}/{dim.size}")
        kinds = [f"{kind} over {axis}" for axis, kind in self.partial]
        return "[" + ", ".join(parts) + "]" + (f" partial {', '.join(kinds)}" if kinds else "")

    def __str__(self) -> str:
        splits = "; ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in self.splits) or "replicated"
        kinds = ", ".join(f"{kind} over {axis}" for axis, kind in self.partial)
        return splits + (f" (partial {kinds})" if kinds else "")


_known: dict[tuple, TensorLayout] = {}


@lru_cache(maxsize=1 << 14)
def _with_partial(layout: TensorLayout, axes: tuple[str, ...], kind: Kind) -> TensorLayout:
    partial = {**dict(layout.partial), **dict.fromkeys(axes, kind)}
    return TensorLayout.of(dict(layout.splits), partial)


@lru_cache(maxsize=1 << 14)
def _without(layout: TensorLayout, axes: frozenset[str]) -> TensorLayout:
    return TensorLayout.of(
        {dim: [axis for axis in held if axis not in axes] for dim, held in layout.splits},
        {axis: kind for axis, kind in layout.partial if axis not in axes},
    )


@lru_cache(maxsize=1 << 14)
def _local(layout: TensorLayout, shape: Shape, mesh: Mesh) -> Shape:
    held = dict(layout.splits)
    return Shape(
        Dimension(dim.name, -(-dim.size // mesh.extent(held.get(dim.name, ())))) for dim in shape
    )
