"""Names of metrics: those of every report, and those that are computed only if asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax

import meshdsl.ops as ops
from meshdsl.optim.clipping import global_norm
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.tensor import Tensor

# What a report of a run has, in this order, before the metrics of its loss.
KEYS = (
    "step",
    "loss",
    "eval_loss",
    "test_loss",
    "learning_rate",
    "grad_norm",
    "skipped_steps",
    "step_seconds",
    "tokens_per_second",
    "tflops_per_device",
    "mfu",
    "memory_bytes",
    "host_memory_bytes",
    "steps_share",
    "compiling_share",
    "data_share",
    "saving_share",
    "evaluating_share",
    "goodput",
    "recovering_share",
    "repeating_share",
)


def num_zeros(grads: Any, params: Any) -> Tensor:
    """Returns how many elements of the gradients are zero; beyond 2**24, as rounding allows."""
    total = ops.zeros([], "float32")
    for grad in jax.tree.leaves(grads):
        total = total + ops.sum(ops.cast(grad == 0, "float32"))
    return total


def params_norm(grads: Any, params: Any) -> Tensor:
    """Returns the global norm of the parameters that have gradients, after the step."""
    chosen = jax.tree.map(
        lambda g, p: None if g is None else p, grads, params, is_leaf=lambda g: g is None
    )
    return global_norm(chosen)


# Each: (gradients before clipping, parameters after the step) -> float32 without dims.
EXTRA_METRICS: Mapping[str, Callable[[Any, Any], Tensor]] = MappingProxyType(
    {"num_zeros": num_zeros, "params_norm": params_norm}
)


def check_metrics(names: Sequence[str]) -> None:
    """Checks names of `EXTRA_METRICS`.

    Raises:
        ValueError: there are others among them, all of which are listed; or they are one string.
    """
    if isinstance(names, str):
        raise ValueError(f"extra metrics are a list of names, as in [{names!r}], not {names!r}")
    problems = [
        f"unknown metric {name!r}; choose from {', '.join(EXTRA_METRICS)}"
        f"{did_you_mean(name, EXTRA_METRICS)}"
        for name in names
        if name not in EXTRA_METRICS
    ]
    if problems:
        raise ValueError("; ".join(problems))
