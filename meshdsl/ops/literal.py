"""Literals: fixed data that becomes part of the program."""

from __future__ import annotations

import numpy as np

from meshdsl.array import NamedArray
from meshdsl.graph import Primitive, Tensor
from meshdsl.trace import bind_one

LITERAL = Primitive("literal", lambda inputs, params: [(params["shape"], params["data"].dtype)])


def literal(array: NamedArray) -> Tensor:
    """Returns a tensor with the data of an array."""
    return bind_one(LITERAL, (), {"data": np.asarray(array.data), "shape": array.dims})
