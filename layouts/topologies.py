"""Topologies: the machines that a job can be planned for, by name: `v5p:8x8x8`, `h100:8x16`.

For TPUs the numbers are the chips along each direction of a slice, as Cloud TPU writes them; the
data-centre network joins several slices. For GPUs they are the GPUs of one node, which share a
switch, and then the number of nodes: `h100:8x16` has 16 nodes of 8. A device of a mesh is a chip;
on TPU v3 it is one of the two cores of a chip, since these share no memory.

The shapes of slices are those of the Cloud TPU documentation (docs.cloud.google.com/tpu/docs/v5p
and so on). v3, v5e and v6e have all shapes that are listed there. v4 and v5p have some of those
below 4x4x4, and above that multiples of 4 in ascending order, up to the largest slice of one job.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from meshdsl.layouts.hardware import Hardware, hardware
from meshdsl.layouts.mesh import SLOW, Mesh
from meshdsl.tensors.dims import did_you_mean

Sizes = tuple[int, ...]
_EXAMPLES = "v5p:8x8x8 or h100:8x16"
_NEAREST = 3
_ACCELERATOR_TYPE = re.compile(r"(v\d+[a-z]*)-(\d+)", re.IGNORECASE)
_NAMED_BY_CORES = ("v3", "v4", "v5p")  # of which each chip has two


@dataclass(frozen=True)
class Family:
    """The machines of one kind of device.

    Attributes:
        shapes: the chips of a slice along each direction; empty for GPUs.
        cores: devices on one chip.
        joins: whether several slices can be joined.
    """

    shapes: tuple[Sizes, ...] = ()
    cores: int = 1
    joins: bool = True


def _shapes(text: str) -> tuple[Sizes, ...]:
    return tuple(tuple(map(int, shape.split("x"))) for shape in text.split())


def _cubes(most: Sizes) -> tuple[Sizes, ...]:
    """Returns the shapes of slices with three directions, up to the largest slice."""
    sides = range(4, max(most) + 1, 4)
    large = itertools.combinations_with_replacement(sides, 3)
    fitting = [sizes for sizes in large if math.prod(sizes) <= math.prod(most)]
    small = _shapes("2x2x1 2x2x2 2x2x4 2x4x4")
    return tuple(sorted([*small, *fitting], key=lambda sizes: (math.prod(sizes), sizes)))


_FLAT = _shapes("1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16")
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "v3": Family(_shapes("2x2 4x4 4x8 8x8 8x16 16x16 16x32 32x32"), cores=2, joins=False),
        "v4": Family(_cubes((12, 16, 16))),
        "v5e": Family(_FLAT),
        "v5p": Family(_cubes((16, 16, 24))),
        "v6e": Family(_FLAT),
        "a100": Family(),
        "h100": Family(),
        "h200": Family(),
        "b200": Family(),
    }
)


@dataclass(frozen=True)
class Topology:
    """A machine: `Topology.parse("v5p:8x8x8", slices=2)`.

    Attributes:
        sizes: chips along each direction of a slice; for GPUs, the GPUs of a node, then the nodes.
    """

    name: str
    sizes: Sizes
    slices: int = 1

    @staticmethod
    def parse(text: str, slices: int = 1) -> Topology:
        """Reads `v5p:8x8x8`.

        Raises:
            ValueError: malformed text, an unknown name, or an unknown shape; the message has the
                nearest known ones.
        """
        match = re.fullmatch(r"([\w.\-]+):(\d+(?:x\d+)*)", text.strip())
        name = text.partition(":")[0].strip()
        if name not in FAMILIES:
            if as_type := _ACCELERATOR_TYPE.fullmatch(name):
                _refuse_type(as_type)
            hint = did_you_mean(name.lower(), FAMILIES)
            known = ", ".join(FAMILIES)
            written = "" if match else f". A topology is written {_EXAMPLES}"
            raise ValueError(f"unknown topology {name!r}; choose one of {known}{written}{hint}")
        if match is None:
            raise ValueError(
                f"needs a name and a shape, as in {_EXAMPLES}, got {text!r}; {_shape_of(name)}"
            )
        family, sizes = FAMILIES[name], tuple(int(size) for size in match.group(2).split("x"))
        _check(name, sizes)
        if slices > 1 and not family.joins:
            raise ValueError(f"slices of TPU {name} cannot be joined: leave out --slices")
        if slices > 1 and not family.shapes:
            raise ValueError(
                f"GPUs have no slices; more nodes are written as {name}:8x{slices * sizes[-1]}, "
                "GPUs of a node first: leave out --slices"
            )
        return Topology(name, sizes, slices)

    @property
    def is_tpu(self) -> bool:
        return bool(FAMILIES[self.name].shapes)

    @property
    def devices_of_slice(self) -> int:
        return math.prod(self.sizes) * FAMILIES[self.name].cores

    @property
    def devices(self) -> int:
        """The number of devices that a mesh may have."""
        return self.devices_of_slice * self.slices

    @cached_property
    def hardware(self) -> Hardware:
        """The peak figures of one device."""
        return hardware(self.name)

    @property
    def memory_bytes(self) -> int:
        """The memory of one device."""
        return self.hardware.memory_bytes

    def problems(self, mesh: Mesh) -> list[str]:
        """Returns all reasons why a mesh does not cover this machine."""
        reasons = []
        verb = "has" if self.slices == 1 else "have"
        across = mesh.extent(mesh.slow) if self.is_tpu else self.slices
        marked_as_many = across not in (1, self.slices) and mesh.size == (
            across * self.devices_of_slice
        )
        if not mesh.axes and self.devices > 1:
            slices = f"slice@{SLOW}:{self.slices}," if self.slices > 1 else ""
            return [
                f"{self} {verb} {self.devices:,} devices, but there is no mesh: a mesh has one "
                f'device for each, as in --mesh_shape="{slices}data:{self.devices_of_slice}"'
            ]
        if mesh.size != self.devices and not marked_as_many:
            reasons.append(
                f"mesh {mesh} has {mesh.size:,} devices, but {self} {verb} {self.devices:,}: "
                "a mesh has one device for each"
            )
        if across != self.slices:
            marked = ", ".join(f"{axis}@{SLOW}" for axis in mesh.names if axis in mesh.slow)
            reasons.append(
                f"the mesh axes that go across slices ({marked}) have {across:,} positions, but "
                f"there {'is 1 slice' if self.slices == 1 else f'are {self.slices:,} slices'}: "
                f"give --slices={across}, or leave the mark out"
                if marked
                else f"there are {self.slices:,} slices, but no mesh axis goes across them: mark "
                f'one of that size, as in --mesh_shape="slice@{SLOW}:{self.slices},..."'
            )
        return reasons

    def __str__(self) -> str:
        shape = f"{self.name}:{'x'.join(map(str, self.sizes))}"
        return shape if self.slices == 1 else f"{self.slices} slices of {shape}"


def _refuse_type(match: re.Match[str]) -> None:
    """Raises ValueError if a name is Cloud TPU's of an accelerator, as `v5p-128`."""
    name = match[1].lower().replace("v5litepod", "v5e")
    if name not in FAMILIES:
        return
    number, by_cores = int(match[2]), name in _NAMED_BY_CORES
    chips = number // 2 if by_cores else number
    shapes = tuple(s for s in FAMILIES[name].shapes if math.prod(s) == chips)
    exact = bool(shapes) and not (by_cores and number % 2)
    shapes = shapes or tuple(_nearest((max(chips, 1),), FAMILIES[name])[:1])
    written = " or ".join(f"{name}:{'x'.join(map(str, shape))}" for shape in shapes)
    unit = "cores, two of a chip" if by_cores else "chips"
    if exact and by_cores:
        unit = f"cores, so it has {chips:,} chips"
    where = f": {written}" if exact else f". There is none of that size; the nearest is {written}"
    raise ValueError(
        f"{match[0]!r} is written as an accelerator type of Cloud TPU, which counts {unit}. A "
        f"topology is written with the chips along each direction of a slice{where}"
    )


def _check(name: str, sizes: Sizes) -> None:
    """Raises ValueError unless there is a machine of that shape."""
    family, written = FAMILIES[name], "x".join(map(str, sizes))
    if not family.shapes:
        joined = hardware(name).joined
        if len(sizes) > 2 or 0 in sizes:
            raise ValueError(f"no topology {name}:{written}; {_shape_of(name)}")
        if sizes[0] > joined or (len(sizes) == 2 and sizes[1] > 1 and sizes[0] != joined):
            count = math.prod(sizes)
            nearest = f"{name}:{joined}x{-(-count // joined)}"
            raise ValueError(f"no topology {name}:{written}; {_shape_of(name)}. Nearest: {nearest}")
        return
    if sizes not in family.shapes:
        shapes = _nearest(sizes, family)
        near = ", ".join(f"{name}:{'x'.join(map(str, shape))}" for shape in shapes)
        raise ValueError(f"no topology {name}:{written}; {_shape_of(name)}. Nearest: {near}")


def _shape_of(name: str) -> str:
    """Returns the meaning of a topology's numbers, for errors."""
    family = FAMILIES[name]
    if not family.shapes:
        joined = hardware(name).joined
        return f"{name} has GPUs of a node, then nodes: nodes have {joined} GPUs, a single one less"
    first, last = ("x".join(map(str, family.shapes[i])) for i in (0, -1))
    return f"TPU {name} has slices of {len(family.shapes[0])} directions, from {first} to {last}"


def _nearest(sizes: Sizes, family: Family) -> Sequence[Sizes]:
    """Returns the nearest shapes, compared by direction if the directions are as many."""

    def distance(known: Sizes) -> tuple[float, float]:
        volume = abs(math.log(math.prod(known) / max(math.prod(sizes), 1)))
        if len(known) != len(sizes):
            return volume, volume
        pairs = zip(sorted(known), sorted(sizes), strict=True)
        return math.fsum(abs(math.log(a / max(b, 1))) for a, b in pairs), volume

    return sorted(family.shapes, key=distance)[:_NEAREST]
