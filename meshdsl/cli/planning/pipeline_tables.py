"""`meshdsl explain --pipeline_table=mine.csv`: the table of a schedule, without a model.

The file is one that `--pipeline=mine.csv` reads, and that PyTorch's pipelining reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.checks.checking import check
from meshdsl.lowering.pipelines.messages import with_messages
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.printing import show
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.lowering.pipelining.clocking import clocked

if TYPE_CHECKING:
    from absl import flags

ONLY_PRINT = "-"


def show_table(values: flags.FlagValues, problems: Problems) -> str:
    """Returns the table of `--pipeline` as text; writes it if `--pipeline_table` names a file.

    Raises:
        UsageError: flags are missing, or the file cannot be written.
        ValueError: there is no such schedule, or it is incorrect.
    """
    name, file = values.pipeline, values.pipeline_table
    if file != ONLY_PRINT and not file.endswith(".csv"):
        problems.add(
            f"--pipeline_table: {file} is no name of a table: give one that ends in .csv, or "
            f"{ONLY_PRINT} to print the table alone"
        )
    if name == "none":
        problems.add("--pipeline_table: --pipeline=none has no table")
    if name.endswith(".csv"):
        problems.check()
        with problems.caught("--pipeline"):
            schedule = csv_files.read(name)
            check(schedule)
        problems.check()
        _check_sizes(schedule, values, problems)
    else:
        stages = _stages(values, problems)
        if not isinstance(values.microbatches, int) or values.microbatches == 1:
            problems.add("--pipeline_table needs the number of --microbatches")
        problems.check()
        asked = "circular" if name == "auto" else name
        rounds = values.pipeline_rounds or (1 if asked == "circular" else None)
        schedule = named(asked, stages, values.microbatches, rounds)
    text = show(schedule)
    if schedule.rounds == 1:
        text += "in a CSV file, the number of the chunk goes in front: 0F3\n"
    if file != ONLY_PRINT:
        _write(schedule, file, problems)
        text += f"{file} is written: {_use(schedule, file)}\n"
    return text


def _use(schedule: Schedule, file: str) -> str:
    """Returns what can be done with a written table."""
    try:
        clocked(schedule)
    except ValueError:
        return f"--pipeline={file} --pipeline_table=- checks it; it cannot be run"
    return f"--pipeline={file} runs it"


def _check_sizes(schedule: Schedule, values: flags.FlagValues, problems: Problems) -> None:
    """Refuses sizes that are given beside a file of a table, and are not those of the table."""
    stages = _stages(values, problems) if values["mesh_shape"].present else schedule.stages
    problems.check()
    have = {"microbatches": schedule.microbatches, "pipeline_rounds": schedule.rounds}
    for flag, size in have.items():
        given = getattr(values, flag)
        if values[flag].present and isinstance(given, int) and given != size:
            problems.add(f"--{flag}={given}: {values.pipeline} has {size}. Leave it out")
    if stages != schedule.stages:
        problems.add(
            f"--mesh_shape={values.mesh_shape} has {stages} stages, and {values.pipeline} has "
            f"{schedule.stages}. Leave it out"
        )
    problems.check()


def _stages(values: flags.FlagValues, problems: Problems) -> int:
    """Returns the number of stages: the devices along the axes of the layers."""
    mesh = values.mesh_shape
    if not isinstance(mesh, Mesh):
        if not isinstance(mesh, Mistake):
            problems.add("--pipeline_table needs the number of stages: give --mesh_shape=pipe:4")
        return 1
    rules = getattr(values.layout, "rules", ())
    axes = [rule.axes for rule in rules if rule.dim == "layers" and not rule.scope]
    if axes and not (axes[0] and {*axes[0]} <= {*mesh.names}):
        problems.add(
            f"--pipeline_table: the layout gives the layers no axes of mesh {mesh}; its axes are "
            f"{', '.join(mesh.names)}"
        )
        return 1
    if not axes and len(mesh.names) > 1:
        problems.add(
            "--pipeline_table: which axis of the mesh are the stages along? Give "
            "--layout=layers:pipe, or a mesh of that axis alone"
        )
    return mesh.extent(axes[0] if axes else mesh.names)


def _write(schedule: Schedule, file: str, problems: Problems) -> None:
    """Writes a schedule with its sends and receives."""
    whole = schedule if schedule.has_messages else with_messages(schedule)
    try:
        csv_files.write(whole, file)
    except OSError as error:
        problems.add(f"--pipeline_table: cannot write {file}: {error.strerror}")
        problems.check()
