"""Loss scaling: keeps gradients within the range of half precision.

Micikevicius et al. 2018, "Mixed precision training", section 3.2: the loss is multiplied by a
scale before it is differentiated, and the gradients, in float32, are divided by it. The traced step
adjusts the scale by the rule of Megatron-LM (`DynamicGradScaler`). It needs only replicated
scalars, so it costs no communication.
"""

from __future__ import annotations

from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.optim.checks import check_ranges
from meshdsl.tensors.dtypes import accumulator
from meshdsl.tensors.module import Module
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.settings import Number, Whole, record, setting

LARGEST = 2.0**126  # a scale whose inverse float32 has too; TPUs flush smaller ones to 0


class ScalingState(Module):
    """What loss scaling carries from step to step; no dims.

    Attributes:
        scale: float32, the factor of the next step's loss.
        finite_steps: int32, steps with finite gradients since the scale last grew or one was not.
        hysteresis: int32, how many more steps may be not finite before the scale falls.
    """

    scale: Any
    finite_steps: Any
    hysteresis: Any


@record
class LossScaling:
    """A scale that grows while gradients are finite and falls when they are not.

    `LossScaling()` is the dynamic scale of Megatron-LM, `LossScaling.constant(1024)` stays.

    Raises:
        ValueError: numbers are out of range; all are listed.

    Examples:
        >>> from meshdsl.training import LossScaling
        >>> scaling = LossScaling(initial=8.0, hysteresis=1)
        >>> print(scaling.update(scaling.init(), md.named(False, [])).scale)  # a step overflows
        f32[] 4.
        >>> LossScaling.constant(1024.0).growth
        1.0
    """

    initial: float = setting("What the scale that adapts starts from.", Number(), default=2.0**32)
    growth_interval: int = setting(
        "Finite steps in a row after which it doubles.", Whole(1), default=1000
    )
    hysteresis: int = setting("Steps that must overflow before it halves.", Whole(1), default=2)
    minimum: float = setting("It falls no lower.", Number(), default=1.0)
    growth: float = setting("The factor by which it grows, if it does not double.", default=2.0)
    backoff: float = setting("The factor by which it falls, if it does not halve.", default=0.5)

    def __post_init__(self) -> None:
        check_ranges(
            "LossScaling",
            {
                "initial": (self.initial, f"[{self.minimum}, {LARGEST:.3g}]"),
                "growth_interval": (self.growth_interval, "[1, inf)"),
                "hysteresis": (self.hysteresis, "[1, inf)"),
                "minimum": (self.minimum, "(0, inf)"),
                "growth": (self.growth, "[1, inf)"),
                "backoff": (self.backoff, "(0, 1]"),
            },
        )

    @staticmethod
    def constant(scale: float) -> LossScaling:
        """Returns a scale that stays as it is."""
        return LossScaling(initial=scale, minimum=scale, growth=1.0, backoff=1.0)

    def init(self) -> ScalingState:
        """Returns the state to start from."""
        return ScalingState(
            scale=ops.full([], self.initial, "float32"),
            finite_steps=ops.zeros([], "int32"),
            hysteresis=ops.full([], self.hysteresis, "int32"),
        )

    def update(self, state: ScalingState, finite: Tensor) -> ScalingState:
        """Returns the state after a step; `finite` says whether its gradients were finite."""
        finite_steps = state.finite_steps + 1
        grows = ops.logical_and(finite, finite_steps >= self.growth_interval)
        hysteresis = ops.where(finite, state.hysteresis, ops.maximum(state.hysteresis - 1, 0))
        falls = ops.logical_and(ops.logical_not(finite), hysteresis <= 0)
        grown = ops.minimum(state.scale * self.growth, LARGEST)
        restarts = ops.logical_or(grows, ops.logical_not(finite))
        return ScalingState(
            scale=ops.where(grows, grown, ops.where(falls, self._lower(state), state.scale)),
            finite_steps=ops.where(restarts, 0, finite_steps),
            hysteresis=ops.where(grows, self.hysteresis, hysteresis),
        )

    def can_fall(self, state: ScalingState) -> Tensor:
        """Returns whether a smaller scale is left to try, as a bool without dims."""
        return self._lower(state) < state.scale

    def _lower(self, state: ScalingState) -> Tensor:
        return ops.maximum(state.scale * self.backoff, self.minimum)


def scaled(loss: Tensor, state: ScalingState) -> Tensor:
    """Returns the loss to differentiate, in float32 at least."""
    wide = ops.cast(loss, accumulator(loss.dtype))
    return wide * ops.cast(state.scale, wide.dtype)


def unscaled(grads: Any, state: ScalingState) -> Any:
    """Returns the gradients of the loss itself, in float32 at least."""

    def one(g: Tensor) -> Tensor:
        wide = ops.cast(g, accumulator(g.dtype))
        return wide * ops.cast(1.0 / state.scale, wide.dtype)

    return jax.tree.map(one, grads)
