"""Mesh: the named axes of a machine, with their sizes.

A mesh says nothing about which devices it is made of; devices are numbered row-major, the last axis
varying fastest. Backends map that numbering to hardware.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*):(\d+)")


@dataclass(frozen=True)
class Mesh:
    """Named axes with sizes, major first: `Mesh((("data", 2), ("model", 4)))`."""

    axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"mesh axis `{name}` is given twice in `{self}`")
        for name, size in self.axes:
            if size < 1:
                raise ValueError(f"mesh axis `{name}` needs a size of at least 1, got {size}")

    @staticmethod
    def parse(text: str) -> Mesh:
        """Reads `data:2,model:4`; `;`, `,` and spaces all separate.

        Raises:
            ValueError: malformed text (the position is marked), an axis given twice, size 0.
        """
        axes = []
        for part in re.finditer(r"[^;,\s]+", text):
            match = _AXIS.fullmatch(part.group())
            if match is None:
                raise ValueError(
                    f"malformed mesh: expected `axis:size`, as in `data:2 model:4`\n"
                    f"  {text}\n  {' ' * part.start()}{'^' * len(part.group())}"
                )
            axes.append((match.group(1), int(match.group(2))))
        return Mesh(tuple(axes))

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
        found: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
        for device, at in enumerate(self.coordinates()):
            place = tuple(at[axis] for axis in axes)
            found.setdefault(tuple(at[axis] for axis in rest), []).append((place, device))
        return tuple(tuple(device for _, device in sorted(group)) for group in found.values())

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Yields, for each device in order, its index along every axis."""
        for device in range(self.size):
            found = {}
            for name, size in reversed(self.axes):
                device, found[name] = divmod(device, size)
            yield found

    def __str__(self) -> str:
        return " ".join(f"{name}:{size}" for name, size in self.axes)
