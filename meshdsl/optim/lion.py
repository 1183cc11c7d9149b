"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2)."""

from __future__ import annotations

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


class LionState(Module):
    """Running means of the gradients.

    Examples:
        >>> state = md.jit(md.optim.Lion(1e-4).init)({"w": md.ones(md.dims(embed=2))})
        >>> print(state.mean.params["w"])
        f32[embed=2] [0. 0.]
    """

    mean: Mirror


@dataclass(frozen=True)
class Lion:
    """The sign of an interpolated momentum, with decoupled weight decay: `Lion(1e-4)`.

    With g the gradient and r the learning rate:

        p    = p - r * (sign(b1 * mean + (1 - b1) * g) + decay * p)
        mean = b2 * mean + (1 - b2) * g

    Its state is half of AdamW's. The paper uses a tenth to a third of AdamW's learning rate.

    Attributes:
        learning_rate: a number, or a schedule.
        weight_decay: decay of the parameters that `mask` chooses, as in `AdamW`.
        mask: (path, shape) -> whether a parameter decays, as in `AdamW`.

    Raises:
        ValueError: a hyperparameter is out of range; all of them are reported.

    Examples:
        >>> optimizer = md.optim.Lion(0.5)
        >>> params, g = md.named([1.0, 1.0], ["embed"]), md.named([5.0, -0.1], ["embed"])
        >>> state = md.jit(optimizer.init)(params)
        >>> params, state = md.jit(optimizer.update)(g, state, params, 0)  # step 0
        >>> print(params)  # each step has the size of the rate
        f32[embed=2] [0.5 1.5]
    """

    learning_rate: float | Schedule
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.0
    mask: Mask = is_matrix

    def __post_init__(self) -> None:
        check_ranges(
            "Lion",
            {
                "b1": (self.b1, "[0, 1)"),
                "b2": (self.b2, "[0, 1)"),
                "weight_decay": (self.weight_decay, "[0, inf)"),
            },
            bad_rate(self.learning_rate),
            bad_mask(self.mask),
        )

    @init_method
    def init(self, params: Any) -> LionState:
        """Returns means of zero; errors as in `AdamW.init`."""
        check_mask(self.mask, params)
        return LionState(mean=zeros_like(params))

    @update_method(LionState)
    def update(
        self, grads: Any, state: LionState, params: Any, step: Tensor
    ) -> tuple[Any, LionState]:
        """Returns the parameters and the state after one step; see `Optimizer.update`."""

        @cache
        def rate(dtype: np.dtype) -> Tensor:
            return ops.cast(rate_at(self.learning_rate, step), dtype)

        def one(path: str, g: Tensor, mean: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            direction = ops.sign(self.b1 * mean + (1.0 - self.b1) * g)
            size = rate(p.dtype)
            decays = self.weight_decay and self.mask(path, p.shape)
            decayed = (1.0 - size * self.weight_decay) * p if decays else p
            return decayed - size * direction, self.b2 * mean + (1.0 - self.b2) * g

        params, (mean,) = update_each(one, params, grads, state.mean)
        return params, LionState(mean=mean)
