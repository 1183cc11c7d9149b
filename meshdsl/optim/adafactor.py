"""Adafactor (Shazeer and Stern 2018, "Adaptive learning rates with sublinear memory cost").

Invariant: which dims are factored depends on a parameter's dims and their sizes, never on a layout.
So a state can be moved from any mesh to any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import meshdsl.ops as ops
from meshdsl.optim.checks import bad_mask, bad_rate, check_ranges, is_whole
from meshdsl.optim.masks import check_mask
from meshdsl.optim.methods import init_method, update_method
from meshdsl.optim.optimizer import STACKED, Mask, Mirror, is_matrix, update_each, zeros_like
from meshdsl.optim.schedules import Schedule, rate_at
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.module import Module
from meshdsl.tensors.tensor import Tensor

_LEAST_SCALE = 1e-3  # of a parameter's root mean square: epsilon_2 of the paper


class AdafactorState(Module):
    """Running means of squared gradients, factored or in full; each has None for the others.

    Attributes:
        row: means over the largest dim, of parameters that are factored.
        column: means over the second largest dim, of the same parameters.
        full: the squares of all other parameters, element by element.
        mean: running means of the updates; None without momentum.

    Examples:
        >>> optimizer = md.optim.Adafactor(1e-2, min_dim_size_to_factor=4)
        >>> state = md.jit(optimizer.init)({"w": md.ones(md.dims(embed=4, d_ff=8))})
        >>> print(state.row.params["w"].dims, state.column.params["w"].dims, state.full.params["w"])
        [embed=4] [d_ff=8] None
    """

    row: Mirror
    column: Mirror
    full: Mirror
    mean: Mirror | None


@dataclass(frozen=True)
class Adafactor:
    """Adam's second moment as the product of its means over two dims: `Adafactor(1e-2)`.

    With g the gradient, t the number of this step from 1, b = 1 - t**-decay_rate, R the largest
    dim and C the second largest (algorithms 4 and 6 of the paper, and section 8 for the scale):

        row    = b * row + (1 - b) * mean over R of (g**2 + eps)
        column = b * column + (1 - b) * mean over C of (g**2 + eps)
        u = g / sqrt(row * column / mean over C of row)
        u = u / max(1, rms(u) / clipping_threshold)
        p = p - r * (max(rms(p), 1e-3) * u + decay * p)

    The factored state of `[embed, d_ff]` is `[embed]` and `[d_ff]`. Stacked layers (dim `layers`)
    are parameters by themselves: that dim is not factored, and each has its own rms. Dims that are
    split make their means all_reduces of rows and columns.

    Attributes:
        learning_rate: a number, or a schedule; relative to the size of each parameter with
            `multiply_by_parameter_scale`, where 1e-2 is usual.
        min_dim_size_to_factor: parameters whose second largest dim is smaller are not factored.
        decay_rate: how fast b approaches 1.
        clipping_threshold: the root mean square above which an update is scaled down. None: never.
        momentum: of the running mean of the updates, which needs one more copy. None: no mean.
        eps: added to squared gradients; a normal number of float32, so that zero gradients do not
            give NaN.
        weight_decay: decay of the parameters that `mask` chooses, as in `AdamW`.
        mask: (path, shape) -> whether a parameter decays, as in `AdamW`.

    Raises:
        ValueError: a hyperparameter is out of range; all of them are reported.

    Examples:
        >>> optimizer = md.optim.Adafactor(0.5)
        >>> params, g = md.named([1.0, 1.0], ["embed"]), md.named([5.0, -0.1], ["embed"])
        >>> state = md.jit(optimizer.init)(params)
        >>> params, state = md.jit(optimizer.update)(g, state, params, 0)  # step 0
        >>> print(params)
        f32[embed=2] [0.5 1.5]
    """

    learning_rate: float | Schedule
    min_dim_size_to_factor: int = 128
    decay_rate: float = 0.8
    multiply_by_parameter_scale: bool = True
    clipping_threshold: float | None = 1.0
    momentum: float | None = None
    eps: float = 1e-30
    weight_decay: float = 0.0
    mask: Mask = is_matrix

    def __post_init__(self) -> None:
        least = self.min_dim_size_to_factor
        optional = {
            "clipping_threshold": (self.clipping_threshold, "(0, inf)"),
            "momentum": (self.momentum, "[0, 1)"),
        }
        check_ranges(
            "Adafactor",
            {
                "min_dim_size_to_factor": (least, "[1, inf)"),
                "decay_rate": (self.decay_rate, "(0, inf)"),
                "eps": (self.eps, "[1e-37, inf)"),
                "weight_decay": (self.weight_decay, "[0, inf)"),
                **{name: each for name, each in optional.items() if each[0] is not None},
            },
            bad_rate(self.learning_rate),
            bad_mask(self.mask),
        )
        if not is_whole(least):
            raise ValueError(
                f"Adafactor: min_dim_size_to_factor must be a whole number, got {least}"
            )

    def factored(self, shape: Shape) -> tuple[str, str] | None:
        """Returns the dims of a parameter that are factored, the larger first; of equals the first.

        None: its second moment is kept in full.
        """
        # `sorted` keeps the order of equals.
        dims = sorted(shape.without(STACKED), key=lambda dim: -dim.size)
        if len(dims) < 2 or dims[1].size < self.min_dim_size_to_factor:
            return None
        return dims[0].name, dims[1].name

    @init_method
    def init(self, params: Any) -> AdafactorState:
        """Returns means of zero; errors as in `AdamW.init`."""
        check_mask(self.mask, params)

        def without(number: int) -> Any:
            def left(path: str, shape: Shape) -> Shape | None:
                dims = self.factored(shape)
                return None if dims is None else shape.without([dims[number]])

            return left

        def full(path: str, shape: Shape) -> Shape | None:
            return shape if self.factored(shape) is None else None

        return AdafactorState(
            row=zeros_like(params, without(0)),
            column=zeros_like(params, without(1)),
            full=zeros_like(params, full),
            mean=None if self.momentum is None else zeros_like(params),
        )

    @update_method(AdafactorState)
    def update(
        self, grads: Any, state: AdafactorState, params: Any, step: Tensor
    ) -> tuple[Any, AdafactorState]:
        """Returns the parameters and the state after one step; see `Optimizer.update`."""

        @cache
        def scalars(dtype: np.dtype) -> tuple[Tensor, Tensor]:
            count = ops.cast(step + 1, dtype)
            rate = ops.cast(rate_at(self.learning_rate, step), dtype)
            return rate, ops.exp(-self.decay_rate * ops.log(count))

        def one(path: str, g: Tensor, *rest: Any) -> tuple[Any, ...]:
            row, column, full, *mean, p = rest
            rate, new = scalars(p.dtype)
            g = ops.broadcast(g, p.shape)  # its means are those of the parameter's dims
            u, row, column, full = self._scaled(g, row, column, full, new)
            if self.clipping_threshold is not None:
                u = u / ops.maximum(1.0, _rms(u) * (1.0 / self.clipping_threshold))
            u = u * rate
            if self.multiply_by_parameter_scale:
                u = u * ops.maximum(_rms(p), _LEAST_SCALE)
            if self.momentum is not None:
                u = self.momentum * mean[0] + (1.0 - self.momentum) * u
                mean = [u]
            decays = self.weight_decay and self.mask(path, p.shape)
            decayed = (1.0 - rate * self.weight_decay) * p if decays else p
            return decayed - u, row, column, full, *mean

        states = [state.row, state.column, state.full, *([state.mean] if state.mean else [])]
        params, (row, column, full, *mean) = update_each(one, params, grads, *states)
        return params, AdafactorState(row, column, full, mean[0] if mean else None)

    def _scaled(
        self, g: Tensor, row: Any, column: Any, full: Any, new: Tensor
    ) -> tuple[Tensor, Any, Any, Any]:
        """Returns a gradient over the root of its second moment, and the second moment.

        Args:
            new: the weight of this step's squares.
        """
        squares = ops.square(g) + self.eps
        factored = self.factored(g.shape)

        def moved(mean: Tensor, now: Tensor) -> Tensor:
            return mean + new * (now - mean)

        if factored is None:
            full = moved(full, squares)
            return g * ops.rsqrt(full), row, column, full
        largest, second = factored
        row = moved(row, ops.mean(squares, largest))
        column = moved(column, ops.mean(squares, second))
        scaled = g * ops.rsqrt(row / ops.mean(row, second)) * ops.rsqrt(column)
        return scaled, row, column, full


def _rms(x: Tensor) -> Tensor:
    """Returns the root mean square over all dims but `layers`."""
    return ops.sqrt(ops.mean(ops.square(x), x.shape.without(STACKED)))
