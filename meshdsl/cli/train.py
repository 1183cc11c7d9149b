"""`meshdsl train`: trains a language model on text."""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.checkpointed import chat_format, check_begin_documents
from meshdsl.cli.flags import as_configuration
from meshdsl.cli.help import HELP
from meshdsl.cli.mistakes import early_checks as early
from meshdsl.cli.mistakes.calibrated import check_machine
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.parsing.record_flags import values_of
from meshdsl.cli.parsing.table import FLAGS
from meshdsl.cli.planning.automatic import machine_at_hand, settled
from meshdsl.cli.planning.steps import decided
from meshdsl.layouts.calibration import calibration_of
from meshdsl.lowering.backends import load as load_backend
from meshdsl.lowering.options import Options
from meshdsl.running.runnable import with_hardware_at_hand
from meshdsl.training.checkpointing.saving import begun
from meshdsl.training.data.corpus import has_chats
from meshdsl.training.data.entries import parse_entries
from meshdsl.training.data.files import find
from meshdsl.training.launching.elastic import MICROBATCHES
from meshdsl.training.launching.rehearsing import give_way, rehearses
from meshdsl.training.planned import keep, kept
from meshdsl.training.processes.code_version import told
from meshdsl.training.processes.joining import (
    AUTOMATIC,
    apart,
    check_agreement,
    check_devices,
    joined,
    together,
)
from meshdsl.training.reporting.doing import doing
from meshdsl.training.reporting.output import tell

if TYPE_CHECKING:
    from meshdsl.training.checkpointing.saving import Saving
    from meshdsl.training.data import Corpus, Splits
    from meshdsl.training.loop import TrainResult

_AHEAD = 4  # batches read ahead of their steps


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command; returns its exit code.

    Raises:
        ValueError: the user's mistakes, as many as possible in one error.
    """
    jobs.use_host_devices(values.host_devices if isinstance(values.host_devices, int) else None)
    with _processes(values, problems):
        if rehearses():
            give_way()
        return _run(values, problems)


def _run(values: flags.FlagValues, problems: Problems) -> int:
    """Reads the data and trains, as one of the processes of the job."""
    from meshdsl.training.data import compared
    from meshdsl.training.exit_codes import UNFINISHED

    if values.coordinator is not None:
        check_devices()
    with together():
        chosen = settled(
            values,
            problems,
            machine_at_hand,
            feeds_text=True,
            before=kept(values.workdir),
            settings=_stored(values),
            going_on=bool(values.workdir) and begun(values.workdir),
        )
        job, corpus, splits = _read(values, problems)
    check_agreement(lambda: _facts(values, corpus))
    first = load_backend(job.backend).runtime.process_index() == 0 and not rehearses()
    if first:
        from meshdsl.reports.explain.decisions import notes_of

        tell(_headline(job, corpus))
        for note in notes_of(job.decisions):
            tell(note)
    if first and chosen is not None:
        tell(chosen.says)
        if values.workdir:
            keep(values.workdir, chosen.asked, chosen.found)
    with compared([*corpus.paths, *corpus.caches]) as check:
        result = _trained(job, splits, values, _saving(values, corpus), check)
    if first:
        tell(_last_line(result, values, corpus.unit))
    return UNFINISHED if result.step < values.steps else 0


def _read(values: flags.FlagValues, problems: Problems) -> tuple[jobs.Job, Corpus, Splits]:
    """Returns the job and its data.

    Raises:
        UsageError: all that is wrong with the flags and the files.
        ValueError: there is too little text.
    """
    from meshdsl.training.data import Corpus, load_tokenizer
    from meshdsl.training.data.tokenizers import WithBegin

    with problems.caught("--data"):
        find([name for entry in parse_entries(values.data) for name in entry.patterns])
    job = jobs.on_given_hardware(jobs.build(values, problems), values)
    jobs.use_tpu(values.tpu, job.backend)
    if values["hardware"].present:
        on_jax = job.backend.startswith("jax")
        kind = load_backend(job.backend).runtime.device_kind() if on_jax else ""
        check_machine(values, problems, kind)
    _check_saving(values, problems)
    check_begin_documents(values, problems)
    early.check(values, job, _stored(values), problems)
    problems.check()
    if job.remats:
        options = with_hardware_at_hand(job.options, job.backend)
        job = decided(replace(job, options=Options.of(options)))
    chats = chat_format(values, problems) if has_chats(values.data, values.data_column) else None
    problems.check()
    with problems.caught("--data"), doing("reading the text"):
        tokenizer = load_tokenizer(values.tokenizer, values.end_token)
        corpus = Corpus.read(
            values.data,
            jobs.vocabulary(job.model),
            WithBegin(tokenizer) if values.begin_documents else tokenizer,
            values.data_column,
            Path(values.data_cache) if values.data_cache else None,
            chats=chats,
        )
    problems.check()
    splits = corpus.split(
        job.length, batch_size=job.batch_size, ratios=values.split, packing=values.packing
    )
    return job, corpus, splits


def _trained(
    job: jobs.Job,
    splits: Splits,
    values: flags.FlagValues,
    saving: Saving | None,
    check: Callable[[], None],
) -> TrainResult:
    """Trains on the data; `check` raises if a cache of it is damaged."""
    from meshdsl.training import Data, Evaluation, Health, Reporting, Stops, train
    from meshdsl.training.data import ordered_batches, shuffled_batches

    valid, test = (
        None if split is None else ordered_batches(split, job.batch_size, values.eval_batches)
        for split in (splits.valid, splits.test)
    )
    batches = shuffled_batches(
        splits.train,
        job.batch_size,
        values.seed,
        workers=values.data_workers,
        ahead=_AHEAD,
        check=check,
    )
    dims = {name: spec.dims for name, spec in job.batch_spec.items()}
    tokens = job.batch_size * job.length
    try:
        return train(
            job.recipe,
            Data(batches, dims, **values_of(Data, values)),
            steps=values.steps,
            mesh=job.mesh,
            layout=job.layout,
            backend=job.backend,
            options=job.options,
            steps_per_call=values.steps_per_call,
            workdir=values.workdir,
            evaluation=Evaluation(valid, test_batches=test, **values_of(Evaluation, values)),
            reporting=Reporting(
                tokens_per_batch=tokens,
                settings=as_configuration(values, "train", HELP["train"].flags),
                **values_of(Reporting, values),
            ),
            saving=saving,
            stops=Stops(**values_of(Stops, values)),
            health=Health(**values_of(Health, values)),
        )
    finally:
        batches.close()


def _facts(values: flags.FlagValues, corpus: Corpus) -> dict[str, str]:
    """Returns the settings that must be the same in all processes of a job, and hashes of data."""
    settings = {f"--{name}": text for name, text in _settings(values, _OWN).items()}
    facts = {"the code of meshdsl": told(), "the data": corpus.fingerprint()}
    calibration = calibration_of(values.hardware)
    if calibration is not None:  # by other times, lowering would choose another program
        facts["the calibration"] = calibration.fingerprint()
    return {**settings, **facts}


def _last_line(result: TrainResult, values: flags.FlagValues, unit: str) -> str:
    """Returns the last line of the command."""
    if result.step < values.steps:
        asked = values.exit_at_step is not None and result.step >= values.exit_at_step
        again = "without --exit_at_step, or with a later one, " if asked else ""
        return f"ended after step {result.step:,} of {values.steps:,}; start again {again}to go on"
    if not result.history:
        return f"all {values.steps:,} steps had been taken before"
    where = f"; metrics in {values.workdir}" if values.workdir else ""
    test = result.history[-1].get("test_loss")
    where = where if test is None else f", test loss {test:.4f}{where}"
    kind, loss = "held-out", result.history[-1].get("eval_loss")
    if loss is None:
        kind, loss = "training", result.losses[-1]
    return f"{kind} loss {loss:.4f} nats per {unit}{where}"


def _processes(values: flags.FlagValues, problems: Problems) -> AbstractContextManager[None]:
    """Returns a context that joins the other processes of the job, if any, and leaves them.

    Raises:
        UsageError: the flags of the processes do not fit together, or there are other problems.
    """
    if values.coordinator is None:
        names = ("num_processes", "process_id", "join_timeout", "pause_timeout")
        if needless := [f"--{name}" for name in names if values[name].present]:
            problems.add(
                f"{', '.join(needless)}: give --coordinator=host:port of the first process"
            )
        return nullcontext()
    known = values.num_processes is not None and values.process_id is not None
    if values.coordinator != AUTOMATIC and not known:
        problems.add(
            "--coordinator=host:port needs --num_processes and --process_id; `auto` asks a TPU "
            "pod, GKE, Slurm or MPI for all three"
        )
    if values.backend == "tf":
        problems.add("--coordinator: --backend=tf takes its processes from TF_CONFIG")
    problems.check()
    if rehearses():
        numbers = values.num_processes, values.process_id
        return apart(values.coordinator, *numbers, values.join_timeout)
    return joined(
        values.coordinator,
        values.num_processes,
        values.process_id,
        values.join_timeout,
        values.pause_timeout,
    )


# Settings that may change when a run goes on: where it runs, what it reports, when it stops; and
# those of other commands, which stand in the same file of `--config`.
_FREE = frozenset(
    "mesh_shape layout host_devices backend tpu workdir log_every eval_every eval_batches "
    "steps_per_call checkpoint_every checkpoint_minutes keep keep_best local_checkpoints "
    "local_every resume override host_copies exit_after_minutes exit_at_step hardware "
    "data_workers data_cache extra_metrics "
    "compiler_flags coordinator num_processes process_id join_timeout pause_timeout profile_steps "
    "init_from search_seconds within replica_check_every straggler_factor straggler_steps "
    "step_timeout grace".split()
) | (set(FLAGS) - HELP["train"].flags)
# What each process has of its own.
_OWN = frozenset(["process_id", "local_checkpoints", "host_copies"])


def _check_saving(values: flags.FlagValues, problems: Problems) -> None:
    """Checks that flags of saving come with a workdir, and fit together."""
    if (values.local_checkpoints is None) != (values.local_every is None):
        problems.add("--local_checkpoints and --local_every go together: a folder, and how often")
    asked = [name for name in _NEEDS_WORKDIR if values[name].value is not None]
    if asked and not values.workdir:
        listed = ", ".join(f"--{name}" for name in asked)
        problems.add(f"{listed}: what they save is kept in a --workdir, which is missing")


def _saving(values: flags.FlagValues, corpus: Corpus) -> Saving | None:
    """Returns what is saved in the workdir, if there is one."""
    from meshdsl.training.checkpointing.saving import ORIGIN, Saving, origin_of
    from meshdsl.training.data import DataFiles

    if not values.workdir:
        return None
    origin = origin_of(values.workdir) if begun(values.workdir) else values.init_from
    return Saving(
        **values_of(Saving, values),
        config={
            **_stored(values),
            "the data": corpus.fingerprint(),
            **({} if origin is None else {ORIGIN: origin}),
        },
        defaults=early.DEFAULTS,
        # A cache has checksums of its own; a run may go on with another one, or with none.
        data=DataFiles(corpus.paths),
    )


def _stored(values: flags.FlagValues) -> dict[str, str]:
    """Returns the settings that checkpoints store, without those that the data describes."""
    settings = _settings(values, _FREE | {field.name for field in fields(Options)})
    if MICROBATCHES in os.environ:  # fewer processes of an elastic job have more than it was given
        settings["microbatches"] = os.environ[MICROBATCHES]
    return settings


def _settings(values: flags.FlagValues, without: Set[str]) -> dict[str, str]:
    """Returns the flags that have values, as text."""
    chosen = {name: values[name] for name in FLAGS if name not in without}
    texts = {
        name: flag.default if flag.using_default_value else flag.value
        for name, flag in chosen.items()
    }
    return {name: str(value) for name, value in texts.items() if value is not None}


_NEEDS_WORKDIR = (
    "checkpoint_every",
    "checkpoint_minutes",
    "local_checkpoints",
    "local_every",
    "host_copies",
    "exit_after_minutes",
    "exit_at_step",
    "grace",
    "profile_steps",
)


def _headline(job: jobs.Job, corpus: Corpus) -> str:
    mesh = f"mesh {job.mesh}" if job.mesh else "unsharded"
    batch = f"batches of {job.batch_size} x {job.length} tokens"
    files = f"{corpus.files:,} file{'' if corpus.files == 1 else 's'}"
    return f"{job.model.name}, {mesh}, {batch}, {corpus.size:,} {corpus.unit}s of text in {files}"
