"""Recipe: what is trained, and by which rule: all that a step is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from meshdsl.optim.from_optax import Transformation
from meshdsl.optim.optimizer import Optimizer
from meshdsl.tensors.policy import Policy
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.state import TrainState, create
from meshdsl.training.step import Loss, StepResult, Update, make_eval_step, make_train_step
from meshdsl.training.trainable import Trainable


@dataclass(frozen=True)
class Recipe:
    """A model and how it is trained; its functions are to be traced.

    Attributes:
        init: from a key to the parameters.
        loss: (params, batch) -> the loss, or (the loss, {name: metric}).
        clip_norm, policy, microbatches, batch_dim, loss_scaling, extra_metrics, trainable,
            update: as in `make_train_step`.
        nonfinite: whether a step that is not finite stops the run; in any case it changes nothing.
    """

    init: Callable[[Tensor], Any]
    loss: Loss
    optimizer: Optimizer | Transformation
    clip_norm: float | None = None
    policy: Policy | None = None
    microbatches: int = 1
    batch_dim: str = "batch"
    nonfinite: Literal["stop", "skip"] = "stop"
    loss_scaling: LossScaling | None = None
    extra_metrics: Sequence[str] = ()
    trainable: Trainable | None = None
    update: Update | None = None

    def create_state(self) -> Callable[[Tensor], TrainState]:
        """Returns the function from a key to the state to start from."""
        return create(
            self.init, self.optimizer, self.policy, True, self.loss_scaling, self.trainable
        )

    def train_step(self) -> Callable[[TrainState, Any], StepResult]:
        """Returns `train_step(state, batch) -> (state, metrics)`."""
        return make_train_step(
            self.loss,
            self.optimizer,
            self.clip_norm,
            self.policy,
            self.microbatches,
            self.batch_dim,
            skip_nonfinite=True,
            loss_scaling=self.loss_scaling,
            extra_metrics=self.extra_metrics,
            trainable=self.trainable,
            update=self.update,
        )

    def eval_step(self) -> Callable[[Any, Any], dict[str, Any]]:
        """Returns `eval_step(params, batch) -> metrics`."""
        return make_eval_step(self.loss, self.policy, self.update is not None)
