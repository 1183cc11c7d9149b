"""Stochastic gradient descent with momentum (Sutskever et al. 2013, section 2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import meshdsl.ops as ops
from meshdsl.optim.checks import bad_mask, bad_rate, check_ranges
from meshdsl.optim.masks import check_mask
from meshdsl.optim.methods import init_method, update_method
from meshdsl.optim.optimizer import Mask, Mirror, is_matrix, update_each, zeros_like
from meshdsl.optim.schedules import Schedule, rate_at
from meshdsl.tensors.module import Module
from meshdsl.tensors.tensor import Tensor


class SgdState(Module):
    """The velocity; None without momentum.

    Examples:
        >>> params = {"w": md.ones(md.dims(embed=2))}
        >>> print(md.jit(md.optim.Sgd(0.1, momentum=0.9).init)(params).velocity.params["w"])
        f32[embed=2] [0. 0.]
        >>> print(md.jit(md.optim.Sgd(0.1).init)(params).velocity)
        None
    """

    velocity: Mirror | None


@dataclass(frozen=True)
class Sgd:
    """Gradient descent, plain or with momentum.

    With g the gradient and r the learning rate:

        g        = g + decay * p
        velocity = momentum * velocity + g
        p        = p - r * velocity             or, nesterov, p - r * (momentum * velocity + g)

    Attributes:
        learning_rate: a number, or a schedule.
        weight_decay: decay of the parameters that `mask` chooses, through the gradient.
        mask: (path, shape) -> whether a parameter decays; by default those with two dims or more
            besides `layers`.

    Raises:
        ValueError: a hyperparameter is out of range, or `nesterov` without momentum.

    Examples:
        >>> optimizer = md.optim.Sgd(0.5, momentum=0.9)
        >>> params, g = md.named([1.0, 1.0], ["embed"]), md.named([5.0, -0.1], ["embed"])
        >>> state = md.jit(optimizer.init)(params)
        >>> params, state = md.jit(optimizer.update)(g, state, params, 0)  # step 0
        >>> print(params)
        f32[embed=2] [-1.5   1.05]
    """

    learning_rate: float | Schedule
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    mask: Mask = is_matrix

    def __post_init__(self) -> None:
        check_ranges(
            "Sgd",
            {
                "momentum": (self.momentum, "[0, 1)"),
                "weight_decay": (self.weight_decay, "[0, inf)"),
            },
            bad_rate(self.learning_rate),
            bad_mask(self.mask),
            "nesterov needs a momentum above 0" if self.nesterov and not self.momentum else "",
        )

    @init_method
    def init(self, params: Any) -> SgdState:
        """Returns a velocity of zero, if there is momentum; errors as in `AdamW.init`."""
        check_mask(self.mask, params)
        return SgdState(velocity=zeros_like(params) if self.momentum else None)

    @update_method(SgdState)
    def update(
        self, grads: Any, state: SgdState, params: Any, step: Tensor
    ) -> tuple[Any, SgdState]:
        """Returns the parameters and the state after one step; see `Optimizer.update`."""
        scheduled = rate_at(self.learning_rate, step)

        def decayed(path: str, g: Tensor, p: Tensor) -> Tensor:
            decays = self.weight_decay and self.mask(path, p.shape)
            return g + self.weight_decay * p if decays else g

        def plain(path: str, g: Tensor, p: Tensor) -> tuple[Tensor]:
            return (p - ops.cast(scheduled, p.dtype) * decayed(path, g, p),)

        def moving(path: str, g: Tensor, velocity: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
            g = decayed(path, g, p)
            velocity = self.momentum * velocity + g
            direction = self.momentum * velocity + g if self.nesterov else velocity
            return p - ops.cast(scheduled, p.dtype) * direction, velocity

        if state.velocity is None:
            params, _ = update_each(plain, params, grads)
            return params, state
        params, (velocity,) = update_each(moving, params, grads, state.velocity)
        return params, SgdState(velocity=velocity)
