"""`meshdsl train`: trains a language model on text."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.flags import FLAGS
from meshdsl.cli.problems import Problems
from meshdsl.lowering.backends import load as load_backend
from meshdsl.lowering.options import Options
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.files import find
from meshdsl.training.processes import (
    AUTOMATIC,
    check_agreement,
    code_version,
    join,
    leave,
    together,
)

if TYPE_CHECKING:
    from meshdsl.training.data import Corpus
    from meshdsl.training.loop import TrainResult
    from meshdsl.training.saving import Saving

_AHEAD = 4  # batches read ahead of their steps


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: anything the user can put right; as many problems as possible at once.
    """
    from meshdsl.training.data import Corpus, load_tokenizer, ordered_batches, shuffled_batches
    from meshdsl.training.loop import train
    from meshdsl.training.stopping import UNFINISHED, Stops

    jobs.use_host_devices(values.host_devices if isinstance(values.host_devices, int) else None)
    _join(values, problems)
    with together():
        with problems.caught("--data"):
            find([name for entry in parse_entries(values.data) for name in entry.patterns])
        job = jobs.build(values, problems)
        jobs.use_tpu(values.tpu, job.backend)
        saving = _saving(values, problems)
        with problems.caught("--data"):
            corpus = Corpus.read(
                values.data,
                jobs.vocabulary(job.model),
                load_tokenizer(values.tokenizer, values.end_token),
                values.data_column,
                Path(values.data_cache) if values.data_cache else None,
            )
        problems.check()
        splits = corpus.split(
            job.length, batch_size=job.batch_size, ratios=values.split, packing=values.packing
        )
    check_agreement(lambda: _facts(values, corpus))
    first = load_backend(job.backend).process_index() == 0
    if first:
        print(_headline(job, corpus), flush=True)
    batches = shuffled_batches(
        splits.train, job.batch_size, values.seed, workers=values.data_workers, ahead=_AHEAD
    )
    held_out = splits.valid
    try:
        result = train(
            job.model.init,
            job.model.loss,
            job.optimizer,
            batches,
            steps=values.steps,
            mesh=job.mesh,
            layout=job.layout,
            backend=job.backend,
            seed=values.seed,
            clip_norm=job.clip_norm,
            policy=job.policy,
            microbatches=job.microbatches,
            nonfinite=job.nonfinite,
            loss_scaling=job.loss_scaling,
            extra_metrics=job.extra_metrics,
            options=job.options,
            steps_per_call=values.steps_per_call,
            batch_dims={name: spec.dims for name, spec in job.batch_spec.items()},
            eval_batches=None
            if held_out is None
            else ordered_batches(held_out, job.batch_size, values.eval_batches),
            log_every=values.log_every,
            eval_every=values.eval_every,
            tokens_per_batch=job.batch_size * job.length,
            workdir=values.workdir,
            saving=saving,
            stops=Stops(values.exit_after_minutes, values.exit_at_step),
        )
    finally:
        batches.close()
    leave()
    ended = UNFINISHED if result.step < values.steps else 0
    if first:
        print(_told(result, values, corpus.unit))
    return ended


def _facts(values: flags.FlagValues, corpus: Corpus) -> dict[str, str]:
    """Returns what must be the same in all processes of a job."""
    told = {f"--{name}": text for name, text in _settings(values, _OWN).items()}
    return {**told, "the code of meshdsl": code_version(), "the data": corpus.fingerprint()}


def _told(result: TrainResult, values: flags.FlagValues, unit: str) -> str:
    """Returns the last line of the command."""
    if result.step < values.steps:
        return f"ended after step {result.step:,} of {values.steps:,}; start again to go on"
    if not result.history:
        return f"all {values.steps:,} steps had been taken before"
    where = f"; metrics in {values.workdir}" if values.workdir else ""
    kind, loss = "held-out", result.history[-1].get("eval_loss")
    if loss is None:
        kind, loss = "training", result.losses[-1]
    return f"{kind} loss {loss:.4f} nats per {unit}{where}"


def _join(values: flags.FlagValues, problems: Problems) -> None:
    """Joins the other processes of the job, if there are any."""
    if values.coordinator is None:
        if values.num_processes is not None or values.process_id is not None:
            problems.add(
                "--num_processes, --process_id: give --coordinator=host:port of the first process"
            )
        return
    known = values.num_processes is not None and values.process_id is not None
    if values.coordinator != AUTOMATIC and not known:
        problems.add(
            "--coordinator=host:port needs --num_processes and --process_id; `auto` asks a TPU "
            "pod, GKE, Slurm or MPI for all three"
        )
    if values.backend == "tf":
        problems.add("--coordinator: --backend=tf takes its processes from TF_CONFIG")
    problems.check()
    join(values.coordinator, values.num_processes, values.process_id)


# What a run may change when it goes on: where it runs, what it tells, and when it ends.
_FREE = frozenset(
    "mesh_shape layout host_devices backend tpu workdir log_every eval_every eval_batches "
    "steps_per_call checkpoint_every keep keep_best local_checkpoints local_every resume override "
    "exit_after_minutes exit_at_step html compare_layout hardware data_workers data_cache "
    "extra_metrics topology slices compiler_flags measure parallel rounds coordinator "
    "num_processes process_id".split()
)
_OWN = frozenset(["process_id"])  # what each process has of its own


def _saving(values: flags.FlagValues, problems: Problems) -> Saving | None:
    """Returns what is saved in the workdir, if there is one."""
    from meshdsl.training.saving import Saving

    if (values.local_checkpoints is None) != (values.local_every is None):
        problems.add("--local_checkpoints and --local_every go together: a folder, and how often")
    asked = [name for name in _NEEDS_WORKDIR if values[name].value is not None]
    if not values.workdir:
        if asked:
            listed = ", ".join(f"--{name}" for name in asked)
            problems.add(f"{listed}: checkpoints are kept in a --workdir, which is missing")
        return None
    return Saving(
        every=values.checkpoint_every,
        keep=values.keep,
        keep_best=values.keep_best,
        local=values.local_checkpoints,
        local_every=values.local_every,
        config=_settings(values, _FREE | {field.name for field in fields(Options)}),
        override=values.override,
        resume=values.resume,
    )


def _settings(values: flags.FlagValues, without: Set[str]) -> dict[str, str]:
    """Returns the flags that have values, as text."""
    found = {name: values[name] for name in FLAGS if name not in without}
    texts = {
        name: flag.default if flag.using_default_value else flag.value
        for name, flag in found.items()
    }
    return {name: str(value) for name, value in texts.items() if value is not None}


_NEEDS_WORKDIR = (
    "checkpoint_every",
    "local_checkpoints",
    "local_every",
    "exit_after_minutes",
    "exit_at_step",
)


def _headline(job: jobs.Job, corpus: Corpus) -> str:
    mesh = f"mesh {job.mesh}" if job.mesh else "unsharded"
    batch = f"batches of {job.batch_size} x {job.length} tokens"
    files = f"{corpus.files:,} file{'' if corpus.files == 1 else 's'}"
    return f"{job.model.name}, {mesh}, {batch}, {corpus.size:,} {corpus.unit}s of text in {files}"
