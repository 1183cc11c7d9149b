"""`meshdsl compile`: compiles the training step for a machine that is not at hand; reports it."""

from __future__ import annotations

import sys

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.flags import Mistake
from meshdsl.cli.planned import training_step
from meshdsl.cli.problems import Problems
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology

_NO_ROOM = 1


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command: exit code 0 if the step fits, 1 if it does not.

    Raises:
        ValueError: mistakes as in `explain`, an unknown machine, a mesh that does not cover it, or
            a compiler that is not installed or does not know a flag.
    """
    from meshdsl.lowering.backends.compiler_flags import RECOMMENDED, chosen, show
    from meshdsl.reports.explain import explain
    from meshdsl.reports.explain.compile_report import fits, report

    topology = _topology(values, problems)
    if values.backend != "jax":
        problems.add(f"--backend: {values.backend} is not compiled ahead of time; leave it out")
    job = jobs.build(values, problems, feeds_text=False)
    assert topology is not None
    program = training_step(job, job.layout)
    used = chosen(values.compiler_flags, RECOMMENDED[topology.name])
    compiled = None
    if topology.is_tpu:
        jobs.use_no_devices()
        from meshdsl.lowering.backends.jax.ahead import compile_ahead

        if sys.stderr.isatty():
            print(f"compiling for {topology}; large models take minutes", file=sys.stderr)
        compiled = compile_ahead(program, topology, used)
    text = report(program, explain(program, topology.name), topology, compiled, show(used))
    print(text)
    return 0 if fits(program, topology, compiled) else _NO_ROOM


def _topology(values: flags.FlagValues, problems: Problems) -> Topology | None:
    """Returns the machine that the flags name; adds what is wrong with it to `problems`."""
    if values.topology is None:
        problems.add("--topology says what to compile for, as in --topology=v5p:8x8x8")
        return None
    if isinstance(values.slices, Mistake):
        return None
    with problems.caught("--topology"):
        topology = Topology.parse(values.topology, values.slices)
        if not isinstance(values.mesh_shape, Mistake):
            for problem in topology.problems(values.mesh_shape or Mesh()):
                problems.add(f"--mesh_shape: {problem}")
        if topology.is_tpu:
            from meshdsl.lowering.backends.jax.ahead import require_compiler

            require_compiler()
        return topology
    return None
