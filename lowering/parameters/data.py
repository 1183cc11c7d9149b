"""Records of constants, of views, and of reading and writing by position or index."""

from __future__ import annotations

from typing import NotRequired, TypedDict

import numpy as np


class Full(TypedDict):
    """A constant.

    Attributes:
        value: the value of every element, a Python number or bool.
    """

    value: complex


class Data(TypedDict):
    """Data that is part of the program.

    Attributes:
        data: an array with the result's dims and dtype.
    """

    data: np.ndarray


class Cast(TypedDict):
    """A conversion.

    Attributes:
        dtype: the dtype of the result. Casts that lowering adds leave it out.
    """

    dtype: NotRequired[np.dtype]


class Rename(TypedDict):
    """A view with renamed dims.

    Attributes:
        names: (old name, new name) of each renamed dim.
    """

    names: tuple[tuple[str, str], ...]


class Barrier(TypedDict):
    """A barrier: instructions on its results are not merged with equal ones on its operands.

    Attributes:
        id: a number for each barrier of the graph, so that equal barriers are not joined.
        stored: whether it is before the second gather of a stored weight.
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
        fill: the value outside of the operand, and between its elements.
    """

    dim: str
    start: int
    stride: int
    dilation: int
    fill: complex


class AlongDim(TypedDict):
    """An instruction along one dim.

    Attributes:
        dim: that dim.
    """

    dim: str


class Update(TypedDict):
    """An array with consecutive positions overwritten.

    Attributes:
        dim: the dim of the positions.
        part: the dim of the new elements that corresponds to `dim`.
    """

    dim: str
    part: str


class Indexed(TypedDict):
    """A look-up by index, or its transpose.

    Attributes:
        dim: the dim of the table that the indices are positions of.
        pairs: the dims that the table and the indices share: batch dims.
    """

    dim: str
    pairs: tuple[str, ...]


class RowSums(Indexed):
    """The sums of what updates add to each row of a table, without the table.

    The results are as large as the updates and the indices. The rows ascend, and rows that several
    indices name follow each other: the first has their sum, the others have zeros. Indices outside
    of the table come last, as its size, with zeros.

    Attributes:
        size: that of the dim in this device's part of the table.
    """

    size: int
