"""`meshdsl sweep`: many meshes, layouts and topologies of one training step, ranked.

It writes `sweep.csv`, `sweep.json`, `plot.svg` and `index.html` to the workdir, and the report of
each candidate to `pages/`. An interrupted sweep goes on from `results.jsonl` there (see
`reports.sweeps.store`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from absl import flags as absl_flags

from meshdsl.cli import flags
from meshdsl.cli.mistakes.calibrated import check_machine
from meshdsl.cli.mistakes.problems import Problems, UsageError
from meshdsl.cli.sweeping.measures import Asked, Setup, Subject, Timed, Turn, prepare
from meshdsl.cli.sweeping.nearest import nearest
from meshdsl.cli.sweeping.workers import Died, perform
from meshdsl.layouts.calibration import calibration_of, find_hardware, is_file_name
from meshdsl.layouts.topologies import Topology
from meshdsl.reports.sweeps import candidates, tables
from meshdsl.reports.sweeps.candidates import Candidate, Reading
from meshdsl.reports.sweeps.digest import digest, key
from meshdsl.reports.sweeps.page import Heading, page
from meshdsl.reports.sweeps.plot import plot
from meshdsl.reports.sweeps.ranking import Ranked, ranked
from meshdsl.reports.sweeps.result import Result
from meshdsl.reports.sweeps.store import Store, unwritable
from meshdsl.training.reporting.progress import Progress

# Flags that change nothing of what is measured.
_ASIDE = frozenset(
    "data data_cache data_column data_workers eval_batches eval_every log_every parallel rounds "
    "split steps_per_call workdir".split()
)


def main(values: absl_flags.FlagValues, problems: Problems) -> None:
    """Runs the command.

    Raises:
        ValueError: the user's mistakes, as many as possible in one error; or no candidate could be
            measured.
    """
    reading = candidates.read(values.mesh_shape or [], values.layout or [])
    _check(values, problems, reading)
    topologies = _topologies(values, problems)
    if topologies and not reading.problems:
        reading = candidates.on_topologies(reading, [*topologies.values()])
        problems.found += reading.problems
    folder = str(Path(values.workdir).absolute()) if values.workdir else None
    setup = Setup(tuple(flags.written(values)), folder, topologies)
    with ExitStack() as stack:
        if problems.found:  # with what is wrong about the model
            _build(setup, problems)
        subject = Subject.of(setup)
        store = stack.enter_context(Store(setup.folder)) if setup.folder else None
        sweep = _Sweep(subject, store, reading.candidates)
        for one in reading.repeated:
            print(f"measured once, though written several times: {one}", flush=True)
        rows = ranked(sweep.run())
        summary = sweep.summary(nearest(subject, rows))
        if setup.folder:
            _write(Path(setup.folder), rows, summary, sweep.facts())
    _print(rows, summary, sweep, setup.folder)
    if all(row.result.reason for row in rows):
        raise ValueError(f"none of {len(rows):,} candidates could be measured; see above why")


def _check(values: absl_flags.FlagValues, problems: Problems, reading: Reading) -> None:
    problems.found += reading.problems
    check_machine(values, problems)
    if not values.layout:
        problems.add(
            '--layout: give what to sweep, as in --layout="batch:data; heads:{model,-}" (the flag '
            "may come again) or --layout=layouts.txt"
        )
    if values.backend == "jax_auto":
        problems.add(
            "--backend: what jax_auto sends is XLA's choice, known once it is compiled; leave "
            "--backend out to see what meshdsl sends"
        )
    elif values.measure != "plan" and values.backend != "jax":
        problems.add(f"--measure={values.measure} is for --backend=jax")
    if values.html:
        problems.add("--html: a sweep writes its pages into --workdir")
    if values.compare_layout:
        problems.add("--compare_layout is for `explain`; give `sweep` a second --layout")


def _topologies(values: absl_flags.FlagValues, problems: Problems) -> dict[str, Topology]:
    """Returns the machines that the flags name; adds what is wrong with them to `problems`."""
    if isinstance(values.slices, flags.Mistake):
        return {}
    if not values.topology:
        if values["slices"].present:
            problems.add("--slices: give their --topology, as in --topology=v5e:16x16")
        return {}
    topologies, wrong = candidates.read_topologies(values.topology, values.slices)
    problems.found += wrong
    if values["hardware"].present:
        problems.add("--hardware: that of each --topology is known; leave it out")
    if values.measure == "run":
        problems.add(
            "--measure=run: steps run on the devices there are; leave --topology out, or measure "
            "by plan or compile"
        )
    elif values.measure == "compile":
        problems.found += [
            f"--measure=compile: {name} can be planned only; GPU programs are compiled where the "
            "GPUs are. Leave --measure out, or sweep it apart"
            for name, one in topologies.items()
            if not one.is_tpu
        ]
        if any(one.is_tpu for one in topologies.values()):
            from meshdsl.lowering.backends.jax.ahead import require_compiler

            with problems.caught("--measure=compile"):
                require_compiler()
    return {} if wrong else topologies


def _build(setup: Setup, problems: Problems) -> None:
    """Raises everything in `problems`, with what is wrong about the model and the numbers."""
    try:
        Subject.of(setup)
    except UsageError as error:
        problems.found += [text for text in error.problems if text not in problems.found]
    problems.check()


@dataclass
class _Sweep:
    """A sweep: its candidates, the results of earlier sweeps, and the measuring of the rest."""

    subject: Subject
    store: Store | None
    candidates: Sequence[Candidate]
    earlier: int = 0  # the number of results of earlier sweeps

    def run(self) -> list[Result]:
        """Measures the candidates without a result; returns all results."""
        step = self._digest()
        asked = [Asked(one, key(step, one)) for one in self.candidates]
        results: dict[str, Result] = {}
        if self.store is not None:
            known = {one.key: self._known(one.key) for one in asked}
            results = {name: result for name, result in known.items() if result is not None}
        self.earlier = len(results)
        left = [self._with_rounds(one) for one in asked if one.key not in results]
        measured = self._run(left) if self._turns else self._measured(left)
        turns = {one.key: max(0, self._turns - len(one.rounds)) for one in left}
        total = sum(turns.values()) if self._turns else len(left)
        with Progress(total, "turns" if self._turns else "candidates") as progress:
            for name, message in measured:
                if isinstance(message, Timed):
                    if self.store is not None:
                        self.store.add_round(name, message.seconds)
                    turns[name] -= 1
                    progress.step()
                    continue
                results[name] = message
                if self.store is not None:
                    self.store.add(name, message)
                progress.step(turns[name] if self._turns else 1, failed=bool(message.reason))
        return [results[one.key] for one in asked]

    @property
    def _turns(self) -> int:
        """How often each candidate is run; 0 if candidates are not run."""
        return self.subject.values.rounds if self.subject.values.measure == "run" else 0

    def _known(self, name: str) -> Result | None:
        assert self.store is not None
        result = self.store.known(name)
        if result is None or result.reason or not self._turns:
            return result
        return result if len(self.store.rounds.get(name, [])) >= self._turns else None

    def _measured(self, left: Sequence[Asked]) -> Iterator[tuple[str, Result]]:
        for asked, message in perform(left, self._processes(), prepare, self.subject.setup):
            yield asked.key, _blamed(asked, message) if isinstance(message, Died) else message

    def _run(self, left: Sequence[Asked]) -> Iterator[tuple[str, Result | Timed]]:
        """Runs candidates in one process.

        If a candidate ends that process, the other candidates go on in another one.
        """
        while left:
            by_key, at = {one.key: one for one in left}, ""
            keys = {one.candidate: one.key for one in left}
            for _, message in perform([tuple(left)], 1, prepare, self.subject.setup):
                if isinstance(message, Turn):
                    at = message.key
                elif isinstance(message, Timed):
                    one = by_key[message.key]
                    by_key[message.key] = replace(one, rounds=(*one.rounds, message.seconds))
                    yield message.key, message
                elif isinstance(message, Died):
                    at = at or left[0].key
                    yield at, _blamed(by_key.pop(at), message)
                else:
                    name = keys[message.candidate]
                    del by_key[name]
                    yield name, message
            left = list(by_key.values())

    def _with_rounds(self, asked: Asked) -> Asked:
        known = self.store.rounds.get(asked.key, []) if self.store is not None else []
        return replace(asked, rounds=tuple(map(tuple, known)))

    def _processes(self) -> int:
        values = self.subject.values
        if values.parallel:
            return values.parallel
        # Processes can share the cores of a host, but no TPU and no memory of a GPU.
        here = values.host_devices or self.subject.setup.topologies
        own = values.measure == "compile" and not here
        return 1 if own else len(os.sched_getaffinity(0))

    def _digest(self) -> str:
        values, job = self.subject.values, self.subject.job
        arguments = [one for one in flags.written(values) if _name(one) not in _ASIDE]
        graph = self.subject.jitted.trace(*self.subject.specs)
        facts: list[object] = [sorted(arguments), job.options, values.hardware]
        facts += [repr(one) for one in [calibration_of(values.hardware)] if one is not None]
        facts += [self.subject.setup.folder is not None]
        if values.measure != "plan":
            import jax

            facts += [jax.__version__, os.uname().nodename, _compiler_version()]
            facts += [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
        return digest(graph, *facts)

    def summary(self, advice: str) -> Heading:
        values, machines = self.subject.values, self.subject.setup.topologies
        measured = f"the median of {values.rounds} rounds in turn, on the devices there are"
        estimate = "simulated"
        if is_file_name(values.hardware) and not machines:
            estimate = "simulated, by what was measured"
        return Heading(
            title=f"{self.subject.job.model.name}: a sweep of {len(self.candidates):,} candidates",
            hardware=", ".join(machines) or find_hardware(values.hardware).title,
            times=measured if values.measure == "run" else estimate,
            peaks="by the plan" if values.measure == "plan" else "by the compiler's account",
            rooms=self.subject.rooms,
            nearest=advice,
        )

    def facts(self) -> dict[str, Any]:
        values = self.subject.values
        return {
            "model": values.model,
            "measure": values.measure,
            **(
                {"topologies": self.subject.rooms}
                if self.subject.setup.topologies
                else {"hardware": values.hardware, "memory_bytes": self.subject.room("")}
            ),
            "flags": flags.written(values),
        }


def _name(argument: str) -> str:
    return argument.removeprefix("--").partition("=")[0]


def _blamed(asked: Asked, died: Died) -> Result:
    one = asked.candidate
    return Result(one.mesh, one.layout, one.topology, reason=died.reason, passing=True)


def _compiler_version() -> str:
    """Returns the version of the TPU compiler, if there is one."""
    try:
        return version("libtpu")
    except PackageNotFoundError:
        return ""


def _write(folder: Path, rows: Sequence[Ranked], summary: Heading, facts: dict[str, Any]) -> None:
    texts = {
        "sweep.csv": tables.as_csv(rows),
        "sweep.json": tables.as_json(rows, facts),
        "plot.svg": str(plot(rows, summary.rooms)),
        "index.html": page(rows, summary),
    }
    try:
        for name, text in texts.items():
            part = folder / f"{name}.part"  # so that a reader never sees half of it
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)
    except OSError as error:
        raise unwritable(folder, error) from error


def _print(rows: Sequence[Ranked], summary: Heading, sweep: _Sweep, folder: str | None) -> None:
    from rich.console import Console

    console = Console()
    console = console if console.is_terminal else Console(width=120)
    values = sweep.subject.values
    failed = [row.result for row in rows if row.result.reason]
    meshes = {row.result.mesh for row in rows}
    where = f" on {next(iter(meshes))}" if len(meshes) == 1 else ""
    lines = [
        f"{values.model}{where}, {summary.hardware}; step: {summary.times}; peak: {summary.peaks}"
    ]
    if sweep.earlier:
        lines.append(f"{sweep.earlier:,} of {len(rows):,} candidates were measured earlier")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if len(failed) < len(rows):
        console.print(tables.shown(rows, values.measure == "run"))
    if left := tables.left_out(rows):
        console.print(f"and {left:,} more{', in sweep.csv' if folder else ''}", highlight=False)
    if summary.nearest:
        console.print(summary.nearest, markup=False, highlight=False, soft_wrap=True)
    for one in failed:
        text = f"not measured: {one.candidate}: {tables.why(one)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    if folder:
        console.print(
            f"{folder}/index.html has the plot and every report", markup=False, highlight=False,
            soft_wrap=True,
        )  # fmt: skip
