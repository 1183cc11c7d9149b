"""Exchange: every device gets runs of positions of a split dim, from the devices that own them.

Elements of a device's own shard stay. All others arrive by `permute`: from neighbours for halos,
from further away for longer reaches. The messages of a round have the length of the longest part
that a device needs of another in it. Pads are never sent as data. Positions outside of the dim read
as `fill`. If the messages would send more than an all_gather of the dim, the dim is gathered.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.parameters import Assemble, LocalPositions, Permute, SplitDim
from meshdsl.lowering.program import Pairs, Value
from meshdsl.lowering.writing.builder import BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape


class Interval(NamedTuple):
    """Positions from `start` (inclusive) to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return max(0, self.stop - self.start)

    def meet(self, other: Interval) -> Interval:
        return Interval(max(self.start, other.start), min(self.stop, other.stop))


class Run(NamedTuple):
    """Positions of one of several values, and the place `at` of the first of them in a window."""

    positions: Interval
    at: int = 0
    value: int = 0


class Part(NamedTuple):
    """The positions that one device reads of another's shard, and their place in its window."""

    source: int
    target: int
    positions: Interval
    at: int
    value: int


def bounds(size: int, axes: Sequence[str], mesh: Mesh) -> list[Interval]:
    """Returns the positions of a dim that each device owns, by its index along `axes`.

    Pads do not count: a shard of pads only has an empty interval, which starts where its data
    would.
    """
    intervals = [Interval(0, size)]
    block = size
    for axis in axes:
        count = mesh.sizes[axis]
        block = -(-block // count)
        intervals = [
            Interval(min(start, outer.stop), min(start + block, outer.stop))
            for outer in intervals
            for start in range(outer.start, outer.start + count * block, block)
        ]
    return intervals


def starts_of(size: int, axes: Sequence[str], mesh: Mesh) -> list[int]:
    """Returns the position of each device's first element, by its index along `axes`."""
    return [owned.start for owned in bounds(size, axes, mesh)]


def fetch(
    builder: BlockBuilder,
    value: Value,
    name: str,
    axes: Sequence[str],
    starts: Sequence[int],
    length: int,
    fill: float | bool = 0,
) -> Value:
    """Gives every device the window [starts[d], starts[d] + length) of dim `name`.

    Args:
        value: has the dim split over `axes`, or unsplit; it may be a partial sum if `fill` is 0.
        axes: the axes along which the windows differ, major first.
        starts: where the window of each device begins, by its index along `axes`, in global
            positions; some or all of it may lie outside of the dim.
        fill: the value of positions outside of the dim.

    Returns:
        A value whose dim `name` has local size `length`: split over `axes`, of global size
        length × devices, window after window.
    """
    runs = [[Run(Interval(start, start + length))] for start in starts]
    return gather(builder, [value], name, axes, runs, length, fill)


def gather(
    builder: BlockBuilder,
    values: Sequence[Value],
    name: str,
    axes: Sequence[str],
    runs: Sequence[Sequence[Run]],
    length: int,
    fill: float | bool = 0,
    owned: Sequence[Sequence[Interval]] | None = None,
) -> Value:
    """Gives every device a window of dim `name`, composed of runs of several values.

    Args:
        values, axes, fill: as for `fetch`; the values differ in the size of the dim only.
        runs: the runs of each device's window. They do not overlap in it; positions outside of
            them read as `fill`.
        length: the size of a window.
        owned: for each value the positions that each device owns, from its first element on; None:
            as the layout says.

    Returns:
        As `fetch`.
    """
    mesh, axes = builder.mesh, tuple(axes)
    devices = mesh.extent(axes)
    assert len(runs) == devices
    regular = owned is None
    if owned is None:
        owned = [_owned(value, name, axes, mesh) for value in values]
    if _in_place(values[0], name, axes, owned[0], runs, length):
        return values[0]
    stay, rounds = _rounds(_parts(values, name, owned, runs), devices)
    whole = sum((devices - 1) * v.local.get(name).size for v in values if v.layout.axes(name))
    if regular and len(rounds) > 1 and sum(map(_longest, rounds)) >= whole:
        values = [_whole(builder, value, name) for value in values]
        owned = [_owned(value, name, axes, mesh) for value in values]
        stay, rounds = _rounds(_parts(values, name, owned, runs), devices)
    pieces, placed = [], []
    for parts in stay:
        number = parts[0].value
        pieces.append(values[number])
        placed.append(_placing(parts, [shard.start for shard in owned[number]]))
    for parts in rounds:
        piece, firsts = _send(builder, values, owned, name, axes, parts)
        pieces.append(piece)
        placed.append(_placing(parts, firsts))
    window = Dimension(name, length * devices)
    like = values[0]
    shape = Shape(window if d.name == name else d for d in like.shape)
    layout = like.layout.split(name, axes)
    if not pieces:
        return builder.one("full", (), shape, like.dtype, layout, value=fill)
    params: Assemble = {"dim": name, "axes": axes, "fill": fill, "parts": tuple(placed)}
    return builder.one("assemble", tuple(pieces), shape, like.dtype, layout, **params)


def local_slice(
    builder: BlockBuilder,
    value: Value,
    name: str,
    axes: Sequence[str],
    starts: Sequence[int],
    dim: Dimension,
) -> Value:
    """Slices a run of each device's own elements; it becomes the device's shard of `dim`.

    Args:
        axes: the axes along which `starts` differ; they split `name` in the result.
        starts: the first position of each run within the shard, by the device's index along `axes`.
        dim: replaces `name`; its local size is the length of the run.
    """
    shape = Shape(dim if d.name == name else d for d in value.shape)
    layout = value.layout.split(name, axes)
    params: LocalPositions = {"dim": name, "axes": tuple(axes), "starts": tuple(starts)}
    return builder.one("local_slice", (value,), shape, value.dtype, layout, **params)


def _owned(value: Value, name: str, axes: tuple[str, ...], mesh: Mesh) -> list[Interval]:
    """Returns the positions that each device owns."""
    size, over = value.shape.get(name).size, value.layout.axes(name)
    assert over in ((), axes), f"{name} is split over {over}, not over {axes}"
    return bounds(size, axes, mesh) if over else [Interval(0, size)] * mesh.extent(axes)


def _in_place(
    value: Value,
    name: str,
    axes: tuple[str, ...],
    owned: Sequence[Interval],
    runs: Sequence[Sequence[Run]],
    length: int,
) -> bool:
    """Whether the windows are the shards of the first value."""
    if value.layout.axes(name) != axes or value.shape.get(name).size != length * len(runs):
        return False
    return all(list(want) == [Run(have)] for want, have in zip(runs, owned, strict=True))


def _whole(builder: BlockBuilder, value: Value, name: str) -> Value:
    axes = value.layout.axes(name)
    if not axes:
        return value
    layout = value.layout.split(name, ())
    params: SplitDim = {"axes": axes, "dim": name}
    return builder.one("all_gather", (value,), value.shape, value.dtype, layout, **params)


# Which device needs what of which, and in which round.


def _parts(
    values: Sequence[Value],
    name: str,
    owned: Sequence[Sequence[Interval]],
    runs: Sequence[Sequence[Run]],
) -> list[Part]:
    """Returns the parts of the windows: one for every shard that a run meets."""
    last_positions = [[interval.stop for interval in intervals] for intervals in owned]
    orders = [sorted(range(len(stops)), key=stops.__getitem__) for stops in last_positions]
    stops = [sorted(each) for each in last_positions]
    parts = []
    for target, wanted in enumerate(runs):
        for positions, at, value in wanted:
            shards = owned[value]
            sources: Iterable[int] = (target,)
            if values[value].layout.axes(name):
                first = bisect.bisect_right(stops[value], positions.start)
                sources = itertools.islice(orders[value], first, None)
            for source in sources:
                if shards[source].start >= positions.stop:
                    break
                met = positions.meet(shards[source])
                if met.size:
                    there = at + met.start - positions.start
                    parts.append(Part(source, target, met, there, value))
    return parts


def _rounds(parts: Sequence[Part], devices: int) -> tuple[list[list[Part]], list[list[Part]]]:
    """Returns the parts that stay, and those that are sent: one list for each permute.

    Parts that stay are listed by value, with at most one part per device in a list. In a permute
    every device sends and receives at most once. Parts that travel equally far around the ring of
    devices share a permute, unless greedy packing, longest first, sends less.
    """
    stay: dict[tuple[int, int], list[Part]] = {}
    by_distance: dict[tuple[int, int], list[Part]] = {}
    seen: Counter[tuple[int, int, int]] = Counter()
    travel = []
    for part in parts:
        here = part.source == part.target
        key = part.value if here else (part.target - part.source) % devices
        copy = seen[part.target, key, here]
        seen[part.target, key, here] += 1
        (stay if here else by_distance).setdefault((key, copy), []).append(part)
        if not here:
            travel.append(part)
    packed: list[list[Part]] = []
    sends, takes = [0] * devices, [0] * devices  # the rounds in which each is busy, as bits
    for part in sorted(travel, key=lambda p: (-p.positions.size, p.source, p.target)):
        busy = sends[part.source] | takes[part.target]
        free = (~busy & (busy + 1)).bit_length() - 1
        if free == len(packed):
            packed.append([])
        packed[free].append(part)
        sends[part.source] |= 1 << free
        takes[part.target] |= 1 << free
    regular = [by_distance[key] for key in sorted(by_distance)]

    def cost(rounds: Sequence[Sequence[Part]]) -> tuple[int, int]:
        return sum(map(_longest, rounds)), len(rounds)

    return [stay[key] for key in sorted(stay)], min(regular, packed, key=cost)


def _longest(parts: Sequence[Part]) -> int:
    return max(part.positions.size for part in parts)


# How parts are sent and assembled.


def _send(
    builder: BlockBuilder,
    values: Sequence[Value],
    owned: Sequence[Sequence[Interval]],
    name: str,
    axes: tuple[str, ...],
    parts: Sequence[Part],
) -> tuple[Value, list[int]]:
    """Sends the parts of one round.

    Returns:
        The piece that each device receives, and for each source the position of the first element
        that it sent.
    """
    length, devices, mesh = _longest(parts), len(owned[0]), builder.mesh
    dim = Dimension(name, length * devices)
    firsts = [0] * devices
    used = sorted({part.value for part in parts})
    cuts: dict[int, dict[int, int]] = {number: {} for number in used}
    for part in parts:
        start, block = owned[part.value][part.source].start, values[part.value].local.get(name).size
        cut = min(part.positions.start - start, max(0, block - length))
        cuts[part.value][part.source] = cut
        firsts[part.source] = start + cut
    piece = values[used[0]]
    if len(used) > 1 or length > piece.local.get(name).size:
        piece = _chosen(builder, values, name, axes, cuts, dim)
    elif piece.shape.get(name) != dim or any(cuts[used[0]].values()):
        starts = _spread(cuts[used[0]], devices)
        piece = local_slice(builder, piece, name, axes, starts, dim)
    pairs = sorted(
        (group[part.source], group[part.target]) for group in mesh.groups(*axes) for part in parts
    )
    params: Permute = {"axes": axes, "pairs": Pairs(pairs), "mesh_axes": mesh.names}
    moved = builder.one("permute", (piece,), piece.shape, piece.dtype, piece.layout, **params)
    return moved, firsts


def _chosen(
    builder: BlockBuilder,
    values: Sequence[Value],
    name: str,
    axes: tuple[str, ...],
    cuts: dict[int, dict[int, int]],
    dim: Dimension,
) -> Value:
    """Returns the run that each device sends, of the value that it sends, from its cut on."""
    devices = builder.mesh.extent(axes)
    length = dim.size // devices
    placed = []
    for number, own in cuts.items():
        block = values[number].local.get(name).size
        starts = _spread(own, devices)
        lengths = [min(length, block - s) if d in own else 0 for d, s in enumerate(starts)]
        placed.append((tuple(-start for start in starts), (0,) * devices, tuple(lengths)))
    like = values[next(iter(cuts))]
    shape = Shape(dim if d.name == name else d for d in like.shape)
    params: Assemble = {"dim": name, "axes": axes, "fill": 0, "parts": tuple(placed)}
    inputs = [values[number] for number in cuts]
    return builder.one("assemble", inputs, shape, like.dtype, like.layout, **params)


def _spread(cuts: dict[int, int], devices: int) -> list[int]:
    """Returns the cut of every device: a sender's own; the first sender's for all others."""
    # If all cuts are equal, devices need not look theirs up.
    common = next(iter(cuts.values()))
    return [cuts.get(device, common) for device in range(devices)]


def _placing(
    parts: Sequence[Part], firsts: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Returns each device's offset of a piece in its window, and the range that it uses of it.

    A device that receives nothing has an empty range, and the offset of another device.
    """
    # If all offsets are equal, devices need not look theirs up.
    placed = {}
    for part in parts:
        offset = part.at - (part.positions.start - firsts[part.source])
        placed[part.target] = (offset, part.at, part.at + part.positions.size)
    common = next(iter(placed.values()))[0]
    rows = [placed.get(device, (common, 0, 0)) for device in range(len(firsts))]
    offsets, lows, highs = zip(*rows, strict=True)
    return offsets, lows, highs
