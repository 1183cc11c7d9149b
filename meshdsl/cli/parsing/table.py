"""The table of flags: their names, defaults, readers and help, in the order of the help.

A flag has one meaning in all commands. Many flags are made from the fields of records
(`record_flags`).
"""

from __future__ import annotations

from meshdsl.cli.parsing.readers import (
    backend,
    duration,
    floating,
    hardware_name,
    number,
    one_layout,
    one_of,
    or_word,
    other_program,
    remat,
    schedule,
    share,
    size,
    truth,
    whole,
    words_of,
)
from meshdsl.cli.parsing.record_flags import OF_OPTIONS, OF_TRAINING, Flag
from meshdsl.layouts.automatic import read_layout, read_mesh
from meshdsl.layouts.hardware import HARDWARE
from meshdsl.lowering.backends import BACKENDS
from meshdsl.optim import by_name as optimizers
from meshdsl.optim import schedules
from meshdsl.training.data.splits import parse_ratios


def _made(*names: str) -> dict[str, Flag]:
    """Returns flags that are made of records."""
    return {name: OF_TRAINING[name] for name in names}


# In the order of the help.
FLAGS: dict[str, Flag] = {
    "model": (
        "gpt_mini",
        str,
        "A named configuration, your own (`my_package.my_models:tiny`, `my_models.py:tiny`), or a "
        "folder of Hugging Face, by its config.json. With --init_from=FOLDER, that is the default.",
    ),
    "lora": (
        None,
        str,
        'Adapters of some rank beside weights, by globs on paths: "blocks/**/query:8,embedding:4". '
        "They alone are trained, unless --trainable says otherwise; `export` merges them.",
    ),
    "model_args": ("", str, 'Changes to the configuration: "layers=8,embed=512".'),
    "mesh_shape": (
        None,
        read_mesh,
        'Mesh axes and their sizes: "data:2,model:4"; or auto: the best that is found. `sweep` '
        "takes several: the flag again, alternatives in braces (data:{2,4},model:2), or files with "
        "one on each line.",
    ),
    "layout": (
        None,
        read_layout,
        'Dims split over mesh axes: "batch:data; heads:model". auto: the best that is found, with '
        'what is written beside it: "batch:data; auto". `sweep` takes several, too; a line of a '
        "file may be a pair, `mesh | layout`.",
    ),
    **OF_OPTIONS,
    **_made("microbatches"),
    "remat": (
        None,
        remat,
        "What the backward pass computes again: none, full, or all but dots, keep_collectives or "
        "names:attention_out,mlp_hidden. auto: the fastest by simulation that fits, on --hardware, "
        "a topology or the TPUs at hand. Default: the model's.",
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
    "processes": ("1", whole(1), "Processes that `launch` starts on this host."),
    "first_process": (
        "0",
        whole(0),
        "Number of the first of them, where `launch` runs on several hosts.",
    ),
    "max_restarts": (
        "10",
        whole(0),
        "How often `launch` starts all processes again within the --restart_window.",
    ),
    "restart_window": (
        "1h",
        duration,
        "The time in which --max_restarts are counted, and for which a lost host is waited for.",
    ),
    "elastic_axis": (
        None,
        str,
        "Mesh axis that becomes shorter where `launch` on several hosts goes on with fewer.",
    ),
    "shrink_after": (
        "10s",
        duration,
        "How long `launch` waits for a lost host before it goes on with fewer.",
    ),
    "compile_ahead": (
        "true",
        truth,
        "On CPUs, compile at the lowest priority what fewer hosts would need, while all of them "
        "train.",
    ),
    "spare": ("false", truth, "This host takes the place of one that is lost."),
    **_made("policy", "precision", "seed"),
    "data": (
        None,
        str,
        "Files to train on: text, 'corpus/**/*.txt,notes/*.md', .parquet, .arrayrecord, chats as "
        ".jsonl or in a column `messages` of .parquet, or Megatron-LM's token files, .bin. A "
        "mixture: 'web/*.parquet:0.7,code.bin:0.3'. "
        "Default: the sources of Python's standard library.",
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
    "begin_documents": (
        "false",
        truth,
        "Documents begin with the tokenizer's token for that, as Llama's do. Default: they do not.",
    ),
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
    "batch_size": (
        None,
        whole(1),
        "Sequences in a batch. Default: the model's; of `generate` and `serve`, 8.",
    ),
    **_made("batch_ramp"),
    "length": (
        None,
        whole(1),
        "Tokens in a sequence. Default: the model's; of `serve`, up to 1,024, of --tasks, 2,048.",
    ),
    "steps": ("200", whole(1), "Training steps."),
    "learning_rate": ("1e-3", number, "Peak of the learning rate."),
    "schedule": (
        "cosine",
        schedule,
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
    "ema_decay": (
        None,
        number,
        "Average the parameters over the steps, with this decay: 0.999. Checkpoints have the "
        "averages, and --ema uses them.",
    ),
    **_made("clip_norm", "nonfinite"),
    "loss_scale": (
        None,
        number,
        "A constant factor on the loss. Default: one that adapts if float16 is computed in.",
    ),
    **_made(
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "extra_metrics",
        "trainable",
    ),
    "steps_per_call": (
        "1",
        whole(1),
        "Steps that the devices do without the host in between; divides steps and reports.",
    ),
    **_made("log_every", "eval_every"),
    "eval_batches": (
        "20",
        whole(1),
        "Batches of held-out text in an evaluation, also in that of the test text, at the end.",
    ),
    "workdir": (
        None,
        str,
        "Folder for metrics.jsonl, TensorBoard and checkpoints; a run whose checkpoints are there "
        "goes on. Default: none is written. `plot` and `runs`: one more folder of runs.",
    ),
    **_made(
        "checkpoint_every",
        "checkpoint_minutes",
        "keep",
        "keep_best",
        "local_checkpoints",
        "local_every",
        "host_copies",
        "init_from",
    ),
    "prompt": (
        None,
        str,
        "A text for `generate` to go on from; several: the flag again.",
    ),
    "prompts": (
        None,
        str,
        'A file of them: lines of JSON, {"prompt": "..."}, in a .jsonl file, else lines of text.',
    ),
    "max_tokens": ("200", whole(1), "The most tokens that `generate` writes after each."),
    "temperature": (
        "1.0",
        number,
        "What `generate` divides scores by before it draws a token; 0 takes the likeliest.",
    ),
    "top_k": ("0", whole(0), "Draw from this many of the likeliest tokens. Default: from all."),
    "top_p": (
        "1.0",
        number,
        "Draw from the fewest tokens that together have this probability. Default: from all.",
    ),
    "min_p": (
        "0.0",
        number,
        "Draw from tokens with at least this share of the largest probability. Default: from all.",
    ),
    "repetition_penalty": (
        "1.0",
        number,
        "Lowers the scores of tokens that a text has already, by this factor.",
    ),
    "beams": (
        "1",
        whole(1),
        "Search the likeliest text with this many beams, instead of drawing tokens.",
    ),
    "length_penalty": (
        "1.0",
        number,
        "The power of its length that divides what a search rates a text by; more favours longer "
        "texts.",
    ),
    "stop": (
        None,
        str,
        "A text ends before this string (\\n is a new line); several: the flag again.",
    ),
    "host": (
        "127.0.0.1",
        str,
        "Address on which `serve` listens, without passwords. The default is for programs on this "
        "machine alone.",
    ),
    "port": (
        "8000",
        whole(0),
        "Port of `serve` and of `explore --live`; 0, the default of `--live`: one that is free.",
    ),
    "waiting": ("64", whole(0), "How many texts may wait for `serve`; it refuses more."),
    "cache_tokens": (
        None,
        whole(1),
        "Tokens of all texts of `serve` together that there is room for: the texts share it, in "
        "pages. Default: each of --batch_size texts has room for --length.",
    ),
    "chat_template": (
        None,
        str,
        "Jinja file that makes a text of a chat's messages. Default: the tokenizer's, beside it.",
    ),
    "tasks": (
        None,
        str,
        "Tasks of lm-evaluation-harness that `evaluate` asks, and files of such: "
        "hellaswag,my_task.yaml.",
    ),
    "num_fewshot": (None, whole(0), "Solved examples before a task's. Default: the task's."),
    "limit": (None, whole(1), "The most examples of each task. Default: all."),
    "chat": ("false", truth, "Ask tasks as chats, by the tokenizer's template."),
    "out": (
        None,
        str,
        "Where `export` writes: a .safetensors file, or a folder for several; `generate`: lines of "
        "JSON; `evaluate` and `calibrate`: a .json file; `plot`: .svg, .png, .pdf or .html. `-` is "
        "standard output, for `generate` and `evaluate`; all else is then on standard error.",
    ),
    "step": (
        None,
        or_word("best", whole(0)),
        "Step of the checkpoint to `export`, `generate` with or `evaluate`; best: the one with the "
        "least eval_loss. Default: the latest.",
    ),
    "ema": (
        "false",
        truth,
        "Use the averages of a run with --ema_decay, in place of its parameters.",
    ),
    "format": (
        "meshdsl",
        one_of("meshdsl", "hf"),
        "What `export` writes: hf is a folder for transformers, with its config.json.",
    ),
    "dtype": (None, floating, "What `export` rounds to: bfloat16, float16. Default: nothing."),
    "max_shard_size": ("5GB", size, "The most bytes of one file of an `export` to a folder."),
    **_made("resume", "override", "exit_after_minutes", "exit_at_step", "grace", "profile_steps"),
    **_made("replica_check_every", "straggler_factor", "straggler_steps", "step_timeout"),
    "html": (
        None,
        str,
        "File to write as one HTML page: by `explain` instead of text, by `compile` beside it; by "
        "`explore`: explore.html by default, but with --live no file.",
    ),
    "compare_layout": (None, one_layout, "A second layout: `explain` tells what it changes."),
    "only": (
        "",
        str,
        "Parts of the model whose rows `explain` lists, as in a layout's scope, or by file and "
        "function: mlp,blocks/*/query. Totals are those of the whole step.",
    ),
    "stage": (
        None,
        one_of("simplified", "placed", "planned", "reduced", "written", "passes"),
        "A stage of lowering for `explain` to print, instead of its report.",
    ),
    "pipeline_table": (
        None,
        str,
        "File of the table of --pipeline, for `explain` to write and to print instead of its "
        "report: mine.csv, which --pipeline=mine.csv reads; - only prints. It needs no model.",
    ),
    "decode": (
        "false",
        truth,
        "`explain` the step that writes one token of each of --batch_size texts, with caches for "
        "--length tokens, instead of a training step.",
    ),
    "failures": (
        "false",
        truth,
        "Print, instead of the report, which hosts hold the state of a step, and which lost hosts "
        "it survives without a checkpoint.",
    ),
    "mtbf": (
        None,
        duration,
        "Mean time between failures of one host, 50000h: print --failures, the share of time that "
        "a job spends on useful steps, and how often it is best to save.",
    ),
    "job_mtbf": (
        None,
        duration,
        "The same of the whole job, as its log has it, instead of one host's: 6h.",
    ),
    "devices_per_host": (
        None,
        whole(1),
        "Devices that are lost together. Default: those of --hardware: 8 GPUs, 4 TPU chips.",
    ),
    "storage_bandwidth": (
        "1GB",
        size,
        "What a host writes of a checkpoint in a second, with --mtbf.",
    ),
    "restart_time": (
        "5min",
        duration,
        "From a failure until all processes run again, besides reading the checkpoint, with "
        "--mtbf.",
    ),
    "topology": (
        None,
        str,
        "What `compile`, `explain`, `plan` and `sweep` are for: v5p:8x8x8 (chips of a slice), "
        "h100:8x16 (GPUs of a node, nodes). `sweep` takes several: the flag again, or "
        "v5p:{4x4x4,8x8x8}.",
    ),
    "slices": ("1", whole(1), "Slices of that, joined by a network, along axes marked @dcn."),
    "against": (
        None,
        other_program,
        "A second program for `compile` to compare with: jax_auto (XLA splits the tensors), or "
        "plain JAX, `my_step.py:program`: given a jax.sharding.Mesh, it returns what jax.jit "
        'returned, and its arguments. For `plan`: a layout, "batch:data; heads:model", or '
        "`mesh | layout`.",
    ),
    "hardware": (
        "v5p",
        hardware_name,
        "What `explain` and `sweep` take the time of a step for, and what has to fit, without a "
        "topology. If given, `explain`, `sweep` and `train` choose the fastest program by it: "
        f"{', '.join(HARDWARE)}, or a file of `calibrate`, mine.json.",
    ),
    "batch_tokens": (None, whole(1), "Tokens in a batch, instead of --batch_size sequences."),
    "search_seconds": (
        None,
        number,
        "Seconds in which to look for a layout; more of them are tried then. Default: as many as a "
        "few seconds allow, the same in every run.",
    ),
    "within": (
        None,
        share,
        "Look for a layout until it is surely within this share of the best of the space, such as "
        "1%. It takes minutes. Default: a few seconds; how good it surely is, is said.",
    ),
    "simplify": (
        None,
        share,
        "The share of a step's time that `plan` gives for fewer rules, such as 2%. Default: none.",
    ),
    "json": ("false", truth, "Print the report, the plans, the runs, or the --failures, as JSON."),
    "minutes": ("10", number, "Minutes that `calibrate` may take; it goes on where it stopped."),
    "plans": ("200", whole(1), "Plans that `explore` computes ahead, at most 10,000."),
    "live": ("false", truth, "Serve the page of `explore`; any plan chosen there is computed."),
    "measure": (
        "plan",
        one_of("plan", "compile", "run"),
        "How `sweep` measures: by the plan; with the compiler's memory, for TPUs of a --topology, "
        "else for the devices there are; or by running steps of all candidates in turn, there.",
    ),
    "parallel": (
        None,
        whole(1),
        "Processes of `sweep` and `explore`. Default: one for each core; one if it compiles for "
        "other devices than --host_devices. `--measure=run` has one.",
    ),
    "rounds": ("5", whole(1), "How often `sweep --measure=run` comes to each candidate."),
    **OF_TRAINING,  # and what has no place among the others
}

SEVERAL = {  # what a command takes lists of, as texts
    "sweep": ("mesh_shape", "layout", "topology"),
    "explore": ("mesh_shape", "layout"),
    "generate": ("prompt", "stop"),
}
ABOUT = {  # what is the same in every command: of a command line, not of what it does
    "config": "A TOML file of flags; those of the command line replace its own.",
    "print_config": "Print the flags as such a file, and do nothing else.",
    "debug": "Show where in the code an error comes from.",
    "help": "Show this.",
}
SEARCHING = ("train", "explain", "compile", "plan")  # commands that take `auto`
