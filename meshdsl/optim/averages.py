"""Averages of parameters over the steps of training, held beside an optimizer's state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.optim.checks import check_ranges
from meshdsl.optim.from_optax import Transformation, as_optimizer
from meshdsl.optim.methods import init_method, update_method
from meshdsl.optim.optimizer import Mirror, Optimizer
from meshdsl.optim.schedules import Schedule
from meshdsl.tensors.dtypes import accumulator, is_float
from meshdsl.tensors.module import Module
from meshdsl.tensors.tensor import Tensor


class EmaState(Module):
    """The averages, in `accumulator` dtypes, and the state of the optimizer.

    Examples:
        >>> optimizer = md.optim.Ema(md.optim.AdamW(1e-3))
        >>> state = md.jit(optimizer.init)({"w": md.ones(md.dims(embed=2))})
        >>> print(state.ema.params["w"], state.inner.mean.params["w"])
        f32[embed=2] [1. 1.] f32[embed=2] [0. 0.]
    """

    ema: Mirror
    inner: Any


@dataclass(frozen=True)
class Ema:
    """An optimizer that also averages the parameters: `Ema(AdamW(1e-3), decay=0.999)`.

    With t the number of steps before this one:

        d   = min(decay, (1 + t) / (10 + t))
        ema = d * ema + (1 - d) * p

    So early averages forget the initial parameters (TensorFlow's `ExponentialMovingAverage` with
    `num_updates`). The parameters themselves are those of the optimizer alone. Averages have the
    layouts of parameters, or those of `optimizer/...` rules; nothing is sent for them.

    Attributes:
        optimizer: one of `meshdsl.optim`, or of optax.
        decay: from 0 to below 1; the nearer to 1, the more steps count.

    Raises:
        ValueError: the decay is out of range.

    Examples:
        >>> optimizer = md.optim.Ema(md.optim.Sgd(1.0), decay=0.9)
        >>> params, g = md.named([2.0], ["embed"]), md.named([1.0], ["embed"])
        >>> state = md.jit(optimizer.init)(params)
        >>> params, state = md.jit(optimizer.update)(g, state, params, 0)
        >>> print(params, state.ema.params)  # 0.1 * 2 + 0.9 * 1
        f32[embed=1] [1.] f32[embed=1] [1.1]
    """

    optimizer: Optimizer | Transformation
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_ranges("Ema", {"decay": (self.decay, "[0, 1)")})

    @property
    def learning_rate(self) -> float | Schedule | None:
        """That of the optimizer."""
        return as_optimizer(self.optimizer).learning_rate

    @init_method
    def init(self, params: Any) -> EmaState:
        """Returns the parameters as their first averages, and the optimizer's state."""

        def copied(p: Tensor) -> Tensor | None:
            return ops.cast(p, accumulator(p.dtype)) if is_float(p.dtype) else None

        first = Mirror(jax.tree.map(copied, params))
        return EmaState(ema=first, inner=as_optimizer(self.optimizer).init(params))

    @update_method(EmaState, own=["ema"])
    def update(
        self, grads: Any, state: EmaState, params: Any, step: Tensor
    ) -> tuple[Any, EmaState]:
        """Returns the parameters and the state after one step; see `Optimizer.update`."""
        params, inner = as_optimizer(self.optimizer).update(grads, state.inner, params, step)
        t = ops.cast(step, "float32")
        decay = ops.minimum((1.0 + t) / (10.0 + t), self.decay)

        def averaged(mean: Tensor | None, p: Tensor) -> Tensor | None:
            if mean is None:
                return None
            kept = ops.cast(decay, mean.dtype)
            return kept * mean + (1.0 - kept) * ops.cast(p, mean.dtype)

        means = jax.tree.map(averaged, state.ema.params, params, is_leaf=lambda x: x is None)
        return params, EmaState(ema=Mirror(means), inner=inner)
