"""Records of products: convolution, pooling, attention, linear algebra, Fourier transforms."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.slide import Slide


class Convolve(TypedDict):
    """A product with sliding windows.

    Attributes:
        slides: how the window moves, one for each of its dims.
    """

    slides: tuple[Slide, ...]


class Pool(TypedDict):
    """A reduction over the elements in a sliding window.

    Attributes:
        slides: how the window moves, one for each of its dims.
        sizes: the size of the window in each of these dims.
    """

    slides: tuple[Slide, ...]
    sizes: tuple[int, ...]


class WindowMatch(Pool):
    """A sum over the positions of a window at which two operands are nearly equal.

    Attributes:
        extreme: which of the two operands has the maxima: 0 or 1.
        slack: how much they may differ, as a share of the maximum.
    """

    extreme: int
    slack: float


class Attention(TypedDict):
    """softmax(scale q k) v, with masks. Operands are q, k, v, and the masks of `given`.

    Attributes:
        length: the dim of the queries' positions.
        memory: the dim of the keys' and values' positions.
        features: the dim contracted between queries and keys.
        scale: the factor of the scores.
        soft_cap: scores s become soft_cap tanh(s / soft_cap); None does not change them.
        causal: whether positions of the memory that are later than the query's are hidden.
        window: positions at least that far from the query's are hidden; None hides none.
        offset: the position of the first query if `positions` is not given.
        given: the names of the masks among the operands, in order: `positions`,
            `memory_positions`, `segments`, `memory_segments`, `mask`, `bias`; for a split memory
            also `present` and `active`.
        blocks: rows and columns of the scores that are computed at once; without it, they follow
            from the sizes (`lowering.attention_sizes`).
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
    """

    bias_gradient: bool


class Matrices(TypedDict):
    """Linear algebra on matrices.

    Attributes:
        rows, columns: the dims of a matrix.
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
        lower: whether the lower triangle is read, instead of the upper one.
        unit_diagonal: whether every element of the diagonal is read as 1.
    """

    lower: bool
    unit_diagonal: bool


class HalfSpectrum(TypedDict):
    """A Fourier transform between real numbers and half of their spectrum.

    Attributes:
        dim: the dim of the operand.
        into: the dim of the result that replaces it.
    """

    dim: str
    into: Dimension
