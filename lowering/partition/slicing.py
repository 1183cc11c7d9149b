"""Partition rules of windows and of picking one position.

Along a split dim, each device fetches the run of elements that its part of the window reads. Only
elements of other devices' shards move. Picking one position is local: its owner has the value, the
others have zeros, and the result is a partial sum. A window whose result is not split may be done
so too.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.communication.exchange import (
    Interval,
    Run,
    bounds,
    gather,
    local_slice,
    starts_of,
)
from meshdsl.lowering.parameters import Window
from meshdsl.lowering.partition.strategy import (
    Case,
    Strategies,
    Strategy,
    Work,
    bytes_moved,
    offer,
)
from meshdsl.lowering.program import Value
from meshdsl.lowering.writing.builder import BOOL, INT32, BlockBuilder
from meshdsl.tensors.dims import Dimension, Shape


def window(case: Case) -> Strategy | Strategies:
    """In the layout of the result; or in that of the operand, with a partial sum as result."""
    op = case.operation
    (x,), (out,) = op.inputs, op.outputs
    (before,), (after,) = case.operands, case.results

    def work(strategy: Strategy) -> Work:
        moves = (x, before, strategy.operands[0]), (out, strategy.results[0], after)
        return Work(bytes_moved(moves, case.mesh))

    ways = [_exchanged(case)]
    if _can_pick(case):
        single = out.shape.get(op.params["dim"]).size == 1
        ways.insert(0, _pick(case, op.params["start"]) if single else _few(case))
    return offer(ways, work, lambda strategy: strategy)


def _exchanged(case: Case) -> Strategy:
    """The operand has the layout of the result, and devices exchange elements."""
    op, (layout,) = case.operation, case.results
    (out,), params = op.outputs, op.params
    axes = layout.axes(params["dim"])
    unsplit = case.mesh.extent(axes) == 1

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        dim = out.shape.get(params["dim"])
        if not unsplit:
            return (_split_window(builder, inputs[0], dim, **params),)
        if params["wrap"]:
            return (_turned(builder, inputs[0], dim, params["start"] % dim.size),)
        shape = (params["start"], params["stride"], params["dilation"])
        return (local_window(builder, inputs[0], dim, *shape, params["fill"]),)

    return Strategy((layout,), (layout,), emit, op.linear, fixed=frozenset(axes))


def _turned(builder: BlockBuilder, x: Value, dim: Dimension, start: int) -> Value:
    """Returns an unsplit dim rotated: it starts at `start` and wraps around."""
    if not start:
        return x
    sizes = [(start, dim.size - start), (0, start)]
    parts = [local_window(builder, x, Dimension(dim.name, size), at) for at, size in sizes]
    return builder.one("concat", parts, x.shape, x.dtype, x.layout, dim=dim.name)


def local_window(
    builder: BlockBuilder,
    x: Value,
    dim: Dimension,
    start: int,
    stride: int = 1,
    dilation: int = 1,
    fill: float | bool = 0,
) -> Value:
    """Writes the window of every device's own elements, counted within its shard."""
    shape = Shape(dim if d.name == dim.name else d for d in x.shape)
    before, after = x.local.get(dim.name).size, x.layout.local(shape, builder.mesh).get(dim.name)
    if (start, stride, dilation, before) == (0, 1, 1, after.size):
        if shape == x.shape:
            return x
        return builder.one("reshape", (x,), shape, x.dtype, x.layout)
    params: Window = {
        "dim": dim.name,
        "start": start,
        "stride": stride,
        "dilation": dilation,
        "fill": fill,
    }
    return builder.one("window", (x,), shape, x.dtype, x.layout, **params)


def _split_window(
    builder: BlockBuilder,
    x: Value,
    out: Dimension,
    dim: str,
    start: int,
    size: int,
    stride: int,
    dilation: int,
    fill: float | bool,
    wrap: bool,
) -> Value:
    """Fetches what each device's part reads, and takes the window of that.

    If x is dilated, the part of a device may begin between two elements of x. If this offset
    differs among devices, each device slices at its own offset.
    """
    axes = x.layout.axes(dim)
    shards = bounds(size, axes, builder.mesh)
    thinned = None
    if dilation == 1 and abs(stride) > 1:
        x, positions = _thinned(builder, x, dim, start % abs(stride), abs(stride))
        start, stride, thinned = start // abs(stride), stride // abs(stride), [positions]
    reach = (-(-size // len(shards)) - 1) * abs(stride)
    back = reach if stride < 0 else 0
    lows = [start + shard.start * stride - back for shard in shards]
    firsts, offsets = [low // dilation for low in lows], [low % dilation for low in lows]
    runs = []
    for shard, first in zip(shards, firsts, strict=True):
        extremes = [start + p * stride for p in (shard.start, shard.stop - 1)]
        read = Interval(-(-min(extremes) // dilation), max(extremes) // dilation + 1)
        if not shard.size:
            read = Interval(first, first)
        runs.append(_periods(read, first, size) if wrap else [Run(read, read.start - first)])
    length = (max(offsets) + reach) // dilation + 1
    fetched = gather(builder, [x], dim, axes, runs, length, fill, thinned)
    if len(set(offsets)) > 1:
        spread = Dimension(dim, (max(offsets) + reach + 1) * len(shards))
        fetched = local_window(builder, fetched, spread, 0, 1, dilation, fill)
        exact = Dimension(dim, (reach + 1) * len(shards))
        fetched = local_slice(builder, fetched, dim, axes, offsets, exact)
        offsets, dilation = [0], 1
    return local_window(builder, fetched, out, offsets[0] + back, stride, dilation, fill)


def _thinned(
    builder: BlockBuilder, x: Value, dim: str, start: int, stride: int
) -> tuple[Value, list[Interval]]:
    """Returns every device's elements at start, start + stride, ..., and their numbers among these.

    Elements that no device reads are not sent.
    """
    axes, block = x.layout.axes(dim), x.local.get(dim).size
    shards = bounds(x.shape.get(dim).size, axes, builder.mesh)
    skips = [(start - shard.start) % stride for shard in shards]
    positions = []
    for shard, skip in zip(shards, skips, strict=True):
        first = (shard.start + skip - start) // stride
        positions.append(Interval(first, first + max(0, -(-(shard.size - skip) // stride))))
    most = Dimension(dim, -(-block // stride) * len(shards))
    if len(set(skips)) == 1:
        return local_window(builder, x, most, skips[0], stride), positions
    # The last of a device's elements may lie behind its shard, where nothing is read.
    longer = Dimension(dim, (block + stride - 1 + max(skips)) * len(shards))
    ample = local_window(builder, x, longer, 0)
    spread = Dimension(dim, (block + stride - 1) * len(shards))
    return local_window(
        builder, local_slice(builder, ample, dim, axes, skips, spread), most, 0, stride
    ), positions


def _periods(read: Interval, first: int, size: int) -> list[Run]:
    """Returns the runs of positions 0 to `size`, repeated endlessly, that make up an interval."""
    runs = []
    for period in range(read.start // size, -(-read.stop // size)):
        met = read.meet(Interval(period * size, (period + 1) * size))
        positions = Interval(met.start - period * size, met.stop - period * size)
        runs.append(Run(positions, met.start - first))
    return runs


def _can_pick(case: Case) -> bool:
    """Whether a window slices a split dim, is not split, and reads no fill and nothing twice."""
    op, (x,), (out,) = case.operation, case.operation.inputs, case.operation.outputs
    name = op.params["dim"]
    read = _read(case)
    if not case.operands[0].axes(name) or case.results[0].axes(name):
        return False
    plain = op.params["dilation"] == 1 and not op.params["wrap"]
    inside = read.start >= 0 and read.stop <= x.shape.get(name).size
    return plain and inside and out.shape.get(name).size > 0


def _read(case: Case) -> Interval:
    """Returns the positions between the first and the last that a window reads."""
    op = case.operation
    start, stride = op.params["start"], op.params["stride"]
    last = start + (op.outputs[0].shape.get(op.params["dim"]).size - 1) * stride
    return Interval(min(start, last), max(start, last) + 1)


def _few(case: Case) -> Strategy:
    """Every device has its shard's elements of the window, and zeros elsewhere: a partial sum."""
    op, (layout,), read = case.operation, case.operands, _read(case)
    (x,), (out,), name = op.inputs, op.outputs, op.params["dim"]
    axes = layout.axes(name)
    left = layout.split(name, ()).add_partial(axes)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        value = builder.mask_pads(inputs[0], [name], 0)
        block, length = value.local.get(name).size, read.size
        firsts = starts_of(x.shape.get(name).size, axes, case.mesh)
        # Zeros on both sides: a shard that has nothing of the window reads them.
        ample = Dimension(name, (block + 2 * length) * len(firsts))
        value = local_window(builder, value, ample, -length)
        starts = [read.start - first + length for first in firsts]
        offsets = [min(max(start, 0), block + length) for start in starts]
        exact = Dimension(name, length * len(firsts))
        value = local_slice(builder, value, name, axes, offsets, exact)
        strided = Dimension(name, out.shape.get(name).size * len(firsts))
        first = op.params["start"] - read.start
        value = local_window(builder, value, strided, first, op.params["stride"])
        here = left.add_partial(inputs[0].layout.partial_axes)
        return (builder.one("reshape", (value,), out.shape, out.dtype, here),)

    return Strategy((layout,), (left,), emit, linear=op.linear, fixed=frozenset(axes))


def index(case: Case) -> Strategy:
    """The owner of the position has its value, all others have zeros: a partial sum."""
    return _pick(case, case.operation.params["at"])


def _pick(case: Case, at: int) -> Strategy:
    """Takes one position of a dim; the result has it as a dim of size 1 or not at all."""
    op = case.operation
    (x,), (out,), (layout,) = op.inputs, op.outputs, case.operands
    name = op.params["dim"]
    axes = layout.axes(name)
    others = [other for other in out.shape.names if other != name]
    left = layout.restrict(others).add_partial(axes)

    def emit(builder: BlockBuilder, inputs: Sequence[Value]) -> Sequence[Value]:
        (value,) = inputs
        here = left.add_partial(value.layout.partial_axes)
        shards = bounds(x.shape.get(name).size, axes, case.mesh)
        owner = next(i for i, shard in enumerate(shards) if shard.start <= at < shard.stop)
        one = Dimension(name, len(shards))
        row = local_window(builder, value, one, at - shards[owner].start)
        row = builder.one("reshape", (row,), out.shape, out.dtype, here)
        if len(shards) > 1:
            mine = is_device(builder, axes, owner)
            zero = builder.number(0, out.dtype)
            row = builder.one("select", (mine, row, zero), out.shape, out.dtype, here)
        return (row,)

    return Strategy((layout,), (left,), emit, linear=op.linear, fixed=frozenset(axes))


def is_device(builder: BlockBuilder, axes: Sequence[str], number: int) -> Value:
    """Returns whether this device's index along some axes is `number`: a bool scalar."""
    here, wanted = builder.device_index(axes), builder.number(number, INT32)
    return builder.one("equal", (here, wanted), Shape(), BOOL, here.layout)


RULES = {"window": window, "index": index}
