"""Parameters: a typed record for the parameters of each kind of instruction.

`Instruction.params` is a plain mapping, which printing, equality and the backends read. The record
that a kind is declared with (`lowering.instructions`, `lowering.collectives`) says which keys that
mapping has, and of which type; `verify` compares them. `parameters_of` reads a mapping as a record,
so that mypy knows its keys.

Unless a docstring says otherwise, a dim or an axis is its name, sizes and positions count elements,
and axes stand major first. Positions begin at 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict, TypeVar, cast

import numpy as np

from meshdsl.ops.control.debug import Message
from meshdsl.ops.control.local import Definition
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.slide import Slide
from meshdsl.tracing.source import Source

if TYPE_CHECKING:
    from meshdsl.lowering.program import Block, Instruction

Record = TypeVar("Record")


def parameters_of(instruction: Instruction, record: type[Record]) -> Record:
    """Returns the parameters of an instruction as a record: `parameters_of(one, Scan)["length"]`.

    The record is the one that its kind is declared with, or one with some of its keys. Nothing is
    checked here: `verify` does that.
    """
    return cast(Record, instruction.params)


def axes_of(instruction: Instruction) -> tuple[str, ...]:
    """Returns the axes of a collective, or of another instruction that has some; see `OverAxes`."""
    return parameters_of(instruction, OverAxes)["axes"]


class NoParameters(TypedDict):
    """The operands and the results say everything."""


# Collectives and resharding.


class OverAxes(TypedDict):
    """What runs over groups of devices, or depends on where a device is.

    Attributes:
        axes: the axes of the mesh along which the devices of a group differ.
    """

    axes: tuple[str, ...]


class AllReduce(OverAxes):
    """An all_reduce.

    Attributes:
        kind: how the operands of a group are combined.
    """

    kind: Literal["sum", "max", "min"]


class SplitDim(OverAxes):
    """A reduce_scatter, an all_gather, or a slice.

    Attributes:
        dim: the dim whose layout has the axes last: that of the operand of an all_gather, and of
            the result of the others. Empty for a slice over no axes.
    """

    dim: str


class AllToAll(OverAxes):
    """An all_to_all.

    Attributes:
        concat: the dim whose last axes are removed.
        split: the dim to whose layout they are appended.
    """

    concat: str
    split: str


class Permute(OverAxes):
    """A permute; `axes` are those along which a shard moves.

    Attributes:
        pairs: (source, target), by device number, sorted by source. A device that is no target
            gets zeros.
        mesh_axes: all axes of the mesh, which number the devices.
    """

    pairs: tuple[tuple[int, int], ...]
    mesh_axes: tuple[str, ...]


class Joined(TypedDict):
    """A collective that moves several tensors at once.

    Attributes:
        sources: the line of each.
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


# Exchange of windows of a split dim.


class Assemble(OverAxes):
    """Pieces that are laid into a window, each where it belongs.

    Attributes:
        dim: the dim of the window.
        fill: what positions read that no piece covers.
        parts: for each piece three rows, with a number for each device by its index along `axes`:
            the position in the window of the piece's first element, and from which (inclusive) to
            which position (exclusive) of the window the piece is read.
    """

    dim: str
    fill: complex
    parts: tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]


class LocalPositions(OverAxes):
    """A run of positions of a shard that is read, or written anew.

    Attributes:
        dim: the dim of the positions.
        starts: the first one within the shard, for each device by its index along `axes`.
    """

    dim: str
    starts: tuple[int, ...]


# Data made of nothing, moved, or looked at in another way.


class Full(TypedDict):
    """A constant.

    Attributes:
        value: every element, as a Python number or bool.
    """

    value: complex


class Data(TypedDict):
    """Data that stands in the program.

    Attributes:
        data: an array of the dims and the dtype of the result.
    """

    data: np.ndarray


class Cast(TypedDict):
    """A conversion.

    Attributes:
        dtype: that of the result. Casts that only lowering needs do not repeat it.
    """

    dtype: NotRequired[np.dtype]


class Rename(TypedDict):
    """A view with dims of other names.

    Attributes:
        names: (name before, name after) of each dim that is renamed.
    """

    names: tuple[tuple[str, str], ...]


class Barrier(TypedDict):
    """What keeps apart what is computed twice.

    Attributes:
        id: a number for each barrier of the graph, so that equal ones are not joined.
        stored: whether it stands before the gather of a stored weight, which is gathered again.
    """

    id: NotRequired[int]
    stored: NotRequired[bool]


class Window(TypedDict):
    """Position p of the result is position (start + p * stride) / dilation of the operand.

    Attributes:
        dim: the dim of the positions.
        start: may be negative.
        stride: may be negative.
        dilation: at least 1.
        fill: what is read outside of the operand, and between its elements.
    """

    dim: str
    start: int
    stride: int
    dilation: int
    fill: complex


class AlongDim(TypedDict):
    """What runs along one dim.

    Attributes:
        dim: that dim.
    """

    dim: str


class Update(TypedDict):
    """An array of which a run of positions is written anew.

    Attributes:
        dim: the dim of the positions.
        part: the dim of the piece that takes the place of `dim`.
    """

    dim: str
    part: str


class Indexed(TypedDict):
    """A look-up by index, or its transpose.

    Attributes:
        dim: the dim of the table that the indices count along.
        pairs: the dims along which the table and the indices go together.
    """

    dim: str
    pairs: tuple[str, ...]


# Products.


class Convolve(TypedDict):
    """A product with sliding windows.

    Attributes:
        slides: how the window moves, one for each of its dims.
    """

    slides: tuple[Slide, ...]


class Pool(TypedDict):
    """A reduction of what a sliding window sees.

    Attributes:
        slides: how the window moves, one for each of its dims.
        sizes: the size of the window in each of these.
    """

    slides: tuple[Slide, ...]
    sizes: tuple[int, ...]


class WindowMatch(Pool):
    """A sum over the positions of a window at which two operands are nearly equal.

    Attributes:
        extreme: which of the two operands has the maxima: 0 or 1.
        slack: how far from equal they may be, as a share of the maximum.
    """

    extreme: int
    slack: float


class Attention(TypedDict):
    """softmax(scale q k) v, with masks. Operands are q, k, v, and the masks of `given`.

    Attributes:
        length: the dim of the queries' positions.
        memory: the dim that is attended over.
        features: the dim contracted between queries and keys.
        scale: of the scores.
        soft_cap: scores s become soft_cap tanh(s / soft_cap); None leaves them.
        causal: whether positions of the memory that are later than the query's are hidden.
        window: what is that many positions away, or more, is hidden; None hides nothing.
        offset: the position of the first query, where `positions` is not given.
        given: the names of the masks among the operands, in order: `positions`,
            `memory_positions`, `segments`, `memory_segments`, `mask`, `bias`, and of split memory
            `present` and `active`.
        blocks: rows and columns of the scores that are computed at once; without it, sizes decide
            (`lowering.attention_sizes`).
    """

    length: str
    memory: str
    features: str
    scale: float
    soft_cap: float | None
    causal: bool
    window: int | None
    offset: int
    given: tuple[str, ...]
    blocks: NotRequired[tuple[int, int]]


class AttentionGradient(Attention):
    """The gradients of q, k and v. Further operands: result, log-sum-exp, and arriving gradient.

    Attributes:
        bias_gradient: whether the gradient of the bias is a fourth result.
        part: whether the log-sum-exp is that of more than this memory.
    """

    bias_gradient: bool
    part: NotRequired[bool]


class Matrices(TypedDict):
    """Linear algebra on the matrices of two dims.

    Attributes:
        rows, columns: these dims.
    """

    rows: str
    columns: str


class Factors(Matrices):
    """A factorization.

    Attributes:
        inner: the dim between the factors.
    """

    inner: Dimension


class Triangular(Matrices):
    """A triangular system.

    Attributes:
        lower: whether the lower triangle is read, else the upper one.
        unit_diagonal: whether every element of the diagonal counts as one.
    """

    lower: bool
    unit_diagonal: bool


class HalfSpectrum(TypedDict):
    """A Fourier transform to or from the half of a spectrum that real numbers have.

    Attributes:
        dim: the dim of the operand.
        into: the dim that takes its place in the result.
    """

    dim: str
    into: Dimension


# Reductions, order and what is cumulative.


class Reduction(TypedDict):
    """What runs over several dims at once.

    Attributes:
        over: these dims.
    """

    over: tuple[str, ...]


class Before(TypedDict):
    """What the rows of a dim make of those before them.

    Attributes:
        dim: that dim.
        reverse: whether it is read from its end.
    """

    dim: str
    reverse: bool


class Cumulative(Before):
    """What each position of a dim makes of those up to there.

    Attributes:
        exclusive: whether a position's own element is left out.
    """

    exclusive: bool


class Sort(TypedDict):
    """The elements along a dim, in order.

    Attributes:
        dim: that dim.
        descending: whether the largest comes first.
    """

    dim: str
    descending: bool


class TopK(TypedDict):
    """The largest elements along a dim.

    Attributes:
        dim: that dim.
        into: the dim of the result that takes its place, whose size says how many.
    """

    dim: str
    into: str


# Random bits, and functions of a user's own.


class RandomBits(TypedDict):
    """Threefry-2x32 of a key and counters.

    Attributes:
        pairs: whether both words of a counter are results, along `random_key`; else they are
            combined to one.
    """

    pairs: bool


class Local(TypedDict):
    """A function of the user's own.

    Attributes:
        definition: the function for each backend.
        params: its keyword arguments, (name, value).
    """

    definition: Definition
    params: tuple[tuple[str, Any], ...]


class Print(TypedDict):
    """Printing.

    Attributes:
        message: the text, and how each operand is printed.
    """

    message: Message


# Instructions with bodies.


class Loop(TypedDict):
    """A loop; its operands are consts, then carries, and of a scan stacks.

    Attributes:
        body: what one iteration does: (consts, carries, slices) -> (carries, slices).
        consts: how many operands are the same in every iteration.
        carries: how many operands start a carry.
    """

    body: Block
    consts: int
    carries: int


class Scan(Loop):
    """A loop over the positions of a dim.

    Attributes:
        dim: the dim of the stacks that the body reads and writes slice by slice.
        length: how many iterations there are.
        reverse: whether the last slice comes first.
        ahead: the numbers of those stacks, the last ones, whose slices are read one iteration
            ahead; after the last slice comes the first again.
    """

    dim: str
    length: int
    reverse: bool
    ahead: NotRequired[tuple[int, ...]]


class While(Loop):
    """A loop that ends where a condition does not hold.

    Attributes:
        condition: (consts, carries) -> whether one more iteration is run.
    """

    condition: Block


class Cond(TypedDict):
    """Two branches, of the operands after the predicate.

    Attributes:
        if_true, if_false: what is run where the predicate is true, and where it is false.
    """

    if_true: Block
    if_false: Block
