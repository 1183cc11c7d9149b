"""Literals: fixed data that becomes part of the program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from meshdsl.tensors.named_array import NamedArray
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import Primitive
from meshdsl.tracing.trace import ArrayTrace, bind_one, current

LITERAL = Primitive("literal", lambda inputs, params: [(params["shape"], params["data"].dtype)])


def literal(array: NamedArray) -> Tensor:
    """Returns a tensor with the present data of an array.

    An operation that runs at once has it as an input, which is not copied.
    """
    trace = root = current()
    while root.parent is not None:
        root = root.parent
    if isinstance(root, ArrayTrace):
        return trace.own(root.array(array))
    if id(array) not in trace.literals:
        data = np.array(array)
        data.flags.writeable = False
        tensor = bind_one(LITERAL, (), {"data": data, "shape": array.dims})
        # The array is stored too, so that its id stays unique.
        trace.literals[id(array)] = array, tensor
    return trace.literals[id(array)][1]


def as_traced(tree: Any) -> Any:
    """Returns a tree with traced tensors, literals, in place of NamedArrays."""

    def traced(leaf: Any) -> Any:
        return literal(leaf) if isinstance(leaf, NamedArray) else leaf

    return jax.tree.map(traced, tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
