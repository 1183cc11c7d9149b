"""Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks").

Five Newton-Schulz iterations, which are products of matrices only, replace the momentum of a matrix
by the nearest orthogonal matrix, up to singular values between about 0.7 and 1.2. AdamW updates
parameters that are no matrices inside of the network (embeddings, biases, scales).

Invariant: which parameters are matrices, and which of their dims are rows, depends on paths, dims
and sizes, never on a layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np

import meshdsl.ops as ops
from meshdsl.optim.adamw import AdamW
from meshdsl.optim.checks import bad_mask, bad_rate, check_ranges, is_whole
from meshdsl.optim.masks import check_mask
from meshdsl.optim.methods import init_method, update_method
from meshdsl.optim.optimizer import STACKED, Mask, Mirror, is_matrix, update_each, zeros_like
from meshdsl.optim.schedules import Schedule, rate_at
from meshdsl.tensors.dims import Dimension, Shape
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.module import Module, path_of
from meshdsl.tensors.tensor import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024
_OTHER, _MIDDLE = "_other", "_middle"  # names of dims on the other side of a product
_BATCH = (*STACKED, "experts")  # dims of many matrices, each by itself


class MuonState(Module):
    """The state of each parameter; the fields of the other kind have None for it.

    Attributes:
        momentum: running means of the gradients, of matrices.
        mean: running means of the gradients, of parameters that AdamW updates.
        mean_square: running means of their squares, of the same.

    Examples:
        >>> params = {"w": md.ones(md.dims(embed=4, d_ff=8)), "scale": md.ones(md.dims(embed=4))}
        >>> state = md.jit(md.optim.Muon(2e-2).init)(params)
        >>> print(state.momentum.params["w"].dims, state.momentum.params["scale"])
        [embed=4, d_ff=8] None
        >>> print(state.mean.params["w"], state.mean.params["scale"].dims)
        None [embed=4]
    """

    momentum: Mirror
    mean: Mirror
    mean_square: Mirror


def is_hidden_matrix(path: str, shape: Shape) -> bool:
    """Whether a parameter is a matrix inside of a network: no embedding, bias or scale.

    Embeddings are known by their names, or by a dim `vocab`; see `is_matrix` for the rest.
    """
    embeds = "embedding" in path.rpartition("/")[2] or shape.find("vocab") is not None
    own = shape.without(_BATCH)
    return len(own) >= 2 and is_matrix(path, shape) and not embeds


@dataclass(frozen=True)
class Muon:
    """Momentum, orthogonalised, for matrices; AdamW for the rest: `Muon(2e-2)`.

    With g the gradient of a matrix, t the number of this step from 1, and r the learning rate:

        momentum = b * momentum + (1 - b) * g
        x = b * momentum / (1 - b**(t + 1)) + (1 - b) * g / (1 - b**t)      nesterov, else momentum
        x = x / norm(x), then five times: x = 3.4445 x + (-4.775 A + 2.0315 A A) x, with A = x x^T
        p = p - r * (scale * x + decay * p)

    The dims of a matrix are divided, in their order, into rows and columns so that it is nearest to
    square: `[embed, heads, kv]` has rows `embed`, `[heads, kv, embed]` rows `heads, kv`. Dims
    `layers` and `experts` stack many matrices. Products over split dims are planned like any
    others: split rows or columns leave partial sums of A.

    Attributes:
        learning_rate: a number, or a schedule.
        momentum: b.
        nesterov: whether the gradient counts once more.
        steps: how many iterations.
        consistent_rms: if given, the root mean square that an update has for r = 1, as AdamW's has
            about 0.2 (Liu et al. 2025, "Muon is scalable for LLM training", section 2.2): `scale`
            is sqrt(max(rows, columns)) times it, and one learning rate serves both kinds. Else
            `scale` is sqrt(max(1, columns / rows)).
        weight_decay: decay of the parameters that `mask` chooses, as in `AdamW`.
        mask: (path, shape) -> whether a parameter decays, as in `AdamW`.
        matrices: (path, shape) -> whether a parameter is updated as a matrix.
        adam_learning_rate: for the other parameters. None: `learning_rate`.
        b1, b2, eps: for the other parameters, as in `AdamW`; `eps` is added to norms, too.

    Raises:
        ValueError: a hyperparameter is out of range; all of them are reported.

    Examples:
        >>> optimizer = md.optim.Muon(0.1)
        >>> params = md.named([[1.0, 0.0], [0.0, 1.0]], ["embed", "d_ff"])
        >>> g = md.named([[3.0, 1.0], [0.0, 2.0]], ["embed", "d_ff"])
        >>> state, update = md.jit(optimizer.init)(params), md.jit(optimizer.update)
        >>> small, large = update(g, state, params, 0), update(100.0 * g, state, params, 0)
        >>> np.allclose(small[0], large[0])  # the size of a gradient does not count
        True
    """

    learning_rate: float | Schedule
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    consistent_rms: float | None = None
    weight_decay: float = 0.0
    mask: Mask = is_matrix
    matrices: Mask = is_hidden_matrix
    adam_learning_rate: float | Schedule | None = None
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        rms, adam = self.consistent_rms, self.adam_learning_rate
        check_ranges(
            "Muon",
            {
                "momentum": (self.momentum, "(0, 1)"),
                "b1": (self.b1, "[0, 1)"),
                "b2": (self.b2, "[0, 1)"),
                "eps": (self.eps, "(0, inf)"),
                "weight_decay": (self.weight_decay, "[0, inf)"),
                **({} if rms is None else {"consistent_rms": (rms, "(0, inf)")}),
            },
            bad_rate(self.learning_rate),
            "" if adam is None else bad_rate(adam, "adam_learning_rate"),
            bad_mask(self.mask),
            bad_mask(self.matrices, "matrices"),
            ""
            if is_whole(self.steps) and self.steps > 0
            else f"steps must be a whole number of at least 1, got {self.steps}",
        )

    @property
    def _adam(self) -> AdamW:
        rate = self.learning_rate if self.adam_learning_rate is None else self.adam_learning_rate
        return AdamW(rate, self.b1, self.b2, self.eps, self.weight_decay, self.mask)

    @init_method
    def init(self, params: Any) -> MuonState:
        """Returns means of zero; errors as in `AdamW.init`.

        Raises:
            ValueError: `matrices` chooses parameters that are no matrices; all are listed.
        """
        check_mask(self.mask, params)
        self._check_matrices(params)

        def of_matrices(path: str, shape: Shape) -> Shape | None:
            return shape if self.matrices(path, shape) else None

        def of_others(path: str, shape: Shape) -> Shape | None:
            return None if self.matrices(path, shape) else shape

        return MuonState(
            momentum=zeros_like(params, of_matrices),
            mean=zeros_like(params, of_others),
            mean_square=zeros_like(params, of_others),
        )

    @update_method(MuonState)
    def update(
        self, grads: Any, state: MuonState, params: Any, step: Tensor
    ) -> tuple[Any, MuonState]:
        """Returns the parameters and the state after one step; see `Optimizer.update`."""
        by_adam = self._adam.one(step)

        @cache
        def scalars(dtype: np.dtype) -> tuple[Tensor, Tensor, Tensor]:
            count, b = ops.cast(step + 1, dtype), math.log(self.momentum)
            rate = ops.cast(rate_at(self.learning_rate, step), dtype)
            return rate, -ops.expm1(b * count), -ops.expm1(b * (count + 1))

        def one(
            path: str, g: Tensor, momentum: Any, mean: Any, mean_square: Any, p: Tensor
        ) -> tuple[Any, ...]:
            if momentum is None:
                p, mean, mean_square = by_adam(path, g, mean, mean_square, p)
                return p, None, mean, mean_square
            rate, now, following = scalars(p.dtype)
            b = self.momentum
            momentum = b * momentum + (1.0 - b) * g
            x = b * momentum / following + (1.0 - b) * g / now if self.nesterov else momentum
            rows, columns = rows_and_columns(p.shape)
            x = self._scale(rows, columns) * orthogonalised(x, rows, self.steps, self.eps)
            decays = self.weight_decay and self.mask(path, p.shape)
            decayed = (1.0 - rate * self.weight_decay) * p if decays else p
            return decayed - rate * x, momentum, None, None

        states = (state.momentum, state.mean, state.mean_square)
        params, (momentum, mean, mean_square) = update_each(one, params, grads, *states)
        return params, MuonState(momentum, mean, mean_square)

    def _check_matrices(self, params: Any) -> None:
        keyed, _ = jax.tree_util.tree_flatten_with_path(params)
        shapes = {path_of(keys): p.dims for keys, p in keyed if is_float(p.dtype)}
        misfits = [
            f"{path} {shape}"
            for path, shape in shapes.items()
            if self.matrices(path, shape) and len(shape.without(_BATCH)) < 2
        ]
        if misfits:
            raise ValueError(
                f"Muon: matrices chooses {', '.join(misfits)}, but a matrix has two dims or more "
                f"besides {' and '.join(_BATCH)}; AdamW updates what it does not choose"
            )

    def _scale(self, rows: Sequence[Dimension], columns: Sequence[Dimension]) -> float:
        height, width = Shape(rows).volume, Shape(columns).volume
        if self.consistent_rms is not None:
            return math.sqrt(max(height, width)) * self.consistent_rms
        return math.sqrt(max(1.0, width / height))


def rows_and_columns(shape: Shape) -> tuple[list[Dimension], list[Dimension]]:
    """Returns the rows and the columns of a parameter, as a matrix as near to square as possible.

    Dims `layers` and `experts` are neither. The others keep their order; of equal divisions, the
    first counts.
    """
    dims = list(shape.without(_BATCH))

    def skew(cut: int) -> float:
        return abs(math.log(Shape(dims[:cut]).volume / Shape(dims[cut:]).volume))

    cut = min(range(1, len(dims)), key=skew)
    return dims[:cut], dims[cut:]


def orthogonalised(x: Tensor, rows: Sequence[Dimension], steps: int, eps: float) -> Tensor:
    """Returns about the nearest orthogonal matrix, by Newton-Schulz iterations.

    `orthogonalised(x, [embed], 5, 1e-8)` for x of `[embed, d_ff]`.

    Args:
        x: one matrix, or many with the dims `layers` and `experts`.
        rows: its dims that are rows; all others are columns.
    """
    own = x.shape.without(_BATCH)
    columns = [dim for dim in own if dim not in rows]
    # f(x) is the transpose of f(x^T), so the products can have the smaller side.
    short = list(rows) if Shape(rows).volume <= Shape(columns).volume else columns
    long = [dim for dim in own if dim not in short]
    names = [dim.name for dim in short]
    other = {name: f"{name}{_OTHER}" for name in names}
    middle = {name: f"{name}{_MIDDLE}" for name in names}
    a, b, c = _COEFFICIENTS
    x = x / (ops.sqrt(ops.sum(ops.square(x), own)) + eps)
    for _ in range(steps):
        across = ops.rename(x, other)
        gram = ops.einsum(x, across, over=long)
        left = ops.rename(gram, {other[name]: middle[name] for name in names})
        squared = ops.einsum(left, ops.rename(gram, middle), over=list(middle.values()))
        x = a * x + ops.einsum(b * gram + c * squared, across, over=list(other.values()))
    return x
