"""A job: what the flags of `train` and `explain` mean together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from absl import flags

from meshdsl.array import Spec
from meshdsl.cli.flags import Mistake
from meshdsl.cli.problems import Problems
from meshdsl.layouts.layout import Layout
from meshdsl.lowering.options import Options
from meshdsl.mesh import Mesh
from meshdsl.optim import AdamW, schedules
from meshdsl.policy import Policy
from meshdsl.training.microbatches import check_microbatches

_TEXT = {"tokens", "targets"}  # what a batch of text has
_BYTES = 256


@dataclass(frozen=True)
class Job:
    """A model with its optimizer, the shape of its batches, and where all of it goes."""

    model: Any
    optimizer: AdamW
    clip_norm: float | None
    microbatches: int
    policy: Policy | None
    batch_size: int
    length: int
    batch_spec: Mapping[str, Spec]
    mesh: Mesh | None
    layout: Layout | None
    backend: str
    options: Options


def build(values: flags.FlagValues, problems: Problems, feeds_text: bool = True) -> Job:
    """Returns the job that the flags describe.

    Args:
        feeds_text: whether batches are made of text, so that the model must take those.

    Raises:
        UsageError: everything in `problems`, and what is wrong with the model and the numbers.
    """
    from meshdsl.models import load

    model, optimizer, policy = None, None, values.policy
    if not isinstance(values.model, Mistake):
        with problems.caught("--model"):
            model = load(values.model, values.model_args)
    if values.tpu and values.backend != "tf":
        problems.add("--tpu: only --backend=tf takes the name of a TPU; JAX finds its own")
    if values.layout and not values.mesh_shape:
        problems.add(
            '--layout needs a mesh: give --mesh_shape, as in --mesh_shape="data:2,model:4"'
        )
    with problems.caught("--warmup_steps"):
        optimizer = _optimizer(values)
    problems.check()
    assert model is not None and optimizer is not None

    if policy is not None and hasattr(model.config, "policy"):
        names = ("params", "compute", "output")
        changes = [f"policy.{name}={getattr(policy, name).name}" for name in names]
        model, policy = model.with_overrides(",".join(changes)), None  # it knows best where to cast
    if values.remat is not None and hasattr(model.config, "remat"):
        model = model.with_overrides(f"remat={values.remat}")
    elif values.remat is not None:
        problems.add(
            f"--remat: {values.model} has no `remat` in its configuration; md.checkpoint around a "
            "part of the model computes that again"
        )
    batch_size, length = values.batch_size or model.batch_size, values.length or model.length
    batch_spec = model.batch_spec(batch_size, length)
    if feeds_text and set(batch_spec) != _TEXT:
        problems.add(
            f"--model: {values.model} takes batches of {', '.join(batch_spec)}, but this command "
            "feeds text (tokens and targets); train it from Python, with "
            "meshdsl.training.loop.train"
        )
    vocab = getattr(model.config, "vocab", _BYTES)
    if set(batch_spec) == _TEXT and vocab < _BYTES:
        problems.add(
            f"--model: {values.model} has a vocabulary of {vocab}, but text is bytes and needs "
            f"{_BYTES}: --model_args=vocab={_BYTES}"
        )
    if values.microbatches > 1:
        with problems.caught("--microbatches"):
            check_microbatches(batch_spec, values.microbatches)
    problems.check()
    options: dict[str, Any] = {field.name: values[field.name].value for field in fields(Options)}
    return Job(
        model=model,
        optimizer=optimizer,
        clip_norm=values.clip_norm or None,
        microbatches=values.microbatches,
        policy=policy,
        batch_size=batch_size,
        length=length,
        batch_spec=batch_spec,
        mesh=values.mesh_shape,
        layout=values.layout,
        backend=values.backend,
        options=Options(**options),
    )


def use_host_devices(count: int | None) -> None:
    """Makes virtual CPU devices, if a number of them is given; JAX must not be in use yet."""
    if count is None:
        return
    import jax

    held = jax.config.values
    if held["jax_num_cpu_devices"] != count or held["jax_platforms"] != "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def use_tpu(name: str | None) -> None:
    """Names the TPU that the TensorFlow backend runs on, if one is given."""
    if name:
        os.environ["TPU_NAME"] = name


def _optimizer(values: flags.FlagValues) -> AdamW | None:
    """Returns AdamW as language models are trained: b2 of 0.95 (Brown et al. 2020, appendix B)."""
    peak, steps, warmup = values.learning_rate, values.steps, values.warmup_steps
    if any(isinstance(v, Mistake) for v in (peak, steps, warmup, values.weight_decay)):
        return None
    warmup = steps // 10 if warmup is None else warmup
    schedule = schedules.warmup_cosine(peak, warmup, steps, end=0.1 * peak)
    return AdamW(schedule, b2=0.95, weight_decay=values.weight_decay)
