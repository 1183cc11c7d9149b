"""Inspection: where the blocks of an array are on its mesh, as a figure of text or HTML.

The first two split dims are the rows and columns of a table. Each cell is a block, with the devices
that have it: several where it is replicated. Further split dims make one table for each of their
blocks.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshdsl.late import late
from meshdsl.layouts.layout import Layout, LayoutLike
from meshdsl.layouts.mesh import Mesh, MeshLike
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.tensors.cuts import part, places
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import short
from meshdsl.tensors.named_array import NamedArray, Spec

Range = tuple[int, int, int]  # the first position, the one after the last, and how many pads follow
Block = tuple[Range, ...]

_SAMPLED = 1 << 20  # blocks with more elements are not looked into
_MOST = 32  # rows, columns and tables that are shown


def inspect(
    x: NamedArray | Spec, mesh: MeshLike | None = None, layout: LayoutLike = ""
) -> Inspection:
    """Shows where the blocks of an array are: which devices hold which, replicas and pads.

        print(md.inspect(x))  # in a notebook, md.inspect(x) alone
        print(md.inspect(md.spec([batch, embed]), "data:4,model:2", "batch:data"))

    Args:
        x: an array; or a spec, to see where a program would have such a tensor.
        mesh, layout: for a spec: the mesh and the layout, as in `md.jit`.

    Raises:
        ValueError: malformed mesh or layout; an axis that the mesh lacks; x is neither an array
            with named dims nor a spec.

    Examples:
        >>> x = md.spec(md.dims(batch=8, embed=4))
        >>> print(md.inspect(x, "data:2,model:2", "batch:data"))
        f32[batch=8, embed=4]
        on data:2 model:2: batch:data, 64 bytes per device
        2 replicas of each block, over model
        ┌───────────┬─────────────┐
        │ batch 0–3 │ devices 0 1 │
        ├───────────┼─────────────┤
        │ batch 4–7 │ devices 2 3 │
        └───────────┴─────────────┘
    """
    if isinstance(x, Spec):
        own_mesh = Mesh.of(mesh)
        rules = Layout.of(layout)
        dims = set(x.dims.names)
        known = Layout(tuple(rule for rule in rules.rules if rule.dim in dims))
        assigned = known.assign(x.dims, mesh=own_mesh)
        assigned = assigned.drop(axis for axis, size in own_mesh.axes if size == 1)
        return Inspection(x.dims, x.dtype, own_mesh, assigned, tuple(range(own_mesh.size)))
    if not isinstance(x, NamedArray):
        raise ValueError(
            f"inspect shows arrays with named dims, and specs, not {type(x).__name__}; md.named "
            "gives an array its dims"
        )
    where = x.layout
    if where is None:
        devices = getattr(getattr(x.data, "sharding", None), "device_set", ())
        ids = tuple(sorted(device.id for device in devices))
        samples = _samples(x, TensorLayout(), Mesh())
        return Inspection(x.dims, x.dtype, Mesh(), TensorLayout(), ids or None, samples)
    devices = x.data.sharding.mesh
    own_mesh = Mesh(tuple(devices.shape.items()))
    ids = tuple(device.id for device in devices.devices.flat)
    return Inspection(x.dims, x.dtype, own_mesh, where, ids, _samples(x, where, own_mesh))


def _samples(x: NamedArray, where: TensorLayout, mesh: Mesh) -> dict[tuple[int, ...], str]:
    """Returns the first numbers of each block in this process, by the block's first positions."""
    shards = getattr(x.data, "addressable_shards", None)
    if shards is None or x.cuts != where.cuts(x.dims, mesh):  # its shards are not its blocks
        parts = [((0,) * len(x.dims), x.unpadded())]
    else:
        parts = [_real_part(x, shard.index, shard.data) for shard in shards]
    samples = {}
    for place, data in parts:
        if place not in samples and 0 < data.size <= _SAMPLED:
            few = np.asarray(data).reshape(-1)[:3]
            text = " ".join(_show_number(value) for value in few)
            samples[place] = text + (" …" if data.size > 3 else "")
    return samples


def _real_part(x: NamedArray, stored: Sequence[slice], data: Any) -> tuple[tuple[int, ...], Any]:
    """Returns the first positions of a shard and its data without pads.

    Args:
        stored: where the shard is in what is stored.
    """
    starts = [part.start or 0 for part in stored]
    if not x.cuts:
        return tuple(starts), data
    sizes = list(data.shape)
    for at, (dim, counts) in enumerate(zip(x.dims, x.cuts, strict=True)):
        if counts:
            positions = places(counts, starts[at] // sizes[at])
            starts[at], stop = part(dim.size, counts, positions)
            sizes[at] = stop - starts[at]
    return tuple(starts), data[tuple(map(slice, sizes))]


def _show_number(value: Any) -> str:
    number = value.item() if value.dtype.kind in "biufc" else float(value)
    return f"{number:.3g}" if isinstance(number, float) else str(number)


@dataclass(frozen=True)
class Inspection:
    """Where an array is; prints as text, and shows as HTML in a notebook.

    Attributes:
        devices: the ids of the mesh's devices, in its order; None for data outside of JAX.
        samples: by the first positions of a block, the first numbers in it.
    """

    dims: Shape
    dtype: np.dtype
    mesh: Mesh
    layout: TensorLayout
    devices: tuple[int, ...] | None
    samples: Mapping[tuple[int, ...], str] = field(default_factory=dict)

    @property
    def split(self) -> list[Dimension]:
        """The dims that are split, in order."""
        return [dim for dim in self.dims if self.mesh.extent(self.layout.axes(dim.name)) > 1]

    @property
    def blocks(self) -> dict[Block, list[int]]:
        """The devices that hold each block; a block is one range per split dim."""
        devices_of_block: dict[Block, list[int]] = {}
        split = [(dim, self.layout.axes(dim.name)) for dim in self.split]
        for at, device in zip(self.mesh.coordinates(), self.devices or (), strict=False):
            block = tuple(
                _range(dim.size, *zip(*((self.mesh.sizes[a], at[a]) for a in axes), strict=True))
                for dim, axes in split
            )
            devices_of_block.setdefault(block, []).append(device)
        return devices_of_block

    def heads(self) -> Iterator[str]:
        """Yields the lines about the array, which stand above its tables."""
        yield f"{short(self.dtype)}{self.dims}"
        if self.devices is None:
            yield "in this process's memory, on no device"
            return
        size = self.layout.local(self.dims, self.mesh).volume * self.dtype.itemsize
        if self.mesh.size == 1:
            yield f"on device {', '.join(map(str, self.devices))}, {size} bytes"
            return
        yield f"on {self.mesh}: {self.layout}, {size} bytes per device"
        idle = [a for a, n in self.mesh.axes if n > 1 and a not in self.layout.split_axes]
        if idle:
            copies = self.mesh.extent(idle)
            yield f"{copies} replicas of each block, over {', '.join(idle)}"
        if any(len({block[i] for block in self.blocks}) > _MOST for i in range(len(self.split))):
            yield f"the first {_MOST} blocks along each dim:"
        pads = sum(count for block in self.blocks for *_, count in block)
        if pads:
            names = [
                d.name for d in self.split if any(b[self.split.index(d)][2] for b in self.blocks)
            ]
            yield f"padded along {', '.join(names)}"

    def pages(self) -> Iterator[tuple[str, list[list[tuple[str, str]]]]]:
        """Yields tables: a title, and rows of cells with their text and kind, `head` or `block`."""
        if self.devices is None:
            return
        blocks, split = self.blocks, self.split
        ranges = [sorted({block[i] for block in blocks}) for i in range(len(split))]
        first: list[list[Any]] = [*ranges[:2], [None], [None]]
        rows, columns = (parts[:_MOST] for parts in first[:2])
        for rest in itertools.islice(itertools.product(*ranges[2:]), _MOST):
            title = ", ".join(_show(d, r) for d, r in zip(split[2:], rest, strict=True))
            table = []
            if len(split) > 1:
                table.append([("", "head"), *((_show(split[1], c), "head") for c in columns)])
            for row in rows:
                line = [(_show(split[0], row), "head")] if split else []
                for column in columns:
                    block = tuple(r for r in (row, column, *rest) if r is not None)
                    line.append((self._cell(block, blocks[block]), "block"))
                table.append(line)
            yield title, table

    def _cell(self, block: Block, devices: Sequence[int]) -> str:
        word = "device" if len(devices) == 1 else "devices"
        starts = {dim.name: r[0] for dim, r in zip(self.split, block, strict=True)}
        place = tuple(starts.get(dim.name, 0) for dim in self.dims)
        lines = [f"{word} {' '.join(map(str, devices))}"]
        if place in self.samples and all(stop > start for start, stop, _ in block):
            lines.append(self.samples[place])
        return "\n".join(lines)

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=116, color_system=None)
        for line in self.heads():
            console.print(Text(line), soft_wrap=True)
        for title, rows in self.pages():
            table = Table(title=title or None, box=box.SQUARE, show_header=False, show_lines=True)
            for _ in rows[0]:
                table.add_column(justify="center")
            for row in rows:
                table.add_row(*(Text(text) for text, _ in row))
            console.print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str | None:
        """Returns the figure for notebooks: one colour for each block."""
        return late("value in a notebook")(self)


def _range(size: int, counts: Sequence[int], places: Sequence[int]) -> Range:
    """Returns the part of a dim that a device has.

    Args:
        counts: the sizes of the axes that split the dim.
        places: the device's positions along these axes.
    """
    start, stop = part(size, counts, places)
    return start, stop, -(-size // math.prod(counts)) - (stop - start)


def _show(dim: Dimension, part: Range) -> str:
    start, stop, pads = part
    text = f"{dim.name} {start}" + (f"–{stop - 1}" if stop - start > 1 else "")
    if stop == start:
        text = f"{dim.name} none"
    return text + (f" +{pads} pad{'s' if pads > 1 else ''}" if pads else "")
