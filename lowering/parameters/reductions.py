"""Records of reductions, of cumulative operations, and of sorting."""

from __future__ import annotations

from typing import TypedDict


class Reduction(TypedDict):
    """An instruction over several dims.

    Attributes:
        over: these dims.
    """

    over: tuple[str, ...]


class Before(TypedDict):
    """An instruction that computes each position of a dim from the positions before it.

    Attributes:
        dim: that dim.
        reverse: whether the last position comes first.
    """

    dim: str
    reverse: bool


class Cumulative(Before):
    """A cumulative instruction: a result for each position and those before it.

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
        into: the dim of the result that replaces it; its size is the number of elements.
    """

    dim: str
    into: str
