"""Recipe: the model, the loss and the optimizer, and how a step trains with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal

from meshdsl.optim.from_optax import Transformation
from meshdsl.optim.optimizer import Optimizer
from meshdsl.precision.rules import Precision
from meshdsl.tensors.policy import Policy
from meshdsl.tensors.tensor import Tensor
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.settings import PATH, Of, OneOf, Whole, check, record, setting
from meshdsl.training.state import TrainState, create
from meshdsl.training.step import (
    Loss,
    StepResult,
    Update,
    check_clip_norm,
    make_eval_step,
    make_train_step,
)
from meshdsl.training.step_metrics import EXTRA_METRICS, check_metrics
from meshdsl.training.trainable import Trainable


@record
class Recipe:
    """A model, what it starts from, and how a step trains it: `Recipe(init, loss, AdamW(1e-3))`.

    `make_train_step` describes the step. `trainable` may also be a function of the path and the
    shape of a parameter. A step that is not finite changes nothing. With `nonfinite="stop"` it ends
    the run, with `nonfinite="skip"` it gives a warning; both name the first gradient that is not
    finite.

    Raises:
        ValueError: values are of another kind, numbers are out of range, or a metric is unknown.

    Examples:
        >>> from meshdsl.training import Recipe
        >>> def init(key):
        ...     return {"w": md.random.normal(key, md.dims(embed=4))}
        >>> def loss(params, batch):
        ...     return md.mean((md.einsum(batch["x"], params["w"], over="embed") - batch["y"]) ** 2)
        >>> recipe = Recipe(init, loss, md.optim.AdamW(1e-3), clip_norm=1.0, microbatches=4)
        >>> recipe.microbatches, recipe.nonfinite
        (4, 'stop')
    """

    init: Callable[[Tensor], Any] = setting(
        "From a key to the parameters; traced.",
        Of(Callable, "is a function from a key to the parameters"),
    )
    loss: Loss = setting(
        "(params, batch) -> the loss, or (the loss, {name: metric}); traced.",
        Of(Callable, "is a function of the parameters and a batch"),
    )
    optimizer: Optimizer | Transformation = setting(
        "One of `meshdsl.optim`, or of optax; see `meshdsl.optim.from_optax`."
    )
    clip_norm: float | None = setting(
        "Global norm above which gradients are scaled down; None: never.", default=None
    )
    policy: Policy | str | None = setting(
        'Dtypes, "bfloat16" or "params=float32,compute=bfloat16". Default: the model\'s.',
        default=None,
    )
    precision: Precision | str | None = setting(
        "Dtypes of products, by path and operation: mlp:fp8,attention:bf16. fp8 and int8 have "
        "8 bits; - leaves a product as it is. Default: those of `policy`.",
        default=None,
    )
    microbatches: int = setting(
        "Parts of a batch, computed one after another; gradients are reduced once.",
        Whole(1),
        default=1,
    )
    batch_dim: str = setting(
        "The dim of a batch that is split into microbatches, and along which batches grow.",
        Of(str, "is the name of a dim"),
        default="batch",
    )
    nonfinite: Literal["stop", "skip"] = setting(
        "What a step does whose loss or gradients are not finite: it changes nothing in any case.",
        OneOf(("stop", "skip")),
        default="stop",
    )
    loss_scaling: LossScaling | None = setting(
        "Multiplies the loss, to keep gradients in the range of half precision.",
        Of(LossScaling, "is LossScaling() of meshdsl.training.loss_scaling"),
        default=None,
    )
    extra_metrics: Sequence[str] = setting(
        f"Metrics to compute besides, at their cost: {', '.join(EXTRA_METRICS)}.", default=()
    )
    trainable: Trainable | None = setting(
        "Parameters that are trained, by globs on their paths: blocks/**/lora*,head. After ! "
        "what is frozen: !embedding trains all but that. What is not trained has no gradient, "
        "no optimizer state and no decay. Default: all.",
        default=None,
    )
    update: Update | None = setting(
        "Changes parameters that no gradient trains, after the optimizer: (params, what the loss "
        "adds) -> params; traced.",
        Of(Callable, "is a function of the parameters and what the loss adds"),
        default=None,
    )
    seed: int = setting("Seed of the initial parameters.", Whole(0), default=0)
    init_from: str | os.PathLike[str] | None = setting(
        "Weights to start from: a .safetensors file, a folder of them or of Hugging Face; they "
        "may lack what `trainable` names, which is initialised then. A checkpoint in the workdir "
        "goes before them.",
        PATH,
        default=None,
    )

    def __post_init__(self) -> None:
        check(self)
        Policy.of(self.policy)
        Precision.of(self.precision)
        check_clip_norm(self.clip_norm)
        check_metrics(self.extra_metrics)

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
            precision=self.precision,
        )

    def eval_step(self) -> Callable[[Any, Any], dict[str, Any]]:
        """Returns `eval_step(params, batch) -> metrics`."""
        return make_eval_step(self.loss, self.policy, self.update is not None, self.precision)
