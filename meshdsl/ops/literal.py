"""Literals: fixed data that becomes part of the program."""

from __future__ import annotations

import numpy as np

from meshdsl.array import NamedArray
from meshdsl.graph import Primitive, Tensor
from meshdsl.trace import bind_one, current

LITERAL = Primitive("literal", lambda inputs, params: [(params["shape"], params["data"].dtype)])


def literal(array: NamedArray) -> Tensor:
    """Returns a tensor with the data that an array has at this moment."""
    trace = current()
    if id(array) not in trace.literals:
        data = np.array(array.data)
        data.flags.writeable = False
        tensor = bind_one(LITERAL, (), {"data": data, "shape": array.dims})
        trace.literals[id(array)] = array, tensor  # the array is held, so that its id stays its own
    return trace.literals[id(array)][1]
