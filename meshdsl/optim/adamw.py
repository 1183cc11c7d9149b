"""AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization", algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import meshdsl.ops as ops
from meshdsl.optim.checks import bad_mask, bad_rate, check_ranges
from meshdsl.optim.masks import check_mask
from meshdsl.optim.methods import init_method, update_method
from meshdsl.optim.optimizer import Mask, Mirror, is_matrix, update_each, zeros_like
from meshdsl.optim.schedules import Schedule, rate_at
from meshdsl.tensors.module import Module
from meshdsl.tensors.tensor import Tensor


class AdamState(Module):
    """Running means of the gradients and of their squares.

    Examples:
        >>> state = md.jit(md.optim.AdamW(1e-3).init)({"w": md.ones(md.dims(embed=2), "bfloat16")})
        >>> print(state.mean_square.params["w"])  # in float32
        f32[embed=2] [0. 0.]
    """

    mean: Mirror
    mean_square: Mirror


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay.

    With g the gradient, t the number of this step from 1, and r the learning rate:

        mean        = b1 * mean + (1 - b1) * g
        mean_square = b2 * mean_square + (1 - b2) * g**2
        p = p - r * (mean / (1 - b1**t) / (sqrt(mean_square / (1 - b2**t)) + eps) + decay * p)

    Attributes:
        learning_rate: a number, or a schedule.
        weight_decay: decay of the parameters that `mask` chooses.
        mask: (path, shape) -> whether a parameter decays. Paths are the parameters' own, as in
            `blocks/attention/query`. By default all but biases and scales; `masks.Excluding` leaves
            out others too.

    Raises:
        ValueError: a hyperparameter is out of range; all of them are reported.

    Examples:
        >>> optimizer = md.optim.AdamW(0.5)
        >>> params, g = md.named([1.0, 1.0], ["embed"]), md.named([5.0, -0.1], ["embed"])
        >>> state = md.jit(optimizer.init)(params)
        >>> params, state = md.jit(optimizer.update)(g, state, params, 0)  # step 0
        >>> print(params)  # the first step has the size of the rate
        f32[embed=2] [0.5 1.5]
    """

    learning_rate: float | Schedule
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    mask: Mask = is_matrix

    def __post_init__(self) -> None:
        check_ranges(
            "AdamW",
            {
                "b1": (self.b1, "[0, 1)"),
                "b2": (self.b2, "[0, 1)"),
                "eps": (self.eps, "(0, inf)"),
                "weight_decay": (self.weight_decay, "[0, inf)"),
            },
            bad_rate(self.learning_rate),
            bad_mask(self.mask),
        )

    @init_method
    def init(self, params: Any) -> AdamState:
        """Returns means of zero.

        Raises:
            ValueError: the mask excludes a path that no parameter has; see `masks.Excluding`.
        """
        check_mask(self.mask, params)
        return AdamState(mean=zeros_like(params), mean_square=zeros_like(params))

    @update_method(AdamState)
    def update(
        self, grads: Any, state: AdamState, params: Any, step: Tensor
    ) -> tuple[Any, AdamState]:
        """Returns the parameters and the state after one step; see `Optimizer.update`."""
        states = (state.mean, state.mean_square)
        params, (mean, mean_square) = update_each(self.one(step), params, grads, *states)
        return params, AdamState(mean=mean, mean_square=mean_square)

    def one(self, step: Tensor) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        """Returns the update of one parameter, for `update_each`."""

        @cache
        def scalars(dtype: np.dtype) -> tuple[Tensor, Tensor, Tensor]:
            # What does not depend on the parameter is computed once, on scalars. Then the update
            # of an element is eleven operations that read and write each buffer once.
            count = ops.cast(step + 1, dtype)
            rate = ops.cast(rate_at(self.learning_rate, step), dtype)
            size = rate / _bias_correction(self.b1, count)
            shrink = 1.0 - rate * self.weight_decay
            return size, ops.rsqrt(_bias_correction(self.b2, count)), shrink

        def one(
            path: str, g: Tensor, mean: Tensor, mean_square: Tensor, p: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            size, scale, shrink = scalars(p.dtype)
            mean = self.b1 * mean + (1.0 - self.b1) * g
            mean_square = self.b2 * mean_square + (1.0 - self.b2) * ops.square(g)
            decayed = shrink * p if self.weight_decay and self.mask(path, p.shape) else p
            p = decayed - size * mean / (scale * ops.sqrt(mean_square) + self.eps)
            return p, mean, mean_square

        return one


def _bias_correction(decay: float, count: Tensor) -> Tensor:
    """Returns 1 - decay**count, without cancellation in float32."""
    return -ops.expm1(math.log(decay) * count) if decay else ops.ones([], count.dtype)
