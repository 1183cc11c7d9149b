"""Flags from records: one for each field of `Options` and of the records that `train` takes.

A record declares what a field means, which values it takes and what its default is
(`meshdsl.training.settings`). This module lists where the command line differs from that.
"""

from __future__ import annotations

import re
import typing
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeAlias

from absl.flags import FlagValues

from meshdsl.cli.parsing.readers import (
    Reader,
    count_of_steps,
    minutes,
    number,
    one_of,
    or_auto,
    size,
    some_of,
    steps_of_checkpoints,
    truth,
    whole,
    words_of,
)
from meshdsl.lowering.backends import compiler_flags
from meshdsl.lowering.options import PIPELINES, Options
from meshdsl.precision.rules import Precision
from meshdsl.tensors.policy import Policy
from meshdsl.training.checkpointing.saving import Saving
from meshdsl.training.data.feeding import Data
from meshdsl.training.evaluation import Evaluation
from meshdsl.training.health.settings import Health
from meshdsl.training.loss_scaling import LossScaling
from meshdsl.training.recipe import Recipe
from meshdsl.training.reporting.reports import Reporting
from meshdsl.training.settings import PATH, TRUTH, Kind, Number, Of, OneOf, Whole, settings
from meshdsl.training.step_metrics import EXTRA_METRICS
from meshdsl.training.stopping import Stops

# (default, reader, help). Without a default a flag is None unless given.
Flag: TypeAlias = tuple[str | None, Reader, str]

# The records, each with its fields that have no flag: code, and what a command decides itself.
_NO_FLAGS: dict[type, set[str]] = {
    Recipe: {"init", "loss", "optimizer", "batch_dim", "loss_scaling", "update"},
    LossScaling: {"growth", "backoff"},
    Data: {"batches", "batch_dims"},
    Evaluation: {"eval_batches", "test_batches"},
    Reporting: {"tokens_per_batch", "quiet", "settings"},
    Saving: {"config", "defaults", "data"},
    Stops: set(),
    Health: set(),
}
# Fields whose flag has another name, since flags are no parts of records.
_NAMES: dict[type, dict[str, str]] = {
    LossScaling: {
        "initial": "initial_loss_scale",
        "minimum": "min_loss_scale",
        "growth_interval": "loss_scale_window",
    },
    Reporting: {"profile": "profile_steps"},
    Saving: {
        "every": "checkpoint_every",
        "minutes": "checkpoint_minutes",
        "local": "local_checkpoints",
    },
    Stops: {"after_minutes": "exit_after_minutes", "at_step": "exit_at_step"},
}
# Flags that a command presets otherwise than Python does.
_DEFAULTS = {"clip_norm": "1.0", "eval_every": "100"}
# Flags whose values the records check as a whole, or that take one more, as `--clip_norm=0`.
_READERS: dict[str, Reader] = {
    "clip_norm": number,
    "policy": Policy.parse,
    "precision": Precision.parse,
    "extra_metrics": some_of(*EXTRA_METRICS),
    "trainable": words_of,
    "microbatches": or_auto(whole(1)),
    "checkpoint_every": steps_of_checkpoints,
    "checkpoint_minutes": minutes,
    **dict.fromkeys(
        ("local_every", "eval_every", "log_every", "replica_check_every"), count_of_steps
    ),
}
# What flags mean beyond their fields: a seed is also of the data, and a process has an exit code.
_HELP = {
    "seed": "Seed of the initial parameters and of the order of the data.",
    "clip_norm": "Global norm above which gradients are scaled down; 0: never.",
    "microbatches": "Parts of a batch, computed one after another; gradients are reduced once. "
    "auto: the best number that is found.",
    "exit_after_minutes": "End after this time, with a checkpoint and exit code 75 (start again to "
    "go on).",
}
# Commands train on text, and have flags for settings.
_WORDS = {"held-out batches": "held-out text", "settings": "flags"}
_OPTIONS_WITHOUT_FLAGS = {"hardware"}  # commands set it: by --hardware, or by --topology
# `Options` says more of its fields than a line of help has room for.
_OPTIONS = {
    "memory": "Bytes that a device may hold, as 16GiB. What fits and sends least is chosen.",
    "weights": "Weights gathered for the forward pass: kept, or gathered again for the backward.",
    "bucket_bytes": "The most bytes that one collective joins of several; 0: none are joined.",
    "overlap": "Turn gathers and reductions around products into rings beside them.",
    "prefetch": "Gather what a layer needs while the one before is computed.",
    "context": "How attention reaches a split memory: ring, gather, sums (of partial results).",
    "zigzag": "Deal a causal ring's queries out so that all devices have as much to do.",
    "reduce_dtype": "Partial sums of half precision: added up in float32, in the same; auto: "
    "float16 in float32, bfloat16 in the same.",
    "halves": "Compute two halves of a dim side by side, as batch, so that one half's collectives "
    "travel beside the other's work; none; auto: if simulated to be faster on --hardware or "
    "--topology.",
    "pipeline": "Schedule of a pipeline (layers:pipe): auto, "
    + ", ".join(PIPELINES[1:])
    + ", or a CSV file.",
    "pipeline_rounds": "Chunks of layers that each stage of a pipeline has. Default: 1, or the "
    "fastest number by simulation on --hardware or --topology.",
    "compiler_flags": "XLA's flags beside those recommended, name=value,...; after `none`, alone.",
}


def names_of(record: type) -> dict[str, str]:
    """Returns the fields of a record that have a flag, each with its name."""
    without = _NO_FLAGS.get(record, _OPTIONS_WITHOUT_FLAGS if record is Options else set())
    names = _NAMES.get(record, {})
    return {f.name: names.get(f.name, f.name) for f in fields(record) if f.name not in without}


def values_of(record: type, values: FlagValues) -> dict[str, Any]:
    """Returns the values of a record's flags, by field: `Stops(**values_of(Stops, values))`."""
    return {name: values[flag].value for name, flag in names_of(record).items()}


def _of_record(record: type) -> dict[str, Flag]:
    """Returns the flags of a record."""
    declared, made = settings(record), {}
    for name, flag in names_of(record).items():
        one = declared[name]
        reader = _READERS.get(flag) or _reader(flag, one.kind)
        help_text = _HELP.get(flag) or _in_words_of_flags(one.says)
        if flag in _DEFAULTS:
            help_text = help_text.partition(" Default: ")[0]  # which is that of Python
        made[flag] = _DEFAULTS.get(flag, _text(one.default)), reader, help_text
    return made


def _reader(flag: str, kind: Kind | None) -> Reader:
    """Returns the reader of a setting's values."""
    match kind:
        case Whole(least=int(least)):
            return whole(least)
        case Number():
            return number
        case OneOf(words=words):
            return one_of(*words)
        case Of() if kind == PATH:
            return str
        case Of() if kind == TRUTH:
            return truth
        case Of(kind=parsed) if hasattr(parsed, "parse"):
            return parsed.parse
    raise ValueError(f"--{flag} has no reader: add one to _READERS, or its field to _NO_FLAGS")


def _text(default: Any) -> str | None:
    """Returns a default as the text of a flag."""
    if default is None or default is MISSING:
        return None
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    return ",".join(default) if isinstance(default, tuple) else str(default).lower()


def _in_words_of_flags(text: str) -> str:
    """Returns a setting's meaning as help text, in which other settings are called flags."""
    for ours, theirs in _WORDS.items():
        text = text.replace(ours, theirs)
    names = {name: flag for record in _NO_FLAGS for name, flag in names_of(record).items()}
    return re.sub(r"`(\w+)`", lambda m: f"--{names[m[1]]}" if m[1] in names else m[0], text)


def _of_options() -> dict[str, Flag]:
    """Returns a flag for every field of `Options`."""
    kinds = typing.get_type_hints(Options)
    flags: dict[str, Flag] = {}
    for field in fields(Options):
        if field.name in _OPTIONS_WITHOUT_FLAGS:
            continue
        kind, default = kinds[field.name], field.default
        reader: Reader = size
        if kind is bool:
            reader = truth
        elif typing.get_origin(kind) is Literal:
            reader = one_of(*typing.get_args(kind))
        elif field.name in ("halves", "pipeline"):
            reader = str
        elif field.name == "pipeline_rounds":
            reader = whole(1)
        elif field.name == "compiler_flags":
            reader, default = compiler_flags.parse, ""
        text = None if default is None else str(default).lower()
        flags[field.name] = text, reader, _OPTIONS.get(field.name, "See `lowering.options`.")
    return flags


OF_OPTIONS = _of_options()
OF_TRAINING = {name: flag for record in _NO_FLAGS for name, flag in _of_record(record).items()}
