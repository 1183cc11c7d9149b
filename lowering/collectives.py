"""Collectives: how devices exchange data; each kind with its transition, payload and wire bytes.

A collective moves a tensor from one tensor layout to another along some axes of the mesh, which are
listed major first. The declaration in `COLLECTIVES` has all facts about a kind.

The payload is the larger of the local operand and the local result, as sent, with all pads. The
wire bytes are those that each of n devices sends under the bandwidth-optimal algorithm
(Thakur et al. 2005, "Optimization of collective communication operations in MPICH"): 2(n-1)/n of
the payload for an all_reduce, (n-1)/n for the others, and all of it for a permute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, is_typeddict

from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.lowering.parameters import (
    AllReduce,
    AllToAll,
    JoinedAllReduce,
    JoinedAllToAll,
    JoinedPermute,
    JoinedSplitDim,
    OverAxes,
    Permute,
    SplitDim,
)

if TYPE_CHECKING:
    from meshdsl.lowering.program import Value

P = TypeVar("P")


@dataclass(frozen=True, kw_only=True)
class CollectiveKind(Generic[P]):
    """The facts about a kind of collective.

    Attributes:
        name: as its instruction is called.
        transition: how it changes the layout of a tensor, in words.
        parameters: the record of its parameters (`lowering.parameters`).
        joined: the record of a collective that moves several tensors.
        dims: its parameters that name a dim; a collective that moves several tensors lists them.
        payload: (operand, result, parameters, devices of a group) -> bytes.
        wire: devices of a group -> wire bytes for each byte of payload.
        problem: (operand, result, parameters, mesh) -> why this kind does not lead from operand to
            result; empty if it does.
        reduces: whether it combines partial values.

    Raises:
        ValueError: `parameters` or `joined` is missing, or is no TypedDict.
    """

    name: str
    transition: str
    parameters: type[P] = object  # type: ignore[assignment]  # no TypedDict, so it is refused
    joined: type = object
    dims: tuple[str, ...]
    payload: Callable[[Value, Value, P, int], int]
    wire: Callable[[int], float]
    problem: Callable[[Value, Value, P, Mesh], str]
    reduces: bool = False

    def __post_init__(self) -> None:
        fields = [f for f in ("parameters", "joined") if not is_typeddict(getattr(self, f))]
        if fields:
            raise ValueError(
                f"collective `{self.name}` is declared without a record as {' and '.join(fields)}: "
                "write a TypedDict in lowering/parameters/collectives.py, and name it in "
                "COLLECTIVES of lowering/collectives.py"
            )


def _all_but_own(n: int) -> float:
    """Returns the share of a buffer that a device sends if it keeps its own of n blocks."""
    return (n - 1) / n if n > 1 else 0.0


def _larger(before: Value, after: Value, params: OverAxes, devices: int) -> int:
    return max(before.bytes, after.bytes)


def _blocks(before: Value, after: Value, params: AllToAll, devices: int) -> int:
    """Returns the operand's bytes, with pads for as many blocks of `split` as there are devices."""
    split = params["split"]
    blocks = devices * after.local.get(split).size
    return before.bytes // before.local.get(split).size * blocks


# Transitions: from the layout of the operand to that of the result.


def _reduced(before: Value, after: Value, params: AllReduce, mesh: Mesh) -> str:
    """Returns the problem of an all_reduce.

    The operand need not be partial over the axes: a value that varies along them is reduced too.
    """
    axes = params["axes"]
    split = before.layout.split_axes & set(axes)
    same = before.layout.drop(axes).splits == after.layout.splits
    partial = set(after.layout.partial_axes) & set(axes)
    if split or not same or partial:
        return f"leads to {before.layout.drop(axes)}, not to {after.layout}"
    return ""


def _scattered(layout: TensorLayout, params: SplitDim) -> TensorLayout | None:
    axes, dim = params["axes"], params["dim"]
    if not set(layout.partial_axes) & set(axes):
        return None
    return layout.drop(axes).split(dim, (*layout.axes(dim), *axes))


def _gathered(layout: TensorLayout, params: SplitDim) -> TensorLayout | None:
    return _drop_last(layout, params["dim"], params["axes"])


def _exchanged(layout: TensorLayout, params: AllToAll) -> TensorLayout | None:
    axes, split = params["axes"], params["split"]
    rest = _drop_last(layout, params["concat"], axes)
    return None if rest is None else rest.split(split, (*layout.axes(split), *axes))


def _drop_last(layout: TensorLayout, dim: str, axes: tuple[str, ...]) -> TensorLayout | None:
    """Returns a layout without `axes`, a dim's last axes; None if its last axes are others."""
    before = layout.axes(dim)
    kept = len(before) - len(axes)
    return layout.split(dim, before[:kept]) if before[kept:] == axes else None


def _follows(
    transition: Callable[[TensorLayout, P], TensorLayout | None],
) -> Callable[[Value, Value, P, Mesh], str]:
    """Returns the `problem` of a kind whose result layout follows from the operand's layout."""

    def problem(before: Value, after: Value, params: P, mesh: Mesh) -> str:
        expected = transition(before.layout, params)
        if expected is None:
            return f"does not apply to layout {before.layout}"
        return "" if expected == after.layout else f"leads to {expected}, not to {after.layout}"

    return problem


def _permuted(before: Value, after: Value, params: Permute, mesh: Mesh) -> str:
    sources, targets = zip(*params["pairs"], strict=True)
    if len(set(sources)) < len(sources) or len(set(targets)) < len(targets):
        return "sends or receives twice at one device"
    if not set(sources) | set(targets) <= set(range(mesh.size)):
        return "names devices that the mesh does not have"
    return "" if before.local == after.local else f"changes {before.local} to {after.local}"


COLLECTIVES: dict[str, CollectiveKind[Any]] = {
    kind.name: kind
    for kind in (
        CollectiveKind(
            name="all_reduce",
            transition="partial over axes -> replicated",
            parameters=AllReduce,
            joined=JoinedAllReduce,
            dims=(),
            payload=_larger,
            wire=lambda n: 2 * _all_but_own(n),
            problem=_reduced,
            reduces=True,
        ),
        CollectiveKind(
            name="reduce_scatter",
            transition="partial sum over axes -> axes appended, minor, to dim",
            parameters=SplitDim,
            joined=JoinedSplitDim,
            dims=("dim",),
            payload=lambda before, after, params, devices: devices * after.bytes,
            wire=_all_but_own,
            problem=_follows(_scattered),
            reduces=True,
        ),
        CollectiveKind(
            name="all_gather",
            transition="the trailing axes of dim -> replicated",
            parameters=SplitDim,
            joined=JoinedSplitDim,
            dims=("dim",),
            payload=lambda before, after, params, devices: devices * before.bytes,
            wire=_all_but_own,
            problem=_follows(_gathered),
        ),
        CollectiveKind(
            name="all_to_all",
            transition="the trailing axes of dim `concat` -> appended to `split`",
            parameters=AllToAll,
            joined=JoinedAllToAll,
            dims=("concat", "split"),
            payload=_blocks,
            wire=_all_but_own,
            problem=_follows(_exchanged),
        ),
        CollectiveKind(
            name="permute",
            transition="shards move: (source, target) by device number",
            parameters=Permute,
            joined=JoinedPermute,
            dims=(),
            payload=_larger,
            wire=lambda n: float(n > 1),
            problem=_permuted,
        ),
    )
}
REDUCING = frozenset(name for name, kind in COLLECTIVES.items() if kind.reduces)
