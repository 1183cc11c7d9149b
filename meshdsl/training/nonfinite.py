"""Gradients that are not finite: found, and told by parameter, with one small all_reduce.

The squared norm of each gradient is placed along one dim and all are added up, so devices add one
vector, whatever the layouts of the parameters. Its sum is what clipping needs in any case; what is
not finite in it names the parameter. A gradient too large for its square is not finite here.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.tensors.dims import Dimension
from meshdsl.tensors.dtypes import accumulator, is_differentiable
from meshdsl.tensors.module import path_of
from meshdsl.tensors.tensor import Tensor

_GRADIENTS = "gradients"


def squared_norms(grads: Any, params: Any = None) -> Tensor:
    """Returns the sum of the squares of each gradient: [gradients], float32 at least.

    They are in the order of `gradient_paths` of the parameters, zero where a gradient is None.

    Args:
        params: by default all that there are gradients of.
    """
    rows: list[tuple[Tensor | None, Tensor]] = []
    like = grads if params is None else params
    jax.tree.map(lambda param, grad: rows.append((grad, param)), like, grads)
    leaves = [
        None if grad is None else ops.cast(grad, accumulator(grad.dtype))
        for grad, param in rows
        if is_differentiable(param.dtype)
    ]
    dtypes = (leaf.dtype for leaf in leaves if leaf is not None)
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default="float32")
    total = ops.zeros([Dimension(_GRADIENTS, max(len(leaves), 1))], widest)
    for place, leaf in enumerate(leaves):
        if leaf is None:
            continue
        norm = ops.cast(ops.sum(ops.square(leaf)), widest)
        alone = ops.broadcast(norm, [Dimension(_GRADIENTS, 1)])
        total = total + ops.pad(alone, _GRADIENTS, place, len(leaves) - 1 - place)
    return total


def first_nonfinite(squares: Tensor, finite: Tensor) -> Tensor:
    """Returns the place of the first gradient that is not finite, int32 without dims.

    It is -1 if the step is finite, and the number of gradients if each is finite by itself.
    """
    (gradients,) = squares.shape
    places = ops.where(ops.isfinite(squares), gradients.size, ops.arange(gradients))
    return ops.where(finite, -1, ops.min(places))


def gradient_paths(params: Any) -> list[str]:
    """Returns the paths of the parameters that have gradients, in the order of their tree.

    Args:
        params: a tree of tensors, of arrays, or of `md.spec`.
    """
    keyed = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda x: hasattr(x, "dtype"))[0]
    return [path_of(keys) for keys, leaf in keyed if is_differentiable(leaf.dtype)]


class NotFinite(ValueError):
    """A loss or a gradient is not finite, and ends the run."""


@dataclass(frozen=True)
class FiniteCheck:
    """What a trainer does about steps that were not finite, which have changed nothing.

    Attributes:
        stops: whether the first one ends the run; else each is told in a warning.
        paths: of `gradient_paths`.
    """

    stops: bool
    paths: Sequence[str]

    def look(self, begins: int, losses: Sequence[float], firsts: Sequence[float]) -> None:
        """Looks at the losses and the metric `first_nonfinite` of steps from `begins` on.

        Raises:
            NotFinite: a step was not finite, and the run is to stop.
        """
        for step, (loss, first) in enumerate(zip(losses, firsts, strict=True), begins):
            if first < 0:
                continue
            told = f"step {step}: the loss is {loss:.6g}, and {culprit(int(first), self.paths)}"
            if self.stops:
                raise NotFinite(
                    f"{told}. The update was left out. nonfinite=skip goes on without such steps; "
                    "a lower learning rate or clip_norm may keep them from happening"
                )
            warnings.warn(f"{told}; the step is skipped", stacklevel=2)


def culprit(first: int, paths: Sequence[str]) -> str:
    """Returns in words what was not finite in a step.

    Args:
        first: the metric `first_nonfinite`, at least 0.
        paths: of `gradient_paths`.
    """
    if first < len(paths):
        return f"the gradient of {paths[first]} is not finite"
    return "the loss, or the norm of all gradients together, is not finite"
