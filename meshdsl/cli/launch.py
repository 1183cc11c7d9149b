"""`meshdsl launch -- train ...`: the processes of a job on a host, started again when one dies."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from absl import flags

from meshdsl.cli.flags import read, written
from meshdsl.cli.help import HELP
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.checkpointing.workdir import locked, locked_copies
from meshdsl.training.launching.crew import Crew, OneHost
from meshdsl.training.launching.elastic import Elastic
from meshdsl.training.launching.succession import HostSupervisor
from meshdsl.training.launching.supervisor import Launch, Supervisor
from meshdsl.training.launching.terms import Host, Terms, devices_here
from meshdsl.training.launching.warm import Warm
from meshdsl.training.processes.code_version import code_version
from meshdsl.training.processes.joining import AUTOMATIC
from meshdsl.training.processes.meeting import address_of, check_free
from meshdsl.training.reporting.output import tell

_PROCESS = (
    "import sys; from meshdsl.training.launching.parent import end_with, own_output; "
    "end_with(int(sys.argv.pop(1))); own_output(); "
    "from meshdsl.cli.main import console; raise SystemExit(console())"
)
_TEMPLATE = (  # the same, in a process that has imported what `train` imports
    "import sys; from meshdsl.training.launching.forking import forked; "
    "from meshdsl.training.launching.parent import own_output; "
    "forked(int(sys.argv[1]), int(sys.argv[2]), {modules}); own_output(); "
    "from meshdsl.cli.main import console; raise SystemExit(console())"
)
_IMPORTED = (  # what a run on JAX imports before its first step
    *("meshdsl.cli.main", "meshdsl.cli.train", "meshdsl.cli.mistakes.other_commands"),
    *("meshdsl.lowering.backends.jax", "meshdsl.lowering.backends.numpy"),
    *("meshdsl.lowering.global_program", "meshdsl.reports.explain.decisions"),
    *("meshdsl.training.arguments", "meshdsl.training.checkpointing.weights"),
    *("meshdsl.training.initial_state", "meshdsl.training.loop", "meshdsl.training.run"),
    *("meshdsl.training.reporting.metrics", "jax.experimental.multihost_utils"),
    *("orbax.checkpoint", "grain"),
)
_PACKAGES = ("jax", "jaxlib", "numpy", "orbax-checkpoint", "grain")  # which jobs may see renewed
_CHANGED = ("--mesh_shape", "--microbatches")  # what fewer processes have of their own
_EXAMPLE = "meshdsl launch --processes=2 -- train --workdir=runs/long --checkpoint_every=100"


def main(values: flags.FlagValues, problems: Problems, words: Sequence[str] = ()) -> int:
    """Runs the command; returns its exit code.

    Args:
        words: the command that each process runs, after `--`: `train`, and its flags.

    Raises:
        ValueError: the user's mistakes, or the processes cannot be started on this host.
    """
    _check_own(values, problems)
    if list(words[:1]) != ["train"]:
        what = f"not {words[0]!r}" if words else "which is missing"
        problems.add(f"the command to launch is `train`, {what}: {_EXAMPLE}")
    problems.check()
    trains, of_train = read(words[1:], "train")
    problems.found += [f"train: {problem}" for problem in of_train.found]
    given = {name for name in ("coordinator", "num_processes") if trains[name].present}
    _check_train(values, trains, given, problems)
    problems.check()
    numbers = range(values.first_process, values.first_process + values.processes)
    workdir = Path(trains.workdir).absolute()
    copies = Path(trains.host_copies).absolute() if trains.host_copies else None
    start = [sys.executable, "-c", _PROCESS, str(os.getpid()), *words]

    def command(own: Sequence[str]) -> list[str]:
        single = not given and values.processes == 1
        if single or trains.coordinator == AUTOMATIC:
            return start
        changed = {flag.partition("=")[0] for flag in own} & {*_CHANGED}
        return [*start[: -len(words)], *_without(words, changed), *own]

    who = f"spare.{socket.gethostname()}" if values.spare else numbers[0]
    environment = _keeping_compiled(workdir)
    template = [sys.executable, "-c", _TEMPLATE.format(modules=_IMPORTED)]
    warm = Warm(template, start, environment, _versions)
    instead = (
        "start the spare host on another machine: one has one for each workdir"
        if values.spare
        else "choose another, or for another host of the job another --first_process"
    )
    lock = locked(trains.workdir, f"launch.{who}.lock", instead)
    with lock, locked_copies(copies), closing(warm):
        times, where = (values.max_restarts, values.restart_window), trains.coordinator
        alone = trains.num_processes is None or len(numbers) == trains.num_processes
        alone = alone and not values.spare
        if alone and given and where != AUTOMATIC:
            check_free(address_of(where)[1])  # before anything is started
        warm.begin()
        if alone:
            crew: Crew = OneHost(command, numbers, None, where, environment, warm)
        else:
            terms = Terms(
                trains.coordinator,
                trains.num_processes,
                code_version(),
                trains.pause_timeout,
                None if values.elastic_axis is None else _elastic(values.elastic_axis, words),
            )
            virtual = trains.host_devices
            host = Host(
                terms,
                numbers,
                command,
                environment,
                workdir,
                (trains.join_timeout, values.restart_window),
                _report,
                values.shrink_after,
                copies,
                values.spare,
                warm,
                devices_here(virtual if isinstance(virtual, int) else None, environment),
                values.compile_ahead and _on_cpus(trains, environment),
            )
            return HostSupervisor(host, times).run()
        return Supervisor(Launch(crew, workdir, *times, _report, copies)).run()


def _without(words: Sequence[str], names: Collection[str]) -> Iterator[str]:
    """Yields the words of a command line without some flags and their values."""
    drops_value = False  # of a flag that was dropped, as in `--microbatches 4`
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            dropped = "--" + name.lstrip("-") in names
            drops_value = dropped and not equals
            if not dropped:
                yield word
        elif drops_value:
            drops_value = False
        else:
            yield word


def _elastic(axis: str, words: Sequence[str]) -> Elastic:
    """Returns how the job goes on with fewer processes.

    Raises:
        ValueError: the axis or the mesh is not of the kind that can become shorter, or is not on
            the command line.
    """
    from meshdsl.models import load

    trains, _ = read(words[1:], "train")
    others, _ = read([*_without(words[1:], _CHANGED)], "train")
    hidden = [name for name in _CHANGED if others[name[2:]].present]
    if hidden:
        raise ValueError(
            f"--elastic_axis changes {' and '.join(hidden)}: give them on the command line, not "
            "in a file"
        )
    if not isinstance(trains.mesh_shape, Mesh):
        raise ValueError("--elastic_axis needs a mesh that is written: --mesh_shape=data:8")
    batch = trains.batch_size or load(trains.model, trains.model_args).batch_size
    try:
        return Elastic(trains.mesh_shape, axis, trains.num_processes, batch, trains.microbatches)
    except ValueError as error:
        raise ValueError(f"--elastic_axis={axis}: {error}") from error


def _report(text: str) -> None:
    tell(f"meshdsl launch: {text}", error=True)


def _versions() -> str:
    """Returns the version of all code that processes import, but for the user's own files."""
    packages = (importlib.metadata.version(name) for name in _PACKAGES)
    return " ".join([code_version(), *packages])


def _keeping_compiled(workdir: Path) -> dict[str, str]:
    """Returns the variables by which JAX keeps compiled programs, which a restart then reads.

    Those that the user has set stay.
    """
    ours = {
        "JAX_COMPILATION_CACHE_DIR": str(workdir / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return {**ours, **os.environ}


def _on_cpus(trains: flags.FlagValues, environment: Mapping[str, str]) -> bool:
    """Whether processes use CPUs alone: other processes may then use the same devices."""
    return isinstance(trains.host_devices, int) or environment.get("JAX_PLATFORMS") == "cpu"


def _check_own(values: flags.FlagValues, problems: Problems) -> None:
    """Adds flags before `--` that are of the command behind it."""
    given = [flag.partition("=")[0] for flag in written(values)]
    foreign = [flag for flag in given if flag[2:] not in HELP["launch"].flags]
    if foreign:
        problems.add(f"{', '.join(foreign)}: flags of `train` come after `-- train`: {_EXAMPLE}")


def _check_train(
    values: flags.FlagValues,
    trains: flags.FlagValues,
    given: Collection[str],
    problems: Problems,
) -> None:
    """Adds what keeps a command from being launched."""
    if trains.process_id is not None:
        problems.add("--process_id: `launch` numbers the processes; leave it out")
    if not trains.workdir:
        problems.add("--workdir is missing: its checkpoints are what a restart goes on from")
    elif trains.checkpoint_every is None and trains.checkpoint_minutes is None:
        problems.add(
            "--checkpoint_every or --checkpoint_minutes is missing: a restart goes on from the "
            "last checkpoint, and without it the only one is that of the end"
        )
    if trains.coordinator == AUTOMATIC:
        if values.processes > 1:
            problems.add(
                "--coordinator=auto: the scheduler numbers the processes, so that `launch` starts "
                "one; leave out --processes, or give --coordinator=host0:1234"
            )
    elif len(given) == 1:
        (missing,) = {"coordinator", "num_processes"} - {*given}
        problems.add(f"--{missing} is missing, beside --{next(iter(given))}: they go together")
    elif given and isinstance(trains.num_processes, int) and not values.spare:
        last = values.first_process + values.processes
        if last > trains.num_processes:
            problems.add(
                f"--first_process={values.first_process} and --processes={values.processes} go "
                f"beyond the {trains.num_processes} of --num_processes"
            )
    else:
        for name in ("first_process", "elastic_axis", "spare"):
            if values[name].value and not given:
                problems.add(
                    f"--{name} is for a job on several hosts, which needs --coordinator=host0:1234 "
                    "and --num_processes of `train`"
                )
