"""The flags, the same for every command, so that `train` and `explain` can be swapped.

Each flag has a reader, a function from its text to its value; whatever the readers refuse is
gathered, together with flags that do not exist, and told at once.
"""

from __future__ import annotations

import itertools
import re
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from absl import flags

from meshdsl.cli.problems import Problems
from meshdsl.layouts.hardware import HARDWARE
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.backends import BACKENDS, compiler_flags
from meshdsl.lowering.options import Options
from meshdsl.optim import by_name as optimizers
from meshdsl.optim import schedules
from meshdsl.tensors.dims import did_you_mean
from meshdsl.tensors.dtypes import as_dtype, is_float
from meshdsl.tensors.policy import Policy
from meshdsl.training.batch_ramp import BatchRamp
from meshdsl.training.data.splits import parse_ratios
from meshdsl.training.reporting.profiling import ProfiledSteps
from meshdsl.training.step_metrics import EXTRA_METRICS

Reader = Callable[[str], Any]


@dataclass(frozen=True)
class Mistake:
    """Stands for the value of a flag whose text could not be read."""

    reason: str


def whole(least: int) -> Reader:
    """Reads whole numbers of at least `least`."""

    def read(text: str) -> int:
        try:
            number = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            number = least - 1
        if number < least:
            raise ValueError(f"needs a whole number of at least {least}, got {text!r}")
        return number

    return read


def number(text: str) -> float:
    """Reads a number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"needs a number of at least 0, got {text!r}")
    return value


def backend(text: str) -> str:
    """Reads the name of a backend."""
    if text not in BACKENDS:
        hint = did_you_mean(text, BACKENDS)
        raise ValueError(f"unknown backend {text!r}; choose one of {', '.join(BACKENDS)}{hint}")
    return text


def floating(text: str) -> str:
    """Reads a floating-point dtype; returns its name."""
    if not is_float(dtype := as_dtype(text)):
        raise ValueError(f"needs a floating-point dtype, got {text!r}")
    return dtype.name


_UNITS = {unit + "B": 1000**power for power, unit in enumerate(["", "k", "M", "G", "T"])}
_UNITS |= {unit + "iB": 1024**power for power, unit in enumerate(["K", "M", "G", "T"], 1)}
_SIZE = re.compile(r"([0-9_]+(?:\.[0-9]+)?) *([A-Za-z]*)")


def size(text: str) -> int:
    """Reads a number of bytes: `16GiB`, `95GB`, `1.5MiB`, `4096`."""
    match = _SIZE.fullmatch(text.strip())
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or (match[2] or "B").lower() not in units:
        listed = ", ".join(_UNITS)
        raise ValueError(f"needs a size, as 16GiB, 95GB or 4096 (units: {listed}), got {text!r}")
    return int(float(match[1].replace("_", "")) * units[(match[2] or "B").lower()])


def one_of(*choices: str) -> Reader:
    """Reads one of several words."""

    def read(text: str) -> str:
        if text not in choices:
            hint = did_you_mean(text, choices)
            raise ValueError(f"unknown choice {text!r}; choose one of {', '.join(choices)}{hint}")
        return text

    return read


def truth(text: str) -> bool:
    """Reads yes or no."""
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError(f"needs true or false, got {text!r}")
    return words[text.lower()]


def remat(text: str) -> str:
    """Reads what a model's backward pass keeps; see `meshdsl.models.remat`."""
    from meshdsl.models.remat import read

    return read(text)


def some_of(*choices: str) -> Reader:
    """Reads words of a few, separated by commas; nothing is none."""

    def read(text: str) -> tuple[str, ...]:
        words = words_of(text)
        problems = [
            f"unknown choice {word!r}; choose from {', '.join(choices)}"
            f"{did_you_mean(word, choices)}"
            for word in words
            if word not in choices
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return words

    return read


def words_of(text: str) -> tuple[str, ...]:
    """Reads any words, separated by commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


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
    "compiler_flags": "XLA's flags beside those recommended, name=value,...; after `none`, alone.",
}


def _of_options() -> dict[str, tuple[str | None, Reader, str]]:
    """Returns a flag for every field of `Options`."""
    kinds = typing.get_type_hints(Options)
    found: dict[str, tuple[str | None, Reader, str]] = {}
    for field in fields(Options):
        kind, default = kinds[field.name], field.default
        reader: Reader = size
        if kind is bool:
            reader = truth
        elif typing.get_origin(kind) is Literal:
            reader = one_of(*typing.get_args(kind))
        elif field.name == "compiler_flags":
            reader, default = compiler_flags.parse, ""
        text = None if default is None else str(default).lower()
        found[field.name] = text, reader, _OPTIONS.get(field.name, "See `lowering.options`.")
    return found


# name: (default, reader, help). Without a default a flag is None unless given.
FLAGS: dict[str, tuple[str | None, Reader, str]] = {
    "model": (
        "gpt_mini",
        str,
        "A named configuration, or your own: `my_package.my_models:tiny`, `my_models.py:tiny`.",
    ),
    "model_args": ("", str, 'Changes to the configuration: "layers=8,embed=512".'),
    "mesh_shape": (
        None,
        Mesh.parse,
        'Mesh axes and their sizes: "data:2,model:4". `sweep` takes several: the flag again, '
        "alternatives in braces (data:{2,4},model:2), or files with one on each line.",
    ),
    "layout": (
        None,
        Layout.parse,
        'Dims split over mesh axes: "batch:data; heads:model". `sweep` takes several, too; a line '
        "of a file may be a pair, `mesh | layout`.",
    ),
    **_of_options(),
    "microbatches": (
        "1",
        whole(1),
        "Parts of a batch, computed one after another; gradients are reduced once.",
    ),
    "remat": (
        None,
        remat,
        "What the backward pass computes again: none, full, or all but dots, keep_collectives or "
        "names:attention_out,mlp_hidden. Default: the model's.",
    ),
    "host_devices": (None, whole(1), "Make this many virtual CPU devices, and use them."),
    "backend": ("jax", backend, f"What runs the program: {', '.join(BACKENDS)}."),
    "tpu": (
        None,
        str,
        "TPU that --backend=tf runs on: local, a name or grpc://address. Default: $TPU_NAME, if "
        "set; else hosts.",
    ),
    "coordinator": (
        None,
        str,
        "Many processes: host:port of the first, or `auto` on TPU pods, GKE, Slurm and MPI.",
    ),
    "num_processes": (None, whole(1), "How many processes there are, unless `auto` tells."),
    "process_id": (None, whole(0), "Which of them this is, from 0, unless `auto` tells."),
    "join_timeout": ("60", whole(1), "Seconds in which all processes must have joined."),
    "pause_timeout": (
        "120",
        whole(1),
        "Seconds for which a process may stand still, as on a machine that migrates.",
    ),
    "policy": (
        None,
        Policy.parse,
        'Dtypes, "bfloat16" or "params=float32,compute=bfloat16". Default: the model\'s.',
    ),
    "seed": ("0", whole(0), "Seed of the initial parameters and of the order of the data."),
    "data": (
        None,
        str,
        "Files to train on: text, 'corpus/**/*.txt,notes/*.md', .parquet, .arrayrecord, or "
        "Megatron-LM's token files, .bin. A mixture: 'web/*.parquet:0.7,code.bin:0.3'. Default: "
        "the sources of Python's standard library.",
    ),
    "data_column": ("text", str, "Column of Parquet files that holds the text."),
    "data_cache": (None, str, "Folder for the tokens of text. Default: they stay in memory."),
    "data_workers": ("0", whole(0), "Processes that read batches ahead. Default: a thread does."),
    "tokenizer": (
        None,
        str,
        "A tokenizer.json of the `tokenizers` library. Default: tokens are bytes.",
    ),
    "end_token": (None, str, "The tokenizer's token that ends a document. Default: the usual one."),
    "split": (
        None,
        parse_ratios,
        'Parts of the documents to train, validate and test with: "949,50,1". Default: one window '
        "in 20 is held out.",
    ),
    "packing": (
        "false",
        truth,
        "Pack whole documents into rows, which do not see each other. Default: one long text.",
    ),
    "batch_size": (None, whole(1), "Sequences in a batch. Default: the model's."),
    "batch_ramp": (
        None,
        BatchRamp.parse,
        "Let the batch grow: start,increment,samples, as 16,8,300_000. Default: it has its size.",
    ),
    "length": (None, whole(1), "Tokens in a sequence. Default: the model's."),
    "steps": ("200", whole(1), "Training steps."),
    "learning_rate": ("1e-3", number, "Peak of the learning rate."),
    "schedule": (
        "cosine",
        one_of(*schedules.NAMES),
        f"How it falls after the warm-up: {', '.join(schedules.NAMES)}.",
    ),
    "min_learning_rate": (None, number, "What it falls to. Default: a tenth of the peak."),
    "warmup_steps": (None, whole(0), "Steps to that peak. Default: a tenth of the steps."),
    "decay_steps": (
        None,
        whole(1),
        "Steps in which --schedule=wsd falls, at the end. Default: a tenth of the steps.",
    ),
    "optimizer": (
        None,
        one_of(*optimizers.NAMES),
        f"What updates the parameters: {', '.join(optimizers.NAMES)}. "
        f"Default: {optimizers.DEFAULT}.",
    ),
    "weight_decay": ("0.1", number, "Weight decay, of parameters that are matrices."),
    "weight_decay_except": (
        "",
        words_of,
        "Parameters that do not decay either, by globs on their paths: embedding,blocks/*/router.",
    ),
    "clip_norm": ("1.0", number, "Global norm above which gradients are scaled down; 0: never."),
    "nonfinite": (
        "stop",
        one_of("stop", "skip"),
        "What a step does whose loss or gradients are not finite: it changes nothing in any case.",
    ),
    "loss_scale": (
        None,
        number,
        "A constant factor on the loss. Default: one that adapts if float16 is computed in.",
    ),
    "initial_loss_scale": (str(2**32), number, "What the scale that adapts starts from."),
    "min_loss_scale": ("1", number, "It falls no lower."),
    "loss_scale_window": ("1000", whole(1), "Finite steps in a row after which it doubles."),
    "hysteresis": ("2", whole(1), "Steps that must overflow before it halves."),
    "extra_metrics": (
        "",
        some_of(*EXTRA_METRICS),
        f"Metrics to compute besides, at their cost: {', '.join(EXTRA_METRICS)}.",
    ),
    "trainable": (
        None,
        words_of,
        "Parameters that are trained, by globs on their paths: blocks/**/lora*,head. The others "
        "have no gradient, no optimizer state and no decay. Default: all.",
    ),
    "steps_per_call": (
        "1",
        whole(1),
        "Steps that the devices do without the host in between; divides steps and reports.",
    ),
    "log_every": ("10", whole(1), "Steps between two reports."),
    "eval_every": ("100", whole(1), "Steps between two evaluations on held-out text."),
    "eval_batches": (
        "20",
        whole(1),
        "Batches of held-out text in an evaluation, also in that of the test text, at the end.",
    ),
    "workdir": (
        None,
        str,
        "Folder for metrics.jsonl, TensorBoard and checkpoints; a run whose checkpoints are there "
        "goes on. Default: none is written.",
    ),
    "checkpoint_every": (
        None,
        whole(1),
        "Steps between two checkpoints. Default: one at the end, or where the run is stopped.",
    ),
    "keep": ("3", whole(1), "How many of the latest checkpoints are kept."),
    "keep_best": ("1", whole(0), "How many are kept beside them, by the loss on held-out text."),
    "local_checkpoints": (
        None,
        str,
        "Folder for frequent checkpoints, on a disk of this machine that others need not see; the "
        "latest is kept.",
    ),
    "local_every": (None, whole(1), "Steps between two of those."),
    "init_from": (
        None,
        str,
        "Weights to start from: a .safetensors file, or a folder of them; they may lack what "
        "--trainable names, which is initialised then. A checkpoint in the workdir goes before "
        "them.",
    ),
    "out": (None, str, "Where `export` writes: a .safetensors file, or a folder for several."),
    "step": (None, whole(0), "Step of the checkpoint to `export`. Default: the latest."),
    "dtype": (None, floating, "What `export` rounds to: bfloat16, float16. Default: nothing."),
    "max_shard_size": ("5GB", size, "The most bytes of one file of an `export` to a folder."),
    "resume": ("true", truth, "Go on from the latest checkpoint in the workdir."),
    "override": ("false", truth, "Go on although flags differ from the checkpoint's."),
    "exit_after_minutes": (
        None,
        number,
        "End after this time, with a checkpoint and exit code 75 (start again to go on).",
    ),
    "exit_at_step": (None, whole(1), "End after this step, likewise."),
    "profile_steps": (
        None,
        ProfiledSteps.parse,
        "First and last step of a profile, as 10:13, for TensorBoard, in the workdir.",
    ),
    "html": (None, str, "File for `explain` to write as one HTML page, instead of text."),
    "compare_layout": (None, Layout.parse, "A second layout: `explain` tells what it changes."),
    "topology": (
        None,
        str,
        "What `compile` compiles for, and `sweep` plans for: v5p:8x8x8 (chips of a slice), "
        "h100:8x16 (GPUs of a node, nodes). `sweep` takes several: the flag again, or "
        "v5p:{4x4x4,8x8x8}.",
    ),
    "slices": ("1", whole(1), "Slices of that, joined by a network, along axes marked @dcn."),
    "hardware": (
        "v5p",
        one_of(*HARDWARE),
        "What `explain` and `sweep` take the time of a step for, and what has to fit, without a "
        "topology.",
    ),
    "measure": (
        "plan",
        one_of("plan", "compile", "run"),
        "How `sweep` measures: by the plan; with the compiler's memory, for TPUs of a --topology, "
        "else for the devices there are; or by running steps of all candidates in turn, there.",
    ),
    "parallel": (
        None,
        whole(1),
        "Processes of a `sweep`. Default: one for each core; one if it compiles for other devices "
        "than --host_devices. `--measure=run` has one.",
    ),
    "rounds": ("5", whole(1), "How often `sweep --measure=run` comes to each candidate."),
}


SEVERAL = {"sweep": ("mesh_shape", "layout", "topology")}  # what a command takes lists of, as texts
_LISTED = frozenset(itertools.chain(*SEVERAL.values()))


def read(arguments: Sequence[str], command: str = "train") -> tuple[flags.FlagValues, Problems]:
    """Reads the arguments of a command.

    Returns:
        The values, `Mistake`s among them where the problems say so, and the problems.
    """
    values = flags.FlagValues()
    for name, (default, reader, text) in FLAGS.items():
        if name in SEVERAL.get(command, ()):
            plain: flags.ArgumentSerializer[str] = flags.ArgumentSerializer()
            flags.DEFINE_multi(_Parser(str), plain, name, default, text, values)
            continue
        flags.DEFINE_flag(_Flag(_Parser(reader), None, name, default, text), values)
        values[name].boolean = reader is truth  # `--overlap` alone says yes, `--nooverlap` no
    flags.DEFINE_bool("help", False, "Show this.", values, short_name="h")
    flags.DEFINE_bool("debug", False, "Show where in the code an error comes from.", values)
    problems = Problems()
    try:
        rest = values(["meshdsl", *arguments], known_only=True)[1:]
    except flags.Error as error:
        problems.add(str(error))
        values.mark_as_parsed()
        return values, problems
    for argument in rest:
        problems.add(_unknown(argument, values))
    for name in FLAGS:
        value = getattr(values, name)
        if isinstance(value, Mistake):
            problems.add(f"--{name}: {value.reason}")
        elif not isinstance(value, list) and name in _LISTED and values[name].present > 1:
            problems.add(
                f"--{name} is given {values[name].present} times: only `sweep` takes several"
            )
    return values, problems


def written(values: flags.FlagValues) -> list[str]:
    """Returns the flags that were given as arguments again, apart from lists."""
    given = [values[name] for name in FLAGS if values[name].present]
    return [f"--{flag.name}={flag.text}" for flag in given if isinstance(flag, _Flag)]


def describe() -> str:
    """Returns the help text of the flags."""
    lines = []
    for name, (default, _, text) in FLAGS.items():
        shown = "" if not default else f"={default}"
        head = f"  --{name}{shown}"
        lines.append(f"{head:<26}  {text}" if len(head) <= 26 else f"{head}\n{'':28}{text}")
    lines.append(f"  {'--debug':<24}  Show where in the code an error comes from.")
    return "\n".join(lines)


class _Parser(flags.ArgumentParser):
    """A reader as absl wants it; a refused text becomes a `Mistake` rather than an error."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def parse(self, argument: str) -> Any:
        try:
            return self._reader(argument)
        except ValueError as error:
            return Mistake(str(error))


class _Flag(flags.Flag):
    """A flag that knows the text that it was given last."""

    text = ""

    def parse(self, argument: Any) -> None:
        self.text = argument
        super().parse(argument)


def _unknown(argument: str, values: flags.FlagValues) -> str:
    if not argument.startswith("-"):
        return f"{argument!r} is not a flag; flags are written --name=value"
    name = argument.lstrip("-").partition("=")[0]
    return f"unknown flag --{name}{_with_dashes(did_you_mean(name, FLAGS))}"


def _with_dashes(hint: str) -> str:
    return hint.replace(" `", " `--")
