"""`meshdsl compile`: compiles the training step for a machine that is not at hand; reports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.planning.automatic import described_machine, settled
from meshdsl.cli.planning.pages import write_page
from meshdsl.cli.planning.steps import decided, training_step
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.backends import BACKENDS
from meshdsl.models.own import attribute_of

if TYPE_CHECKING:
    from meshdsl.lowering.backends.compiler_flags import Flag
    from meshdsl.lowering.compiled import Compiled

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

    found = None
    if values.topology is not None:
        found = settled(values, problems, described_machine)
    topology = _topology(values, problems)
    if values.backend != "jax":
        problems.add(f"--backend: {values.backend} is not compiled ahead of time; leave it out")
    against = _against(values, topology, problems)
    job = jobs.build(values, problems, feeds_text=False)
    assert topology is not None
    job = decided(jobs.on_hardware(job, topology.name))
    program = training_step(job, job.layout)
    used = chosen(values.compiler_flags, RECOMMENDED[topology.name])
    if found is not None:
        print(found.says)
    compiled = None
    others: dict[str, Compiled] = {}
    if topology.is_tpu:
        jobs.use_no_devices()
        from meshdsl.lowering.backends.jax.ahead import compile_ahead, plain_program

        other: str | tuple[Any, ...] | None
        if against is None or isinstance(against, str):
            other = against
        else:  # before anything is compiled, which takes minutes
            other = plain_program(against, job.mesh or Mesh(), topology)
        if sys.stderr.isatty():
            print(f"compiling for {topology}; large models take minutes", file=sys.stderr)
        compiled = compile_ahead(program, topology, used)
        if other is not None:
            others[os.path.basename(values.against)] = _compiled_other(other, job, topology, used)
    plan = explain(program, topology.name)
    print(report(program, plan, topology, compiled, show(used), others))
    if values.html:
        from meshdsl.reports.explain.html.page import compile_page

        known = {"compiler": compiled, **others}
        schedules = {n: c.schedule for n, c in known.items() if c is not None and c.schedule}
        write_page(values.html, compile_page(plan, {**schedules, "simulated": plan.simulated}))
    return 0 if fits(program, topology, compiled) else _NO_ROOM


def _against(
    values: flags.FlagValues, topology: Topology | None, problems: Problems
) -> str | Callable | None:
    """Returns what to compare with: the name of a backend, or the user's function."""
    name = values.against
    if name is None or isinstance(name, Mistake):
        return None
    if topology is not None and not topology.is_tpu:
        problems.add(f"--against: nothing is compiled for {topology}; leave it out")
        return None
    if name in BACKENDS:
        return str(name)
    with problems.caught("--against"):
        function = attribute_of(name)
        if not callable(function):
            raise ValueError(
                f"{name} is of type {type(function).__name__}, not a function that makes a "
                "plain JAX program"
            )
        return cast("Callable", function)
    return None


def _compiled_other(
    other: str | tuple[Any, ...], job: jobs.Job, topology: Topology, flags: Mapping[str, Flag]
) -> Compiled:
    """Compiles the program to compare with: as XLA splits it, or plain JAX."""
    from meshdsl.lowering.backends.compiler_flags import of_any_program
    from meshdsl.lowering.backends.jax.ahead import compile_ahead, compile_plain

    flags = of_any_program(flags)
    if isinstance(other, str):
        program = training_step(replace(job, backend=other), job.layout)
        return compile_ahead(program, topology, flags, other)
    return compile_plain(other, job.mesh or Mesh(), topology, flags)


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
