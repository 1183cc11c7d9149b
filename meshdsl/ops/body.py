"""Bodies: functions of tensors traced by themselves, to become part of an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from meshdsl.array import NamedArray
from meshdsl.graph import Graph, Tensor
from meshdsl.ops.creation import as_tensor
from meshdsl.trace import Trace, current, tracing


def is_array(leaf: Any) -> bool:
    """Whether a leaf of a tree is a tensor, or an array to be made one."""
    return isinstance(leaf, Tensor | NamedArray)


def leaves_of(tree: Any) -> tuple[list[Tensor], Any]:
    """Returns a tree's leaves as tensors, and its structure."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_array)
    return [as_tensor(leaf) for leaf in leaves], structure


def subgraph(function: Callable, like: Sequence[Tensor]) -> tuple[Graph, tuple[Tensor, ...], Any]:
    """Traces a function of tensors by itself.

    Returns:
        Its graph (inputs: captured tensors, then one per `like`), the captured tensors as the
        enclosing trace has them, and the structure of the result.
    """
    inner = Trace(current())
    with tracing(inner):
        inputs = [inner.input(t.shape, t.dtype, t.source) for t in like]
        outputs, structure = leaves_of(function(*inputs))
        graph, consts = inner.finish(outputs)
    return graph, consts, structure
