"""The global norm of a gradient, and clipping by it (Pascanu et al. 2013, algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.ops.operation import of_trees
from meshdsl.optim.checks import is_number, need_tensors
from meshdsl.optim.optimizer import lies_like
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tensors.tensor import Tensor


def _prepared(tree: Any, *rest: Any) -> tuple[Any, ...]:
    need_tensors("tree", tree)
    return tree, *rest


@of_trees(_prepared)
def global_norm(tree: Any) -> Tensor:
    """Returns sqrt(sum of the squares of all elements), without dims; float32 at least.

    Examples:
        >>> grads = {"w": md.named([3.0, 0.0], ["embed"]), "bias": md.named(4.0, [])}
        >>> print(md.jit(md.optim.global_norm)(grads))
        f32[] 5.
    """
    leaves = [ops.cast(leaf, accumulator(leaf.dtype)) for leaf in jax.tree.leaves(tree)]
    widest = max((leaf.dtype for leaf in leaves), key=lambda d: d.itemsize, default="float32")
    total = ops.zeros([], widest)
    for leaf in leaves:
        total = total + ops.cast(ops.sum(ops.square(leaf)), widest)
    return ops.sqrt(total)


def bad_norm(max_norm: Any) -> str:
    """Returns the problem with the norm to clip to, or ""."""
    if is_number(max_norm) and 0 < max_norm < math.inf:
        return ""
    return f"must be above 0{' and finite' if max_norm == math.inf else ''}, got {max_norm}"


def _like(args: Sequence[Any], result: tuple[Any, Tensor]) -> list[Any]:
    tree, *_ = args
    return [*lies_like(tree, tree, result[0]), None]


@of_trees(_prepared, _like)
def clip_by_global_norm(
    tree: Any, max_norm: float, norm: Tensor | None = None
) -> tuple[Any, Tensor]:
    """Scales a tree down to a global norm of `max_norm` if it has a larger one.

    Args:
        norm: the tree's `global_norm`, if it is already computed.

    Returns:
        The clipped tree, and the norm that the tree had before.

    Raises:
        ValueError: `max_norm` is not above 0, or not finite.

    Examples:
        >>> grads = {"w": md.named([3.0, 0.0], ["embed"]), "bias": md.named(4.0, [])}
        >>> clipped, norm = md.jit(lambda tree: md.optim.clip_by_global_norm(tree, 1.0))(grads)
        >>> print(clipped["w"], clipped["bias"], norm)
        f32[embed=2] [0.6 0. ] f32[] 0.8 f32[] 5.
    """
    if problem := bad_norm(max_norm):
        raise ValueError(f"clip_by_global_norm: max_norm {problem}")
    norm = global_norm(tree) if norm is None else norm
    scale = max_norm / ops.maximum(norm, max_norm)
    return jax.tree.map(lambda leaf: leaf * ops.cast(scale, leaf.dtype), tree), norm
