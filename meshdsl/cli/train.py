"""`meshdsl train`: trains a language model on text."""

from __future__ import annotations

from pathlib import Path

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.problems import Problems


def main(values: flags.FlagValues, problems: Problems) -> None:
    """Runs the command.

    Raises:
        ValueError: anything the user can put right; as many problems as possible at once.
    """
    from meshdsl.training.data import ByteCorpus, ordered_batches, shuffled_batches, text_files
    from meshdsl.training.loop import train

    jobs.use_host_devices(values.host_devices if isinstance(values.host_devices, int) else None)
    files: list[Path] = []
    with problems.caught("--data"):
        files = text_files(values.data)
    job = jobs.build(values, problems)
    jobs.use_tpu(values.tpu)
    corpus = ByteCorpus.read(files)
    training, held_out = corpus.split(job.length, batch_size=job.batch_size)
    print(_headline(job, len(files), corpus.text.size), flush=True)
    result = train(
        job.model.init,
        job.model.loss,
        job.optimizer,
        shuffled_batches(training, job.batch_size, values.seed),
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
        eval_batches=ordered_batches(held_out, job.batch_size, values.eval_batches),
        log_every=values.log_every,
        eval_every=values.eval_every,
        tokens_per_batch=job.batch_size * job.length,
        workdir=values.workdir,
    )
    where = f"; metrics in {values.workdir}" if values.workdir else ""
    print(f"held-out loss {result.history[-1]['eval_loss']:.4f} nats per byte{where}")


def _headline(job: jobs.Job, files: int, size: int) -> str:
    mesh = f"mesh {job.mesh}" if job.mesh else "unsharded"
    batch = f"batches of {job.batch_size} x {job.length} tokens"
    text = f"{size:,} bytes of text in {files:,} file{'' if files == 1 else 's'}"
    return f"{job.model.name}, {mesh}, {batch}, {text}"
