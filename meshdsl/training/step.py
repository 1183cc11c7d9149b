"""The training step and the evaluation step: functions to be traced, of a state and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import meshdsl.ops as ops
from meshdsl.autodiff import value_and_grad
from meshdsl.graph import Tensor
from meshdsl.optim.clipping import clip_by_global_norm, global_norm
from meshdsl.optim.optimizer import Optimizer
from meshdsl.optim.schedules import rate_at
from meshdsl.policy import Policy
from meshdsl.training.microbatches import accumulated
from meshdsl.training.state import TrainState

# (params, batch) -> the loss, without dims; or a pair of it and more metrics, by name.
Loss: TypeAlias = Callable[[Any, Any], Any]
Metrics: TypeAlias = dict[str, Any]
_OWN = {"loss", "grad_norm", "learning_rate"}


class StepResult(NamedTuple):
    """What a training step returns; the field names give the state the paths it came in with."""

    state: TrainState
    metrics: Metrics


def make_train_step(
    loss: Loss,
    optimizer: Optimizer,
    clip_norm: float | None = None,
    policy: Policy | None = None,
    microbatches: int = 1,
    batch_dim: str = "batch",
) -> Callable[[TrainState, Any], StepResult]:
    """Returns `train_step(state, batch) -> (state, metrics)`.

    The metrics are float32 without dims: `loss`, `grad_norm` (before clipping), `learning_rate`,
    and what the loss function adds.

    Args:
        loss: (params, batch) -> the loss, or (the loss, {name: metric}); all without dims.
        clip_norm: the global norm above which gradients are scaled down to it.
        policy: dtypes to compute in; without it, those of the parameters.
        microbatches: into how many parts a batch is split, one computed after another. Gradients
            and metrics are the means of theirs, and gradients are reduced once; see
            `training.microbatches`.
        batch_dim: the dim that is split so.

    Raises:
        ValueError: when traced: the loss returns what it must not, or the microbatches do not
            divide the batch.
    """
    evaluate = _with_policy(loss, policy)
    if microbatches == 1:
        differentiated = value_and_grad(evaluate, has_aux=True)
    else:
        differentiated = accumulated(evaluate, microbatches, batch_dim)

    def train_step(state: TrainState, batch: Any) -> StepResult:
        (value, more), grads = differentiated(state.params, batch)
        norm = global_norm(grads)
        if clip_norm is not None:
            grads, _ = clip_by_global_norm(grads, clip_norm, norm)
        params, moments = optimizer.update(grads, state.optimizer, state.params, state.step)
        metrics = {
            "loss": value,
            "grad_norm": norm,
            "learning_rate": rate_at(optimizer.learning_rate, state.step),
            **more,
        }
        return StepResult(TrainState(state.step + 1, params, moments), _as_float32(metrics))

    return train_step


def make_eval_step(loss: Loss, policy: Policy | None = None) -> Callable[[Any, Any], Metrics]:
    """Returns `eval_step(params, batch) -> metrics`: `loss` and what the loss function adds."""
    evaluate = _with_policy(loss, policy)

    def eval_step(params: Any, batch: Any) -> Metrics:
        value, more = evaluate(params, batch)
        return _as_float32({"loss": value, **more})

    return eval_step


def _with_policy(loss: Loss, policy: Policy | None) -> Callable[[Any, Any], tuple[Tensor, Metrics]]:
    """Returns the loss function with its dtypes, always returning a pair."""

    def evaluate(params: Any, batch: Any) -> tuple[Tensor, Metrics]:
        if policy is not None:
            params, batch = policy.to_compute(params), policy.to_compute(batch)
        result = loss(params, batch)
        value, more = result if isinstance(result, tuple) else (result, {})
        _check_added(more)
        return (policy.to_output(value) if policy is not None else value), more

    return evaluate


def _as_float32(metrics: Metrics) -> Metrics:
    return {name: ops.cast(value, "float32") for name, value in metrics.items()}


def _check_added(more: Metrics) -> None:
    problems = [
        f"metric `{name}` has dims {value.shape}; reduce it first, as in md.mean(x)"
        for name, value in more.items()
        if value.shape
    ]
    problems += [f"metric `{name}` has the name of a metric of the step" for name in _OWN & {*more}]
    if problems:
        raise ValueError("\n  ".join(["the loss function returns", *problems]))
