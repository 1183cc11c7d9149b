"""Mesh: the named axes of a machine, with their sizes.

An axis may be marked slow, `slice@dcn:2`: bytes sent along it cross a slower network, and lowering
sends as few as possible.

Devices of a mesh are numbers, in row-major order: the index along the last axis varies fastest.
Backends map these numbers to hardware.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, Union

import numpy as np

from meshdsl.late import late
from meshdsl.tensors.dims import did_you_mean

if TYPE_CHECKING:
    import jax

    from meshdsl.layouts.prices import LinkPrices

MeshLike: TypeAlias = Union["Mesh", str, Mapping[str, int], "jax.sharding.Mesh"]

_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:@([a-z]+))?:(\d+)")
SLOW = "dcn"  # the data-centre network between slices


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, major first: `Mesh((("data", 2), ("model", 4)))`.

    Attributes:
        slow: the axes that cross the slow network.
        prices: what lowering weighs moves by; None: by the bytes that they send. The mesh of a
            program has none.

    Raises:
        ValueError: an axis is given twice or has no positive size, or `slow` names no axis.

    Examples:
        >>> mesh = md.Mesh.parse("slice@dcn:2,model:4")
        >>> print(mesh, mesh.size, *mesh.slow)
        slice@dcn:2 model:4 8 slice
        >>> md.Mesh.of({"data": 2}) == md.Mesh((("data", 2),))
        True
    """

    axes: tuple[tuple[str, int], ...] = ()
    slow: frozenset[str] = frozenset()
    prices: LinkPrices | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"mesh axis `{name}` is given twice in `{self}`")
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"mesh axis `{name}` needs a size of at least 1, got {size}")
        for name in sorted(self.slow.difference(names)):
            raise ValueError(f"no axis `{name}` in mesh `{self}`{did_you_mean(name, names)}")

    @staticmethod
    def parse(text: str) -> Mesh:
        """Reads `data:2,model:4` or `slice@dcn:2,data:4`; `;`, `,` and spaces all separate.

        Raises:
            ValueError: malformed text (the position is marked), an axis given twice, size 0.
        """
        axes, slow = [], []
        for part in re.finditer(r"[^;,\s]+", text):
            match = _AXIS.fullmatch(part.group())
            if match is None:
                raise ValueError(
                    f"malformed mesh: expected `axis:size`, as in `data:2 model:4`\n"
                    f"  {text}\n  {' ' * part.start()}{'^' * len(part.group())}"
                )
            name, network, size = match.groups()
            if network not in (None, SLOW):
                raise ValueError(
                    f"mesh axis `{name}@{network}` is on an unknown network; `@{SLOW}` marks an "
                    "axis between slices, others have no mark"
                )
            axes.append((name, int(size)))
            slow += [name] if network else []
        return Mesh(tuple(axes), frozenset(slow))

    @staticmethod
    def of(mesh: MeshLike | None) -> Mesh:
        """Returns a mesh from any form that users may write: `Mesh.of({"data": 2})`.

        Args:
            mesh: a mesh, its text, its sizes by axis, a mesh of JAX's (its axes and sizes), or
                None: no axes.

        Raises:
            ValueError: it is something else, or malformed.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if mesh is None:
            return Mesh()
        if isinstance(mesh, str):
            return Mesh.parse(mesh)
        sizes = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
        if not isinstance(sizes, Mapping):
            raise ValueError(
                f'a mesh is given as "data:2,model:4", as {{"data": 2, "model": 4}}, or as a '
                f"md.Mesh or jax.sharding.Mesh, not as {type(mesh).__name__}: {mesh!r}"
            )
        return Mesh.parse(" ".join(f"{axis}:{size}" for axis, size in sizes.items()))

    @cached_property
    def _hash(self) -> int:
        return hash((self.axes, self.slow, self.prices))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:  # without the hash: it differs in another process
        return Mesh, (self.axes, self.slow, self.prices)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    def extent(self, axes: Iterable[str]) -> int:
        """Returns the number of shards that splitting over `axes` makes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of devices that differ only along some axes, major first.

        >>> Mesh.parse("data:2,model:2").groups("model")
        ((0, 1), (2, 3))
        """
        rest = [axis for axis in self.names if axis not in axes]
        order = [self.names.index(axis) for axis in (*rest, *axes)]
        devices = np.arange(self.size).reshape([size for _, size in self.axes]).transpose(order)
        return tuple(map(tuple, devices.reshape(-1, self.extent(axes)).tolist()))

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yields, for each device in order, its index along every axis."""
        for device in range(self.size):
            indices = {}
            for name, size in reversed(self.axes):
                device, indices[name] = divmod(device, size)
            yield indices

    def __str__(self) -> str:
        marks = {name: f"@{SLOW}" for name in self.slow}
        return " ".join(f"{name}{marks.get(name, '')}:{size}" for name, size in self.axes)

    def _repr_html_(self) -> str | None:
        """Returns the axes and the devices for notebooks."""
        return late("value in a notebook")(self)
