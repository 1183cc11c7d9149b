"""The help of a command: its flags in groups, the ten most used first, and examples.

Every command takes every flag, so that `train` and `explain` can be swapped. Its help has the flags
that it reads. A flag that is in no group is in the last one of every command's help, and
`tests/cli/test_help.py` names it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from meshdsl.cli.parsing.own_texts import OWN
from meshdsl.cli.parsing.table import ABOUT, FLAGS

GROUPS: Mapping[str, tuple[str, ...]] = {
    "model": ("model", "model_args", "batch_size", "length"),
    "devices and layout": ("mesh_shape", "layout", "host_devices", "backend", "tpu"),
    "bytes, memory and time": (
        "memory",
        "microbatches",
        "remat",
        "weights",
        "context",
        "zigzag",
        "halves",
        "overlap",
        "prefetch",
        "bucket_bytes",
        "reduce_dtype",
        "pipeline",
        "pipeline_rounds",
        "compiler_flags",
    ),
    "numbers": (
        "policy",
        "precision",
        "nonfinite",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    ),
    "optimizer": (
        "steps",
        "learning_rate",
        "schedule",
        "warmup_steps",
        "decay_steps",
        "min_learning_rate",
        "optimizer",
        "weight_decay",
        "weight_decay_except",
        "ema_decay",
        "clip_norm",
        "lora",
        "trainable",
    ),
    "data": (
        "data",
        "tokenizer",
        "split",
        "packing",
        "batch_ramp",
        "data_column",
        "data_cache",
        "data_workers",
        "end_token",
        "begin_documents",
        "seed",
    ),
    "reports of a run": (
        "workdir",
        "log_every",
        "eval_every",
        "eval_batches",
        "extra_metrics",
        "profile_steps",
        "steps_per_call",
    ),
    "checkpoints": (
        "checkpoint_every",
        "checkpoint_minutes",
        "keep",
        "keep_best",
        "local_checkpoints",
        "local_every",
        "host_copies",
        "resume",
        "init_from",
        "override",
        "exit_after_minutes",
        "exit_at_step",
        "grace",
    ),
    "processes": (
        "coordinator",
        "num_processes",
        "process_id",
        "join_timeout",
        "pause_timeout",
    ),
    "launch": (
        "processes",
        "first_process",
        "max_restarts",
        "restart_window",
        "elastic_axis",
        "shrink_after",
        "compile_ahead",
        "spare",
    ),
    "faults": ("replica_check_every", "straggler_factor", "straggler_steps", "step_timeout"),
    "hardware": ("hardware", "topology", "slices"),
    "reports of a plan": (
        "html",
        "compare_layout",
        "only",
        "stage",
        "pipeline_table",
        "decode",
        "against",
    ),
    "failures": (
        "failures",
        "mtbf",
        "job_mtbf",
        "devices_per_host",
        "storage_bandwidth",
        "restart_time",
    ),
    "search": ("batch_tokens", "search_seconds", "within", "simplify", "json"),
    "pages of plans": ("plans", "live"),
    "sweeps": ("measure", "parallel", "rounds"),
    "calibration": ("minutes",),
    "text": (
        "prompt",
        "prompts",
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "beams",
        "length_penalty",
        "stop",
    ),
    "serving": ("host", "port", "waiting", "cache_tokens", "chat_template"),
    "tasks": ("tasks", "num_fewshot", "limit", "chat"),
    "export": ("out", "step", "ema", "format", "dtype", "max_shard_size"),
}
_STEP = ("model", "devices and layout", "bytes, memory and time", "numbers", "optimizer")
_RUN = ("data", "reports of a run", "checkpoints", "processes", "faults")


class Help:
    """What the help of a command shows.

    Attributes:
        used: its most used flags, first; at most ten.
        groups: the groups whose flags it reads.
        also: flags of other groups that it reads.
        without: flags of its groups that it does not read.
        examples: what each does, and its arguments.
        file: lines of Python that the examples need.
    """

    def __init__(
        self,
        used: str,
        groups: Iterable[str] = (),
        also: str = "",
        without: str = "",
        examples: Mapping[str, str] = {},
        file: str = "",
    ) -> None:
        self.used = tuple(used.split())
        self.also = tuple(also.split())
        left = {*without.split()}
        listed = {title: [n for n in GROUPS[title] if n not in left] for title in groups}
        self.groups = {title: tuple(names) for title, names in listed.items()}
        self.examples = examples
        self.file = file.splitlines()

    @property
    def flags(self) -> set[str]:
        """All flags of the command."""
        return {*self.used, *self.also}.union(*self.groups.values())


_LAYOUT = '--mesh_shape="data:64,model:8" --layout="batch:data; heads:model; d_ff:model"'
HELP: Mapping[str, Help] = {
    "train": Help(
        "model mesh_shape layout host_devices data steps batch_size learning_rate policy workdir",
        (*_STEP, *_RUN),
        also="hardware search_seconds within chat_template",
        examples={
            "Train a small model on 8 virtual devices:": "--model=gpt_mini "
            '--mesh_shape="data:2,model:4" --host_devices=8 '
            '--layout="batch:data; heads:model; d_ff:model; vocab:model"',
            "Train on your text, with checkpoints; the same line goes on after a stop:": "--data="
            "'corpus/**/*.txt' --workdir=runs/long --checkpoint_every=500",
            "Train with the best layout that is found for all devices:": "--model=gpt_mini "
            "--host_devices=8 --layout=auto --microbatches=auto",
            "Train on all hosts of a pod:": "--coordinator=auto "
            '--mesh_shape="data:64,model:8" --layout="batch:data; heads:model; d_ff:model"',
        },
    ),
    "launch": Help(
        "processes max_restarts restart_window first_process elastic_axis shrink_after "
        "compile_ahead spare",
        examples={
            "Train in two processes, and go on when one of them dies:": "--processes=2 -- train "
            '--mesh_shape="data:2" --layout="batch:data" --host_devices=1 --workdir=runs/long '
            "--checkpoint_every=100",
        },
    ),
    "explain": Help(
        "model mesh_shape layout policy remat microbatches memory optimizer hardware html",
        (*_STEP, "reports of a plan", "failures"),
        also="batch_ramp topology slices search_seconds within json checkpoint_every "
        "checkpoint_minutes",
        without="host_devices tpu against",
        examples={
            "See what a step sends and holds, on any machine:": "--model=gpt3_175b " + _LAYOUT,
            "What another layout changes, as a page:": "--model=gpt3_175b "
            + _LAYOUT
            + ' --compare_layout="batch:data; params/embed:data" --html=report.html',
            "What a token of each of 32 texts takes, with caches for 4,096 tokens:": ""
            "--model=llama3_8b --mesh_shape=model:8 "
            '--layout="heads:model; d_ff:model; vocab:model" --decode '
            "--batch_size=32 --length=4096",
            "How often to save, and what failures cost, if a host fails every 50,000 hours:": ""
            "--model=gpt3_175b " + _LAYOUT + " --mtbf=50000h",
        },
    ),
    "compile": Help(
        "topology model mesh_shape layout policy remat memory against html slices",
        (*_STEP, "hardware", "reports of a plan"),
        also="search_seconds within",
        without="host_devices tpu hardware compare_layout only stage pipeline_table decode",
        examples={
            "See if a step fits a pod, and how long it takes:": "--topology=v5p:8x8x8 "
            "--model=gpt3_175b " + _LAYOUT + " --policy=params=float32,compute=bfloat16",
        },
    ),
    "plan": Help(
        "model topology batch_tokens mesh_shape layout microbatches remat against within simplify",
        (*_STEP, "hardware", "search"),
        without="host_devices tpu",
        also="override",
        examples={
            "Find the best plan for a machine:": "--model=gpt3_175b --topology=v5p:8x8x16 "
            "--batch_tokens=3145728 --policy=params=float32,compute=bfloat16",
            "Keep some rules, and see what every rule is worth, against another layout:": ""
            "--model=llama_7b --topology=v5p:4x4x4 "
            '--layout="batch:data; auto" --against="data:8,model:8 | batch:data; heads:model"',
        },
    ),
    "explore": Help(
        "model mesh_shape layout topology plans live html hardware batch_size parallel",
        (*_STEP, "hardware", "pages of plans"),
        without="host_devices tpu",
        also="html port parallel override",
        examples={
            "See what every edit of a layout does, on one page:": "--model=gpt3_175b "
            + _LAYOUT
            + " --html=gpt3.html",
            "For a machine, with more plans:": "--model=llama_7b --topology=v5p:4x4x4 --plans=2000",
            "Try any layout, each computed when you choose it:": "--model=gpt_mini "
            '--mesh_shape="data:4,model:2" --plans=20 --live',
        },
    ),
    "sweep": Help(
        "model mesh_shape layout topology measure hardware workdir policy remat parallel",
        (*_STEP, "hardware", "sweeps"),
        also="workdir seed",
        without="tpu",
        examples={
            "Rank layouts on meshes:": '--model=gpt3_175b --mesh_shape="data:{64,128},model:8" '
            '--layout="batch:data; heads:{model,-}" --layout=layouts.txt --workdir=sweep',
            "Time them on 8 virtual devices:": '--mesh_shape="data:{2,4},model:2" '
            '--layout="batch:data; heads:model" --measure=run --host_devices=8 --workdir=sweep',
        },
    ),
    "calibrate": Help(
        "out host_devices minutes override",
        examples={"Measure this machine, for --hardware=mine.json:": "--out=mine.json"},
    ),
    "generate": Help(
        "workdir prompt max_tokens temperature top_p stop prompts out mesh_shape layout",
        ("text", "devices and layout"),
        also="model model_args policy batch_size seed step ema tokenizer end_token init_from "
        "override",
        examples={
            "Go on from a text, with a run's latest checkpoint:": "--workdir=runs/first "
            '--prompt="def " --temperature=0.7',
            "Write lines of JSON for a file of prompts, with split caches:": "--workdir=runs/first "
            '--prompts=prompts.jsonl --out=texts.jsonl --mesh_shape="data:2,model:4" '
            '--layout="batch:data; memory_length:model"',
        },
    ),
    "serve": Help(
        "workdir init_from host port batch_size length waiting chat_template mesh_shape layout",
        ("serving", "devices and layout"),
        also="model model_args policy step ema tokenizer end_token override",
        examples={
            "Answer with a run's latest checkpoint, on port 8000 of this machine:": ""
            "--workdir=runs/first",
            "Sixteen texts at once, of 4,096 tokens each, on four devices:": ""
            "--init_from=models/Qwen3-4B --batch_size=16 --length=4096 --mesh_shape=model:4 "
            '--layout="heads:model; d_ff:model; vocab:model"',
        },
    ),
    "evaluate": Help(
        "workdir data tasks batch_size length eval_batches out mesh_shape layout",
        ("tasks", "model", "devices and layout"),
        also="chat_template policy precision step ema tokenizer end_token split packing "
        "begin_documents data_column data_cache init_from override",
        examples={
            "The text that a run has kept from training:": "--workdir=runs/first",
            "Other text, with a page of its numbers:": "--workdir=runs/first --data='notes/*.md' "
            "--out=scores.json",
            "Tasks of lm-evaluation-harness, and one of your own:": "--workdir=runs/first "
            "--tasks=hellaswag,my_task.yaml",
        },
    ),
    "export": Help(
        "workdir out format step ema dtype max_shard_size",
        also="model model_args policy tokenizer end_token",
        examples={
            "Write a run's parameters in bfloat16:": "--workdir=runs/long --out=weights "
            "--dtype=bfloat16",
            "Write a folder that transformers loads, of a model that came from one:": "--workdir="
            "runs/tuned --out=tuned --format=hf",
        },
    ),
    "runs": Help(
        "json workdir",
        examples={"Compare all runs below a folder:": "runs", "Two of them:": "runs/a runs/b"},
    ),
    "plot": Help(
        "out workdir",
        examples={
            "Draw all runs below a folder in one picture:": "runs --out=curves.svg",
            "Two of them, as a page:": "runs/a runs/b --out=curves.html",
        },
    ),
    "names": Help(
        "",
        examples={"List the lines of a function:": "my_model.py:example"},
        file="""In my_model.py, with your function `loss` of JAX and its arguments `params` and `x`:
  def example():
      program = md.from_jax(loss, names={"x": "batch embed"})
      return program, params, x
A name with a `?` was made up. To choose it, name a dim that it follows from:
  names={"x": "batch embed", "params/w_in": "_ d_ff"}""",
    ),
    "doctor": Help("", examples={"See what is missing for what:": ""}),
}
_UNGROUPED = set(FLAGS).difference(*GROUPS.values())
_COLUMN, _WIDTH = 26, 100


def show_help(command: str, says: str) -> str:
    """Returns the help of a command."""
    about = HELP.get(command)
    if about is None:  # a command without groups of its own takes them all
        return "\n".join([f"meshdsl {command}: {says}", "", *_lines(command, FLAGS)])
    lines = [f"meshdsl {command}: {says}"]
    if about.used:
        lines += ["", "most used", *_lines(command, about.used)]
    for title, names in about.groups.items():
        if rest := [name for name in names if name not in about.used]:
            lines += ["", title, *_lines(command, rest)]
    rest = [name for name in about.also if name not in about.used] + sorted(_UNGROUPED)
    always = [line for name in ABOUT if name != "help" for line in _flag(name, None, ABOUT[name])]
    lines += ["", "others", *_lines(command, rest), *always, "", "examples"]
    for says_of_example, arguments in about.examples.items():
        lines += [f"  {says_of_example}", f"    meshdsl {command} {arguments}".rstrip()]
    lines += [f"  {line}" for line in about.file]
    return "\n".join(lines)


def _lines(command: str, names: Iterable[str]) -> list[str]:
    texts = {name: OWN.get((command, name), FLAGS[name][2]) for name in names}
    return [line for name, text in texts.items() for line in _flag(name, FLAGS[name][0], text)]


def _flag(name: str, default: str | None, text: str) -> list[str]:
    """Returns the lines of a flag: its name and default, and what it means beside or below."""
    head = f"  --{name}" + (f"={default}" if default else "")
    indent = " " * (_COLUMN + 2)
    wrapped = textwrap.wrap(text, _WIDTH - len(indent), break_on_hyphens=False)
    if len(head) <= _COLUMN:
        return [f"{head:<{_COLUMN}}  {wrapped[0]}", *(indent + line for line in wrapped[1:])]
    return [head, *(indent + line for line in wrapped)]
