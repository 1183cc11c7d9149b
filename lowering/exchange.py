"""Exchange: every device gets a window of positions of a split dim, from the devices that hold it.

What lies in a device's own shard stays; the rest comes by `permute`, from neighbours where the
windows are halos, from further away where they reach further. Each message is as long as the
longest part that one device needs of another in that round, and no longer. Pads are never sent as
data, and positions outside of the dim read as `fill`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshdsl.dims import Dimension, Shape
from meshdsl.lowering.builder import BlockBuilder
from meshdsl.lowering.program import Value
from meshdsl.mesh import Mesh


class Interval(NamedTuple):
    """Positions from `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def meet(self, other: Interval) -> Interval:
        return Interval(max(self.start, other.start), min(self.stop, other.stop))


class Part(NamedTuple):
    """What one device takes of another's shard."""

    source: int
    target: int
    positions: Interval


def bounds(size: int, axes: Sequence[str], mesh: Mesh) -> list[Interval]:
    """Returns the positions of a dim that each device holds, by its index along `axes`.

    Pads are not among them; the interval of a shard that is nothing but pads is empty and starts
    where its data would.
    """
    found = [Interval(0, size)]
    block = size
    for axis in axes:
        count = mesh.sizes[axis]
        block = -(-block // count)
        found = [
            Interval(min(start, outer.stop), min(start + block, outer.stop))
            for outer in found
            for start in range(outer.start, outer.start + count * block, block)
        ]
    return found


def starts_of(size: int, axes: Sequence[str], mesh: Mesh) -> list[int]:
    """Returns the position of each device's first element, by its index along `axes`."""
    return [held.start for held in bounds(size, axes, mesh)]


def fetch(
    builder: BlockBuilder,
    value: Value,
    name: str,
    axes: Sequence[str],
    starts: Sequence[int],
    length: int,
    fill: float | bool = 0,
    needed: Sequence[int] | None = None,
) -> Value:
    """Gives every device the window [starts[d], starts[d] + length) of dim `name`.

    Args:
        value: has the dim split over `axes`, or whole; it may be a partial sum if `fill` is 0.
        axes: the axes along which the windows differ, major first.
        starts: where the window of each device begins, by its index along `axes`, in global
            positions; it may lie outside of the dim in part or in whole.
        fill: what positions outside of the dim read as.
        needed: how many positions of each window matter, its first ones; all by default. The rest
            reads as `fill`: a device whose own shard is pads needs nothing sent.

    Returns:
        A value whose dim `name` has local size `length`: split over `axes`, of global size
        length × devices, window after window.
    """
    mesh, axes = builder.mesh, tuple(axes)
    dim, held_over = value.shape.get(name), value.layout.axes(name)
    assert held_over in ((), axes), f"{name} is split over {held_over}, not over {axes}"
    devices = mesh.extent(axes)
    assert len(starts) == devices
    lengths = [length] * devices if needed is None else needed
    wanted = [Interval(start, start + n) for start, n in zip(starts, lengths, strict=True)]
    whole = [Interval(0, dim.size)] * devices
    held = bounds(dim.size, axes, mesh) if held_over else whole
    if _in_place(builder, value, dim, axes, wanted, held):
        return value
    if not held_over:
        own = [Part(d, d, w.meet(h)) for d, (w, h) in enumerate(zip(wanted, held, strict=True))]
        rounds = [own]
    else:
        rounds = _rounds(wanted, held)
    pieces, placed = [], []
    for parts in rounds:
        piece, first = _send(builder, value, name, axes, parts, held)
        pieces.append(piece)
        placed.append(_placing(parts, first, wanted))
    window = Dimension(name, length * devices)
    shape = Shape(window if d.name == name else d for d in value.shape)
    layout = value.layout.split(name, axes)
    params = {"dim": name, "axes": axes, "fill": fill, "parts": tuple(placed)}
    return builder.one("assemble", tuple(pieces), shape, value.dtype, layout, **params)


def local_slice(
    builder: BlockBuilder,
    value: Value,
    name: str,
    axes: Sequence[str],
    starts: Sequence[int],
    dim: Dimension,
) -> Value:
    """Cuts a run of each device's own elements; it becomes its shard of `dim`.

    Args:
        axes: the axes along which `starts` differ, which split `name` in the result.
        starts: where each run begins within the shard, by the device's index along `axes`.
        dim: what `name` becomes; its local size is the length of the run.
    """
    shape = Shape(dim if d.name == name else d for d in value.shape)
    layout = value.layout.split(name, axes)
    params = {"dim": name, "axes": tuple(axes), "starts": tuple(starts)}
    return builder.one("local_slice", (value,), shape, value.dtype, layout, **params)


def _in_place(
    builder: BlockBuilder,
    value: Value,
    dim: Dimension,
    axes: tuple[str, ...],
    wanted: Sequence[Interval],
    held: Sequence[Interval],
) -> bool:
    same = list(wanted) == list(held)  # then no window is longer than a shard
    return same and value.layout.axes(dim.name) == axes and not builder.has_pads(dim, axes)


def _rounds(wanted: Sequence[Interval], held: Sequence[Interval]) -> list[list[Part]]:
    """Returns who sends what to whom: the parts that stay first, then one list for each permute.

    In a permute every device sends and receives at most once. Parts that travel equally far go
    together, unless that takes more permutes than packing them greedily, longest first.
    """
    stay, travel = [], []
    for target, window in enumerate(wanted):
        for source, shard in enumerate(held):
            part = Part(source, target, window.meet(shard))
            if part.positions.size:
                (stay if source == target else travel).append(part)
    by_distance: dict[int, list[Part]] = {}
    for part in travel:
        by_distance.setdefault(part.target - part.source, []).append(part)
    packed: list[list[Part]] = []
    for part in sorted(travel, key=lambda p: (-p.positions.size, p.source, p.target)):
        for other in packed:
            if all(part.source != p.source and part.target != p.target for p in other):
                other.append(part)
                break
        else:
            packed.append([part])
    regular = [by_distance[k] for k in sorted(by_distance)]
    return [stay, *(regular if len(regular) <= len(packed) else packed)]


def _send(
    builder: BlockBuilder,
    value: Value,
    name: str,
    axes: tuple[str, ...],
    parts: Sequence[Part],
    held: Sequence[Interval],
) -> tuple[Value, dict[int, int]]:
    """Sends the parts of one round.

    Returns:
        The piece that each device then has, and for each source the position of the first element
        of what it sent.
    """
    here = all(part.source == part.target for part in parts)
    first = {part.source: held[part.source].start for part in parts}
    if here:
        return value, first
    block = value.local.get(name).size
    length = max(part.positions.size for part in parts)
    cuts = [0] * len(held)
    for part in parts:
        inside = part.positions.start - held[part.source].start
        cuts[part.source] = min(inside, block - length)
        first[part.source] += cuts[part.source]
    cuts = _spread(cuts, {part.source for part in parts})
    piece = value
    if length < block:
        dim = Dimension(name, length * len(held))
        piece = local_slice(builder, value, name, axes, cuts, dim)
    mesh = builder.mesh
    pairs = sorted(
        (group[part.source], group[part.target]) for group in mesh.groups(*axes) for part in parts
    )
    params = {"axes": axes, "pairs": tuple(pairs), "mesh_axes": mesh.names}
    moved = builder.one("permute", (piece,), piece.shape, piece.dtype, piece.layout, **params)
    return moved, first


def _spread(cuts: Sequence[int], senders: Iterable[int]) -> list[int]:
    """Gives devices that send nothing the cut of those that do, so that equal cuts stay equal."""
    known = sorted(senders)
    common = cuts[known[0]]
    return [cut if device in known else common for device, cut in enumerate(cuts)]


def _placing(
    parts: Sequence[Part], first: dict[int, int], wanted: Sequence[Interval]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns where in each device's window the piece lies, and from where to where it counts.

    Devices that receive nothing count nothing of it; they are given the offset of another, so that
    equal offsets stay equal.
    """
    found = {}
    for part in parts:
        start = wanted[part.target].start
        counted = (part.positions.start - start, part.positions.stop - start)
        found[part.target] = (first[part.source] - start, *counted)
    common = next(iter(found.values()), (0,))[0]
    rows = [found.get(device, (common, 0, 0)) for device in range(len(wanted))]
    offsets, lows, highs = zip(*rows, strict=True)
    return offsets, lows, highs
