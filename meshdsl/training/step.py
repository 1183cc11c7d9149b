"""The training step and the evaluation step: functions to be traced, of a state and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

import meshdsl.ops as ops
from meshdsl.gradients.autodiff import value_and_grad
from meshdsl.ops.creation import as_tensor
from meshdsl.optim.clipping import bad_norm, clip_by_global_norm, global_norm
from meshdsl.optim.from_optax import Transformation, as_optimizer
from meshdsl.optim.optimizer import Optimizer
from meshdsl.optim.schedules import rate_at
from meshdsl.precision.rewriting import with_precision
from meshdsl.precision.rules import Precision
from meshdsl.tensors.dtypes import is_float
from meshdsl.tensors.policy import Policy
from meshdsl.tensors.tensor import Tensor
from meshdsl.tracing.graph import TracedTensor
from meshdsl.tracing.source import definition
from meshdsl.training.batch_entries import missing_entry
from meshdsl.training.loss_scaling import LossScaling, ScalingState, scaled, unscaled
from meshdsl.training.microbatches import accumulated
from meshdsl.training.nonfinite import first_nonfinite, squared_norms
from meshdsl.training.state import TrainState, by_path
from meshdsl.training.step_metrics import EXTRA_METRICS, KEYS, check_metrics
from meshdsl.training.trainable import Trainable, merged, trained

# (params, batch) -> the loss, without dims; or a pair of it and more metrics, by name.
Loss: TypeAlias = Callable[[Any, Any], Any]
Metrics: TypeAlias = dict[str, Any]
# (params after the optimizer's step, what the loss adds) -> params.
Update: TypeAlias = Callable[[Any, Metrics], Any]
_Evaluated: TypeAlias = Callable[[Any, Any], tuple[Tensor, Any]]  # the loss and the metrics
_OWN = {*KEYS, *EXTRA_METRICS, "batch_size", "first_nonfinite", "loss_scale", "samples"}
_HELD_OUT = ("eval_", "test_")  # what names of metrics of held-out data begin with


class StepResult(NamedTuple):
    """What a training step returns; the field names give the state the paths it came in with."""

    state: TrainState
    metrics: Metrics


def make_train_step(
    loss: Loss,
    optimizer: Optimizer | Transformation,
    clip_norm: float | None = None,
    policy: Policy | str | None = None,
    microbatches: int = 1,
    batch_dim: str = "batch",
    skip_nonfinite: bool = False,
    loss_scaling: LossScaling | None = None,
    extra_metrics: Sequence[str] = (),
    trainable: Trainable | None = None,
    update: Update | None = None,
    precision: Precision | str | None = None,
) -> Callable[[TrainState, Any], StepResult]:
    """Returns `train_step(state, batch) -> (state, metrics)`.

    The metrics are float32 without dims: `loss`, `grad_norm` (before clipping), `learning_rate` (if
    the optimizer has one), and what the loss function adds. With `skip_nonfinite` or
    `loss_scaling` there are also `skipped_steps`, so far, and `first_nonfinite`: -1, or the place
    in `nonfinite.gradient_paths` of the first gradient that is not finite (or its length, if each
    gradient is finite by itself). With `loss_scaling` there is `loss_scale`, and `first_nonfinite`
    is -1 as long as the scale can still fall.

    Args:
        loss: (params, batch) -> the loss, or (the loss, {name: metric}); all without dims.
        optimizer: one of `meshdsl.optim`, or of optax; see `from_optax`.
        clip_norm: the global norm above which gradients are scaled down to it.
        policy: dtypes to compute in; without it, those of the parameters.
        microbatches: the number of parts of a batch, computed one after another. Gradients and
            metrics are the means over the parts, and gradients are reduced once; see
            `training.microbatches`.
        batch_dim: the dim that is split into microbatches.
        skip_nonfinite: whether a step whose loss or gradients are not finite is skipped:
            parameters and optimizer stay as they were, and the schedule does not move on.
        loss_scaling: multiplies the loss to keep gradients in the range of half precision, and
            skips such steps too.
        extra_metrics: names of `step_metrics.EXTRA_METRICS` to compute as well.
        trainable: which parameters are trained, as in `training.trainable.trained`; by default all.
            The others have no gradient, no state and no decay, and do not change by a bit.
            Parameters that the loss does not depend on, or only behind `md.stop_gradient`, do not
            change either, but have state.
        update: changes parameters that no gradient trains, such as running means or a router's
            bias, after the optimizer: (params, added) -> params. `added` are the values that the
            loss returns beside its own; they may have dims then, and those with dims are no
            metrics.
        precision: dtypes of products, by rules: `mlp:fp8,attention:bf16`; see `md.with_precision`.
            Paths begin with `params`.

    Raises:
        ValueError: an extra metric is unknown, or `clip_norm` is not above 0; when traced: the loss
            or `update` returns what it must not, the loss depends on no parameter and there is no
            `update`, the microbatches do not divide the batch, or the state was not created for
            this step.
    """
    check_metrics(extra_metrics)
    check_clip_norm(clip_norm)
    chosen = as_optimizer(optimizer)
    evaluate = _with_policy(loss, policy, update is not None, precision)
    guarded = skip_nonfinite or loss_scaling is not None

    def train_step(state: TrainState, batch: Any) -> StepResult:
        _check_state(state, guarded, loss_scaling)
        params = trained(state.params, trainable)
        function = evaluate if trainable is None else _of_part(evaluate, state.params)
        (value, more), grads = _differentiated(function, state.scaling, microbatches, batch_dim)(
            params, batch
        )
        if update is None:
            _need_reached(loss, params, grads)
        squares = squared_norms(grads, params) if guarded else None
        norm = global_norm(grads) if squares is None else ops.sqrt(ops.sum(squares))
        used = grads if clip_norm is None else clip_by_global_norm(grads, clip_norm, norm)[0]
        count = state.updates
        params, moments = chosen.update(used, state.optimizer, params, count)
        params = params if trainable is None else merged(params, state.params)
        params = params if update is None else _updated(update, params, more)
        metrics = {"loss": value, "grad_norm": norm}
        if chosen.learning_rate is not None:
            metrics["learning_rate"] = rate_at(chosen.learning_rate, count)
        result = TrainState(state.step + 1, params, moments)
        if squares is not None:
            finite = ops.logical_and(ops.isfinite(norm), ops.isfinite(value))
            result = _skipping_nonfinite(result, state, finite, loss_scaling)
            metrics["skipped_steps"] = result.skipped
            metrics["first_nonfinite"] = _first_nonfinite(squares, finite, state, loss_scaling)
        if state.scaling is not None:
            metrics["loss_scale"] = state.scaling.scale
        metrics |= {one: EXTRA_METRICS[one](grads, result.params) for one in extra_metrics}
        return StepResult(result, _as_float32({**metrics, **more}))

    return train_step


def check_clip_norm(clip_norm: float | None) -> None:
    """Raises ValueError unless gradients can be scaled down to this norm."""
    if clip_norm is not None and (problem := bad_norm(clip_norm)):
        raise ValueError(f"clip_norm {problem}; None clips nothing")


def make_eval_step(
    loss: Loss,
    policy: Policy | str | None = None,
    dims_allowed: bool = False,
    precision: Precision | str | None = None,
) -> Callable[[Any, Any], Metrics]:
    """Returns `eval_step(params, batch) -> metrics`: `loss` and what the loss function adds.

    Args:
        dims_allowed: whether the values that it adds may have dims, as for `update` of
            `make_train_step`; those with dims are no metrics.
        precision: dtypes of products, as for `make_train_step`.
    """
    evaluate = _with_policy(loss, policy, dims_allowed, precision)

    def eval_step(params: Any, batch: Any) -> Metrics:
        value, more = evaluate(params, batch)
        return _as_float32({"loss": value, **more})

    return eval_step


def _with_policy(
    loss: Loss,
    policy: Policy | str | None,
    dims_allowed: bool,
    precision: Precision | str | None,
) -> _Evaluated:
    """Returns the loss function with its dtypes, always returning a pair."""
    policy = Policy.of(policy)

    compute = with_precision(loss, precision, names=("params", "batch"))

    def evaluate(params: Any, batch: Any) -> tuple[Tensor, Metrics]:
        if policy is not None:
            params, batch = policy.to_compute(params), policy.to_compute(batch)
        try:
            result = compute(params, batch)
        except KeyError as error:
            missing = missing_entry(error, loss, params, batch)
            if missing is None:
                raise
            raise missing from None
        value, more = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        _check_loss(loss, value, more)
        more = _added(more, dims_allowed)
        return (policy.to_output(value) if policy is not None else value), more

    return evaluate


def _of_part(function: _Evaluated, params: Any) -> _Evaluated:
    """Returns a function of the parameters that are trained; the others are constants."""

    everything = params

    def of_part(params: Any, batch: Any) -> tuple[Tensor, Any]:  # gradients are named after it
        return function(merged(params, everything), batch)

    return of_part


def _differentiated(
    function: _Evaluated, scaling: ScalingState | None, microbatches: int, batch_dim: str
) -> Callable[[Any, Any], tuple[tuple[Tensor, Metrics], Any]]:
    """Returns a function that computes the loss, the metrics and the gradients.

    It computes them in microbatches and with a scaled loss, if asked for. The returned loss and
    gradients are not scaled.
    """
    scaled_up = function if scaling is None else _scaled(function, scaling)
    if microbatches == 1:
        differentiated = value_and_grad(scaled_up, has_aux=True, zeros=False)
    else:
        differentiated = accumulated(scaled_up, microbatches, batch_dim)
    if scaling is None:
        return differentiated

    def unscaled_again(params: Any, batch: Any) -> tuple[tuple[Tensor, Metrics], Any]:
        (_, values), grads = differentiated(params, batch)
        return values, unscaled(grads, scaling)

    return unscaled_again


def _scaled(
    evaluate: _Evaluated, state: ScalingState
) -> Callable[[Any, Any], tuple[Tensor, tuple[Tensor, Metrics]]]:
    """Returns a function whose value is the scaled loss, beside the loss and the metrics."""

    def scaled_up(params: Any, batch: Any) -> tuple[Tensor, tuple[Tensor, Metrics]]:
        value, more = evaluate(params, batch)
        return scaled(value, state), (value, more)

    return scaled_up


def _skipping_nonfinite(
    result: TrainState, before: TrainState, finite: Tensor, scaling: LossScaling | None
) -> TrainState:
    """Returns the state after a step; a step that is not finite changes only counts and scale."""

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return new if new is old else ops.where(finite, new, old)

    skips = ops.cast(ops.logical_not(finite), "int32")
    new_scaling = before.scaling
    if scaling is not None and new_scaling is not None:
        new_scaling = scaling.update(new_scaling, finite)
    return TrainState(
        step=result.step,
        params=jax.tree.map(chosen, result.params, before.params),
        optimizer=jax.tree.map(chosen, result.optimizer, before.optimizer),
        skipped=before.skipped + skips,
        scaling=new_scaling,
    )


def _updated(update: Update, params: Any, added: Metrics) -> Any:
    """Returns the parameters that `update` returns for these.

    Raises:
        ValueError: `update` returns other leaves, dims or dtypes; all differences are listed.
    """
    after = update(params, added)
    before, now = by_path(params), by_path(after)
    problems = [f"{path}: missing" for path in before if path not in now]
    problems += [f"{path}: not a parameter" for path in now if path not in before]
    for path, one in before.items():
        new = now.get(path, one)
        if not isinstance(new, Tensor):
            problems.append(f"{path}: of type {type(new).__name__} instead of {one}")
        elif (new.shape, new.dtype) != (one.shape, one.dtype):
            problems.append(f"{path}: {new} instead of {one}")
    if problems:
        first = f"`update` ({definition(update)}) must return the parameters as it was given them"
        raise ValueError("\n  ".join([first, *problems]))
    return after


def _first_nonfinite(
    squares: Tensor, finite: Tensor, state: TrainState, scaling: LossScaling | None
) -> Tensor:
    """Returns the metric `first_nonfinite`."""
    if scaling is not None and state.scaling is not None:
        finite = ops.logical_or(finite, scaling.can_fall(state.scaling))
    return first_nonfinite(squares, finite)


def _check_state(state: TrainState, guarded: bool, scaling: LossScaling | None) -> None:
    wanted = {"skipped": guarded, "scaling": scaling is not None}
    problems = [
        f"the state has {'no' if on else 'a field'} `{name}`, which this step "
        f"{'needs' if on else 'leaves out'}"
        for name, on in wanted.items()
        if (getattr(state, name) is not None) != on
    ]
    if problems:
        raise ValueError(
            f"{'; '.join(problems)}. Give `create` the step's skip_nonfinite and loss_scaling"
        )


def _as_float32(metrics: Metrics) -> Metrics:
    """Returns the metrics to report: values without dims; only `update` gets the others."""
    return {name: ops.cast(x, "float32") for name, x in metrics.items() if not x.shape}


def _need_reached(loss: Loss, params: Any, grads: Any) -> None:
    """Raises ValueError if the loss depends on none of the parameters that are trained."""
    paths = [path for path, p in by_path(params).items() if is_float(p.dtype)]
    if paths and not jax.tree.leaves(grads):
        some = ", ".join(f"`{path}`" for path in paths[:4]) + (", ..." if len(paths) > 4 else "")
        raise ValueError(
            f"the loss function `{getattr(loss, '__name__', type(loss).__name__)}` "
            f"({definition(loss)}) depends on none of the parameters that are trained ({some}), or "
            "only behind md.stop_gradient: nothing would learn. Compute the loss from its first "
            "argument"
        )


def _check_loss(loss: Loss, value: Any, more: Any) -> None:
    """Raises ValueError, with the line of the loss function, unless it returns what it must."""
    problem = ""
    if not isinstance(value, TracedTensor):
        problem = f"a {type(value).__name__}"
    elif value.shape or not is_float(value.dtype):
        fixes = ["reduce it, as in md.mean(x)"] if value.shape else []
        if not is_float(value.dtype):
            is_complex = value.dtype.kind == "c"
            fixes.append(
                "take its real part, as in md.real(x)"
                if is_complex
                else 'cast it, as in md.cast(x, "float32")'
            )
        problem = f"{value}, made at {value.source}; {', and '.join(fixes)}"
    elif not isinstance(more, Mapping):
        kind = "Tensor" if isinstance(more, Tensor) else type(more).__name__
        problem = f"a {kind} beside the loss"
    if problem:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise ValueError(
            f"the loss function `{name}` ({definition(loss)}) returns {problem}. It must return "
            "a floating-point tensor without dims, or a pair of that and {name: metric}"
        )


def _added(more: Mapping[str, Any], dims_allowed: bool) -> Metrics:
    """Returns the values that the loss adds to its own, with tensors for plain numbers.

    Raises:
        ValueError: some of them are no metrics; all are listed.
    """
    metrics: Metrics = {}
    problems = []
    for name, value in more.items():
        if not isinstance(value, Tensor | int | float | np.generic):
            problems.append(
                f"metric `{name}` is of type {type(value).__name__}; return a tensor or a number"
            )
            continue
        metrics[name] = metric = as_tensor(value)
        if metric.shape and not dims_allowed:
            problems.append(
                f"metric `{name}` has dims {metric.shape}; reduce it first, as in md.mean(x), or "
                "give `update`, for which it is"
            )
    for name in sorted(map(str, more)):
        if name in _OWN:
            problems.append(f"metric `{name}` has the name of a metric of the run")
        elif name.startswith(_HELD_OUT):
            problems.append(
                f"metric `{name}`: names that begin with `eval_` or `test_` are those of held-out "
                "data; choose another"
            )
    if problems:
        raise ValueError("\n  ".join(["the loss function returns", *problems]))
    return metrics
