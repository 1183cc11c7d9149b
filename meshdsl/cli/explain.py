"""`meshdsl explain`: what a training step would do, without running or allocating anything."""

from __future__ import annotations

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.problems import Problems


def main(values: flags.FlagValues, problems: Problems) -> None:
    """Runs the command; errors as in `train`."""
    from meshdsl.jit import jit
    from meshdsl.layouts.validate import check_scopes
    from meshdsl.lowering.explain import explain
    from meshdsl.training.state import create, spec_of
    from meshdsl.training.step import make_train_step

    job = jobs.build(values, problems, feeds_text=False)
    step = make_train_step(job.model.loss, job.optimizer, job.clip_norm, job.policy)
    state = spec_of(create(job.model.init, job.optimizer, job.policy))
    jitted = jit(step, job.mesh, job.layout, job.backend, donate="state")
    program = jitted.lower(state, job.batch_spec)
    check_scopes(program.layout, program.mesh, program.input_paths)
    print(explain(program))
