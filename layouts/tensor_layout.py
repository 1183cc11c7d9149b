"""TensorLayout: how one tensor is laid out on a mesh.

Each dim is split over a tuple of axes (major first); each remaining axis is *replicated* or
*partial*: along a partial axis every device has one operand of the sum (or maximum, ...) that the
value is. The kind `varying` marks a value that differs from device to device and has no global
meaning, such as a local index. An axis occurs once. Layouts do not depend on the order of a
tensor's dims. Equal layouts are one object, so comparing and hashing them runs no Python code.

The axes of a dim split it one after the other, each into equal blocks, the last block padded: 5
positions over a=2, b=2 are blocks of 3 over a, and each of these is blocks of 2 over b:
01 2- | 34 --. So without the last axis, neighbouring blocks join to the blocks of the remaining
axes. The values of pads (`-`) are undefined inside of a program.
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
        """Returns the block counts of dims whose shards have pads; see `meshdsl.tensors.cuts`."""
        splits = dict(self.splits)
        counts = [tuple(mesh.sizes[axis] for axis in splits.get(name, ())) for name in shape.names]
        padded = [
            tuple(n for n in levels if n > 1) if dim.size % math.prod(levels) else ()
            for dim, levels in zip(shape, counts, strict=True)
        ]
        return tuple(padded) if any(padded) else ()

    def even(self, shape: Shape, mesh: Mesh) -> TensorLayout:
        """Returns this layout without pads: a dim keeps the first axes that divide its size."""
        kept = {}
        for dim, axes in self.splits:
            size = shape.get(dim).size
            fitting = [n for n in range(len(axes) + 1) if size % mesh.extent(axes[:n]) == 0]
            kept[dim] = axes[: max(fitting)]
        return TensorLayout.of(kept, dict(self.partial))

    def show(self, shape: Shape, mesh: Mesh) -> str:
        """Returns `[batch=8/16, embed=256]`: local size over global size where they differ."""
        parts = []
        for dim, local in zip(shape, self.local(shape, mesh), strict=True):
            parts.append(f"{dim}" if local == dim else f"{dim.name}={local.size}/{dim.size}")
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
        {dim: [axis for axis in split if axis not in axes] for dim, split in layout.splits},
        {axis: kind for axis, kind in layout.partial if axis not in axes},
    )


@lru_cache(maxsize=1 << 14)
def _local(layout: TensorLayout, shape: Shape, mesh: Mesh) -> Shape:
    splits = dict(layout.splits)
    return Shape(
        Dimension(dim.name, -(-dim.size // mesh.extent(splits.get(dim.name, ())))) for dim in shape
    )
