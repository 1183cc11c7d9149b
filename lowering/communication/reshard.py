"""Resharding: the cheapest chain of moves from one layout of a tensor to another.

The two layouts are given; the compiler chooses the chain. The chosen chain has the least wire
bytes. A byte that crosses a slow axis of the mesh counts for `SLOWER`, so a sum over a slow and a
fast axis is scattered over the fast one, reduced over the slow one, and gathered over the fast one.
Among equals it has the fewest moves, then the fewest collectives (a permute counts for two, as the
least regular one), then it is the first in a fixed order: every process gets the same chain.

If the mesh has prices (`layouts.prices`), the chain takes the least time instead, of those that
`Problem.chains` offers; among equals it is the chain of least bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.communication.reshard_search import SLOWER, Problem, Step
from meshdsl.lowering.program import Pairs, wire_bytes
from meshdsl.tensors.dims import Shape

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a chain: a collective, or a local and free `slice`.

    The `params` of a collective are those that `program` lists. A `slice` has `axes` and `dim`: it
    appends replicated axes to the dim, as its minor axes. A slice over no axes moves no block and
    only renames the layout, whose axes of size 1 have changed place.

    The `pairs` of a permute are a bijection of all devices, sorted by source, in which a device
    that already holds its block is its own source. Its `axes` are those along which a shard moves,
    in mesh order; never a partial one.
    """

    op: str
    params: Mapping[str, Any] = field(hash=False)
    result: TensorLayout
    wire_bytes: float


def reshard(
    shape: Shape, itemsize: int, start: TensorLayout, goal: TensorLayout, mesh: Mesh
) -> tuple[Move, ...]:
    """Returns the moves, of least wire bytes, that take a tensor from `start` to `goal`.

    The partial axes of `start` have one kind, not `varying`. `goal` has some or all of them as
    partial axes, and no others.
    """
    here, moves = start, []
    for move in _chain(shape, itemsize, start, goal, mesh):
        if move.op == "permute":
            pairs = _pairs(here, move.result, mesh)
            move = replace(move, params={**move.params, "pairs": pairs, "mesh_axes": mesh.names})
        moves.append(move)
        here = move.result
    return tuple(moves)


@lru_cache(maxsize=1 << 16)
def reshard_cost(
    shape: Shape, itemsize: int, start: TensorLayout, goal: TensorLayout, mesh: Mesh
) -> float:
    """Returns the cost of the cheapest way from `start` to `goal`; see `cost_of_sending`."""
    return _cost(_chain(shape, itemsize, start, goal, mesh), mesh)


def cost_of_sending(kind: str, sent: float, axes: Iterable[str], mesh: Mesh) -> float:
    """Returns the cost of one collective, in bytes that one device sends.

    Bytes that cross a slow axis count for `SLOWER`. If the mesh has prices, it is the time, in
    bytes that one link carries in it.

    Args:
        sent: the bytes that one device sends.
    """
    if mesh.prices is not None:
        return mesh.prices.cost(kind, axes, sent)
    return sent if mesh.slow.isdisjoint(axes) else sent * SLOWER


def _cost(moves: Iterable[Move], mesh: Mesh) -> float:
    return math.fsum(
        cost_of_sending(move.op, move.wire_bytes, move.params["axes"], mesh)
        for move in moves
        if move.op != "slice"
    )


@lru_cache(maxsize=1 << 16)
def _chain(
    shape: Shape, itemsize: int, start: TensorLayout, goal: TensorLayout, mesh: Mesh
) -> tuple[Move, ...]:
    """Returns the moves. Permutes lack their pairs, which would be one per device."""
    kinds = {kind for _, kind in start.partial}
    assert len(kinds) <= 1 and "varying" not in kinds, f"cannot move a tensor that is {start}"
    assert set(goal.partial) <= set(start.partial), f"`{goal}` is partial where `{start}` is not"
    for layout in (start, goal):
        assert {dim for dim, _ in layout.splits} <= set(shape.names), (
            f"`{layout}` is not of {shape}"
        )
    if start == goal:
        return ()
    problem = Problem.between(shape, start, goal, mesh)
    least, *others = [
        _moves(problem, steps, shape, itemsize, start, mesh) for steps in problem.chains()
    ]
    cost = _cost(least, mesh) if others else 0.0
    for moves in others:
        if (less := _cost(moves, mesh)) < (1 - _ROUNDING) * cost:
            least, cost = moves, less
    return least


def _moves(
    problem: Problem,
    steps: Sequence[Step],
    shape: Shape,
    itemsize: int,
    start: TensorLayout,
    mesh: Mesh,
) -> tuple[Move, ...]:
    """Returns the moves of the steps from `start` to the goal of a problem."""
    here, state, moves = start, problem.start, []
    others = start.local(shape, mesh).volume // problem.volume(state[0])
    for step in steps:
        there = problem.layout(step.state)
        payload = problem.payload(step, state) * others * itemsize
        params: dict[str, Any] = {"axes": step.axes, **problem.named(step)}
        if step.op == "all_reduce":
            params["kind"] = problem.kind
        elif step.op == "permute":
            params = {"axes": _targets(here, there, mesh)[0]}
        devices = 1 if step.op == "slice" else mesh.extent(params["axes"])
        moves.append(Move(step.op, params, there, wire_bytes(step.op, payload, devices)))
        here, state = there, step.state
    assert state == problem.goal
    return tuple(moves)


def _moving(here: TensorLayout, there: TensorLayout, mesh: Mesh) -> Mesh:
    """Returns the axes along which shards may move: those that split either layout."""
    moving = here.split_axes | there.split_axes
    return Mesh(tuple((axis, size) for axis, size in mesh.axes if axis in moving))


def _targets(
    here: TensorLayout, there: TensorLayout, mesh: Mesh
) -> tuple[tuple[str, ...], np.ndarray]:
    """Returns the axes of the permute between two layouts, and the device that each sends to.

    Axes that split neither layout do not count: the devices are those of the other axes. A device
    that owns the block it needs keeps it. The others send their block to those that need it, both
    in order.
    """
    part = _moving(here, there, mesh)
    index = np.indices(tuple(part.sizes.values())).reshape(len(part.axes), part.size)
    along = dict(zip(part.names, index, strict=True))
    dims = sorted({dim for dim, _ in here.splits + there.splits})

    def blocks(layout: TensorLayout) -> np.ndarray:
        """Numbers the block of each device."""
        number = np.zeros(part.size, np.int64)
        for axis in [axis for dim in dims for axis in layout.axes(dim)]:
            number = number * mesh.sizes[axis] + along[axis]
        return number

    has, needs = blocks(here), blocks(there)
    away = np.flatnonzero(has != needs)
    sources = away[np.argsort(has[away], kind="stable")]
    target = np.arange(part.size)
    target[sources] = away[np.argsort(needs[away], kind="stable")]
    axes = [axis for axis in part.names if (along[axis] != along[axis][target]).any()]
    return tuple(axes), target


@lru_cache(maxsize=4)  # each lists all devices: 65,536 take 10 MB
def _pairs(here: TensorLayout, there: TensorLayout, mesh: Mesh) -> Pairs:
    """Returns where each device of a mesh sends in the permute between two layouts."""
    part, target = _moving(here, there, mesh), _targets(here, there, mesh)[1]
    devices = np.arange(mesh.size).reshape(tuple(mesh.sizes.values()))
    first = sorted(range(len(mesh.axes)), key=lambda i: mesh.names[i] in part.sizes)
    moved = devices.transpose(first).reshape(-1, part.size)  # [other places, moving places]
    targets = np.empty(mesh.size, np.int64)
    targets[moved] = moved[:, target]
    return Pairs(enumerate(targets.tolist()))
