"""Records of collectives, of resharding, and of the exchange of windows of a split dim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict

from meshdsl.lowering.parameters.reading import parameters_of
from meshdsl.tracing.source import Source

if TYPE_CHECKING:
    from meshdsl.lowering.program import Instruction


class OverAxes(TypedDict):
    """An instruction over groups of devices, or one that depends on the index of a device.

    Attributes:
        axes: the axes of the mesh along which the devices of a group differ.
    """

    axes: tuple[str, ...]


def axes_of(instruction: Instruction) -> tuple[str, ...]:
    """Returns the axes of a collective, or of another instruction with `OverAxes`."""
    return parameters_of(instruction, OverAxes)["axes"]


class AllReduce(OverAxes):
    """An all_reduce.

    Attributes:
        kind: how the operands of a group are combined.
    """

    kind: Literal["sum", "max", "min"]


class SplitDim(OverAxes):
    """A reduce_scatter, an all_gather, or a slice.

    Attributes:
        dim: the dim whose last axes are these: in the operand of an all_gather, in the result of
            a reduce_scatter or a slice. Empty for a slice over no axes.
    """

    dim: str


class AllToAll(OverAxes):
    """An all_to_all.

    Attributes:
        concat: the dim whose last axes are removed.
        split: the dim to whose axes they are appended.
    """

    concat: str
    split: str


class Permute(OverAxes):
    """A permute; `axes` are the axes along which a shard moves.

    Attributes:
        pairs: (source, target) by device number, sorted by source. A device that is no target
            receives zeros.
        mesh_axes: all axes of the mesh; they number the devices.
    """

    pairs: tuple[tuple[int, int], ...]
    mesh_axes: tuple[str, ...]


class Joined(TypedDict):
    """A collective that moves several tensors at once.

    Attributes:
        sources: the source line of each.
    """

    sources: tuple[Source, ...]


class JoinedAllReduce(AllReduce, Joined):
    """Several all_reduces."""


class JoinedSplitDim(OverAxes, Joined):
    """Several reduce_scatters or all_gathers.

    Attributes:
        dims: the `dim` of each.
    """

    dims: tuple[str, ...]


class JoinedAllToAll(OverAxes, Joined):
    """Several all_to_alls.

    Attributes:
        concats, splits: the `concat` and the `split` of each.
    """

    concats: tuple[str, ...]
    splits: tuple[str, ...]


class JoinedPermute(Permute, Joined):
    """Several permutes."""


class Assemble(OverAxes):
    """A window that is assembled from pieces.

    Attributes:
        dim: the dim of the window.
        fill: the value of positions that no piece covers.
        parts: three rows for each piece, each with a number per device, by its index along `axes`:
            the window position of the piece's first element, and the first (inclusive) and last
            (exclusive) window position that is read from the piece.
    """

    dim: str
    fill: complex
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]


class LocalPositions(OverAxes):
    """Consecutive positions of a shard that are read or overwritten.

    Attributes:
        dim: the dim of the positions.
        starts: the first position within the shard, for each device by its index along `axes`.
    """

    dim: str
    starts: tuple[int, ...]
