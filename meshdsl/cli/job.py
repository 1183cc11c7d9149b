"""A job: what the flags of `train` and `explain` mean together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from absl import flags

from meshdsl.cli.flags import FLAGS, Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.parsing.readers import AUTO
from meshdsl.cli.parsing.record_flags import names_of, values_of
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import Decision
from meshdsl.models.remat import KINDS
from meshdsl.optim import Ema, Excluding, Optimizer, is_matrix, schedules
from meshdsl.optim.by_name import DEFAULT, by_name
from meshdsl.tensors.named_array import Spec
from meshdsl.tensors.policy import Policy
from meshdsl.training.data.corpus import has_chats
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.tokenizers import check_vocabulary, load_tokenizer
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.microbatches import check_microbatches
from meshdsl.training.recipe import Recipe
from meshdsl.training.state import spec_of

_TEXT = {"tokens", "targets"}  # what a batch of text has
_BYTES = 256


@dataclass(frozen=True)
class Job:
    """A model and how it is trained, the shape of its batches, and where all of it goes.

    Attributes:
        remats: what the backward pass may keep, if time decides; see `cli.planning.steps`.
        decisions: what was decided by time before the step is lowered.
        steps: the training steps of this job and of those made from it; see `cli.planning.steps`.
    """

    model: Any
    recipe: Recipe
    batch_size: int
    length: int
    batch_spec: Mapping[str, Spec]
    mesh: Mesh | None
    layout: Layout | None
    backend: str
    options: Options
    remats: tuple[str, ...] = ()
    decisions: tuple[Decision, ...] = ()
    steps: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    def keeping(self, remat: str) -> Job:
        """Returns the job with another choice of what the backward pass keeps."""
        model = self.model.with_overrides(f"remat={remat}")
        recipe = replace(self.recipe, init=model.init, loss=model.loss, update=model.update)
        return replace(self, model=model, recipe=recipe, remats=())


def build(values: flags.FlagValues, problems: Problems, feeds_text: bool = True) -> Job:
    """Returns the job that the flags describe.

    Args:
        feeds_text: whether batches are made from text, which the model must accept.

    Raises:
        UsageError: everything in `problems`, and what is wrong with the model and the numbers.
    """
    from meshdsl.models import load, with_lora

    model, optimizer, policy = None, None, values.policy
    if not isinstance(values.model, Mistake):
        with problems.caught("--model"):
            model = load(values.model, values.model_args)
    if model is not None and values.lora is not None:
        with problems.caught("--lora"):
            model = with_lora(model, values.lora)
            spec_of(model.init)  # its patterns are of parameters
    if values.tpu and values.backend != "tf":
        problems.add("--tpu: only --backend=tf takes the name of a TPU; JAX finds its own")
    if values.layout and not values.mesh_shape:
        problems.add(
            '--layout needs a mesh: give --mesh_shape, as in --mesh_shape="data:2,model:4"'
        )
    optimizer = _optimizer(values, problems)
    problems.check()
    assert model is not None and optimizer is not None

    if policy is not None and hasattr(model.config, "policy"):
        names = ("params", "compute", "output")
        changes = [f"policy.{name}={getattr(policy, name).name}" for name in names]
        model, policy = model.with_overrides(",".join(changes)), None  # it knows best where to cast
    has_remat = hasattr(model.config, "remat")
    if values.remat not in (None, AUTO) and has_remat:
        model = model.with_overrides(f"remat={values.remat}")
    elif values.remat is not None and not has_remat:
        problems.add(
            f"--remat: {values.model} has no `remat` in its configuration; md.checkpoint around a "
            "part of the model computes that again"
        )
    batch_size, length = values.batch_size or model.batch_size, values.length or model.length
    batch_spec = _batch_spec(values, model, batch_size, length, feeds_text, problems)
    _check_microbatches(values, model, batch_size, length, problems)
    scaling = None
    with problems.caught("--loss_scale"):
        scaling = _loss_scaling(values, getattr(model.config, "policy", policy))
    problems.check()
    settings = values_of(Recipe, values)
    settings |= {"policy": policy, "clip_norm": values.clip_norm or None}
    settings |= {"loss_scaling": scaling, "update": model.update}
    return Job(
        model=model,
        recipe=Recipe(model.init, model.loss, optimizer, **settings),
        batch_size=batch_size,
        length=length,
        batch_spec=batch_spec,
        mesh=values.mesh_shape,
        layout=values.layout,
        backend=values.backend,
        options=Options(**values_of(Options, values)),
        remats=KINDS if values.remat == AUTO else (),
    )


def _batch_spec(
    values: flags.FlagValues,
    model: Any,
    batch_size: int,
    length: int,
    feeds_text: bool,
    problems: Problems,
) -> Mapping[str, Spec]:
    """Returns the specs of a batch; adds to `problems` what the model cannot learn from."""
    from meshdsl.models.model import learned_in, packed_batch

    batch_spec = model.batch_spec(batch_size, length)
    if feeds_text and set(batch_spec) != _TEXT:
        problems.add(
            f"--model: {values.model} takes batches of {', '.join(batch_spec)}, but this command "
            "feeds text (tokens and targets); train it from Python, with "
            "meshdsl.training.loop.train"
        )
    if set(batch_spec) == _TEXT:
        _check_vocabulary(values, vocabulary(model), problems)
        if values.packing and not model.packed:
            problems.add(
                f"--packing: the loss of {values.model} does not take the `segments` and "
                "`positions` of packed documents"
            )
        elif values.packing:
            batch_spec = packed_batch(batch_size, length)
        with problems.caught("--data"):
            if has_chats(values.data, values.data_column) and not model.masked:
                problems.add(
                    f"--data: {values.model} learns all tokens, so it takes no chats: its loss "
                    "does not take `learned`"
                )
            elif has_chats(values.data, values.data_column):
                batch_spec = learned_in(batch_spec)
    return batch_spec


def _check_microbatches(
    values: flags.FlagValues, model: Any, batch_size: int, length: int, problems: Problems
) -> None:
    """Adds what keeps a batch, of any size of the ramp, from being divided."""
    sizes = [batch_size]
    if values.batch_ramp is not None:
        with problems.caught("--batch_ramp"):
            sizes = values.batch_ramp.sizes(batch_size)
    if values.microbatches > 1:
        with problems.caught("--microbatches"):
            for size in sizes:
                check_microbatches(model.batch_spec(size, length), values.microbatches)


def on_hardware(job: Job, name: str) -> Job:
    """Returns a job whose programs are lowered for hardware of a name."""
    return replace(job, options=replace(job.options, hardware=name))


def on_given_hardware(job: Job, values: flags.FlagValues) -> Job:
    """Returns a job for the hardware of `--hardware`, by whose time lowering decides, if given."""
    return on_hardware(job, values.hardware) if values["hardware"].present else job


def vocabulary(model: Any) -> int:
    """Returns the size of a model's vocabulary; if it states none, the number of bytes."""
    return int(getattr(model.config, "vocab", _BYTES))


def _check_vocabulary(values: flags.FlagValues, vocab: int, problems: Problems) -> None:
    """Checks that the model's vocabulary has all tokens of the tokenizer."""
    if values.tokenizer or values.end_token:
        with problems.caught("--tokenizer"):
            tokenizer = load_tokenizer(values.tokenizer, values.end_token)
            check_vocabulary(tokenizer, vocab, values.model)
        return
    names: list[str] = []
    with problems.caught("--data"):
        names = [name for entry in parse_entries(values.data) for name in entry.patterns]
    if vocab < _BYTES and not (names and all(name.endswith(".bin") for name in names)):
        problems.add(
            f"--model: {values.model} has a vocabulary of {vocab}, but text is bytes and needs "
            f"{_BYTES}: --model_args=vocab={_BYTES}"
        )


def use_host_devices(count: int | None) -> None:
    """Makes virtual CPU devices, if a number of them is given; JAX must not be in use yet."""
    if count is None:
        return
    import jax

    settings = jax.config.values
    if settings["jax_num_cpu_devices"] != count or settings["jax_platforms"] != "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def use_no_devices() -> None:
    """Keeps JAX from looking for devices; a description of the machine replaces them."""
    import jax

    jax.config.update("jax_platforms", "cpu")


def use_tpu(name: str | None, backend: str) -> None:
    """Sets the TPU of the TensorFlow backend, if one is given, and keeps JAX from using it."""
    if backend != "tf":
        return
    if name:
        os.environ["TPU_NAME"] = name
    if os.environ.get("TPU_NAME", "").strip():
        import jax

        jax.config.update("jax_platforms", "cpu")


def _optimizer(values: flags.FlagValues, problems: Problems) -> Optimizer | None:
    """Returns the optimizer with its schedule, if the flags of both fit."""
    names = ("learning_rate", "schedule", "min_learning_rate", "warmup_steps", "decay_steps")
    settings = {
        name: getattr(values, name)
        for name in (*names, "steps", "weight_decay", "optimizer", "ema_decay")
    }
    if any(isinstance(value, Mistake) for value in settings.values()):
        return None
    peak, end, steps = settings["learning_rate"], settings["min_learning_rate"], settings["steps"]
    warmup, decay = settings["warmup_steps"], settings["decay_steps"]
    if decay is not None and settings["schedule"] != "wsd":
        problems.add("--decay_steps: only --schedule=wsd has a decay of its own length")
    if end is not None and settings["schedule"] == "constant":
        problems.add("--min_learning_rate: --schedule=constant stays at its peak; leave it out")
    warmup = steps // 10 if warmup is None else warmup
    end = 0.1 * peak if end is None else end
    rate = None
    with problems.caught("--warmup_steps" if end <= peak else "--min_learning_rate"):
        rate = schedules.by_name(settings["schedule"], peak, warmup, steps, end, decay)
    if rate is None:
        return None
    mask = Excluding(values.weight_decay_except) if values.weight_decay_except else is_matrix
    made = by_name(settings["optimizer"] or DEFAULT, rate, settings["weight_decay"], mask)
    if values.ema_decay is None:
        return made
    with problems.caught("--ema_decay"):
        return Ema(made, values.ema_decay)
    return None


def _loss_scaling(values: flags.FlagValues, policy: Policy | None) -> LossScaling | None:
    """Returns a constant scale if one is given, and one that adapts for float16.

    Raises:
        ValueError: numbers are out of range, or the job has no such scale.
    """
    half = policy is not None and policy.compute == np.float16
    adapts = values.loss_scale is None and half
    adapting = set(names_of(LossScaling).values())
    unused = [f"--{name}" for name in FLAGS if name in adapting and values[name].present]
    if unused and not adapts:
        raise ValueError(
            f"{', '.join(unused)} are for a scale that adapts, which there is for "
            "--policy=compute=float16 without --loss_scale"
        )
    if values.loss_scale is not None:
        return LossScaling.constant(values.loss_scale)
    if not half:
        return None
    return LossScaling(**values_of(LossScaling, values))
