"""Measures: what `meshdsl sweep` does with a candidate, in a process of its own.

* `plan`: a candidate is lowered and explained. The model is traced once for all candidates.
* `compile`: it is compiled as well, for its topology or else for the devices at hand. The memory is
  the compiler's figure.
* `run`: steps are timed in rounds. Each round runs every candidate once and starts with another
  one, so that a slow moment of the machine affects all of them. Between its turns a candidate has
  no memory on a device.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.cli import flags
from meshdsl.cli import job as jobs
from meshdsl.cli.mistakes.user_errors import plain_text, user_text
from meshdsl.cli.planning.steps import checked_program, decided, jitted_step, training_step
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.layouts.validate import LayoutWarning
from meshdsl.lowering.backends.compiler_flags import RECOMMENDED, chosen
from meshdsl.lowering.options import Options
from meshdsl.lowering.program import SpmdProgram
from meshdsl.reports.sweeps.candidates import Candidate
from meshdsl.reports.sweeps.result import Result, planned
from meshdsl.reports.sweeps.store import PAGES
from meshdsl.running.jit import Compiled, Jitted, jit
from meshdsl.tensors.named_array import NamedArray, Spec, named

_WARM_UP = 1  # steps of a turn that are not timed
_TIMED = 3


@dataclass(frozen=True)
class Setup:
    """What all candidates of a sweep have in common.

    Attributes:
        arguments: the command line without meshes, layouts and topologies.
        folder: the folder of the pages; None: none are written.
        topologies: the machines that candidates are planned for, by name.
    """

    arguments: tuple[str, ...]
    folder: str | None
    topologies: Mapping[str, Topology] = field(default_factory=dict)


@dataclass(frozen=True)
class Asked:
    """A candidate, the key of its result, and the seconds of its earlier rounds."""

    candidate: Candidate
    key: str
    rounds: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class Turn:
    """The message that a candidate's turn begins: if the process dies, this one is to blame."""

    key: str


@dataclass(frozen=True)
class Timed:
    """The seconds of the steps of one turn."""

    key: str
    seconds: tuple[float, ...]


@dataclass
class Subject:
    """A training step, to be measured on any mesh in any layout."""

    setup: Setup
    values: Any
    job: jobs.Job
    jitted: Jitted
    specs: tuple[Any, Any]

    @staticmethod
    def of(setup: Setup) -> Subject:
        """Builds the step that the flags describe; errors as in `jobs.build`."""
        values, problems = flags.read(setup.arguments)
        job = jobs.on_given_hardware(jobs.build(values, problems, feeds_text=False), values)
        return Subject(setup, values, job, *jitted_step(job))

    def on_its_devices(self) -> Subject:
        """Returns the subject with the TPUs at hand, by whose time `train` decides as well."""
        from meshdsl.running.runnable import with_hardware_at_hand

        options = Options.of(with_hardware_at_hand(self.job.options, self.job.backend))
        return replace(self, job=replace(self.job, options=options))

    def hardware(self, topology: str) -> str:
        """Returns the name of a topology's hardware; without a topology, that of the flag."""
        machines = self.setup.topologies
        return machines[topology].name if topology else str(self.values.hardware)

    def room(self, topology: str) -> int:
        """Returns the bytes that a device may hold."""
        return self.values.memory or find_hardware(self.hardware(topology)).memory_bytes

    @property
    def rooms(self) -> dict[str, int]:
        """The memory of a device of each topology, in bytes; without any, under ""."""
        return {name: self.room(name) for name in self.setup.topologies or [""]}

    def program(self, candidate: Candidate) -> SpmdProgram:
        """Returns the step of a candidate, as `explain`, `compile` or `train` lower it."""
        job = self.job
        if candidate.topology:
            job = jobs.on_hardware(job, self.hardware(candidate.topology))
        if job.remats:
            mesh, layout = Mesh.parse(candidate.mesh), Layout.parse(candidate.layout)
            job = decided(replace(job, mesh=mesh, layout=layout))
            return training_step(job, job.layout)
        jitted = self.jitted.on(candidate.mesh, candidate.layout, job.options)
        return checked_program(jitted, self.specs)


def prepare(setup: Setup) -> Callable[[Any], Iterator[Any]]:
    """Returns the function that does the tasks of a sweep by `plan`, `compile` or `run`."""
    subject = Subject.of(setup)
    jobs.use_host_devices(subject.values.host_devices)
    if setup.topologies:
        jobs.use_no_devices()
    elif subject.values.measure != "plan":
        subject = subject.on_its_devices()
    measure = {"plan": by_plan, "compile": by_compiling}.get(subject.values.measure)
    if measure is None:
        return lambda task: by_running(subject, task)
    # What is here stays; garbage is looked for after each candidate, not some times during it.
    gc.collect()
    gc.freeze()
    gc.disable()

    def do(asked: Asked) -> Iterator[Result]:
        yield measure(subject, asked)
        gc.collect()

    return do


def by_plan(subject: Subject, asked: Asked) -> Result:
    """Returns a candidate's result by its plan, or the reason why there is no plan."""
    return _measured_or_why(asked.candidate, lambda: _plan(subject, asked)[0])


def by_compiling(subject: Subject, asked: Asked) -> Result:
    """Returns a candidate's result by its plan and the compiler."""
    if asked.candidate.topology:
        return _measured_or_why(asked.candidate, lambda: _compile_ahead(subject, asked))
    return _measured_or_why(asked.candidate, lambda: _compile(subject, asked)[0])


def by_running(subject: Subject, task: tuple[Asked, ...]) -> Iterator[Turn | Timed | Result]:
    """Runs candidates in turn; yields their results when all rounds are done."""
    runs: list[_Run] = []
    for asked in task:
        yield Turn(asked.key)
        compiled = _measured_or_why(asked.candidate, partial(_Run.of, subject, asked))
        if isinstance(compiled, Result):
            yield compiled
        else:
            runs.append(compiled)
    for number in range(subject.values.rounds):
        first = number % len(runs) if runs else 0
        for run in [*runs[first:], *runs[:first]]:
            if len(run.rounds) > number:
                continue
            yield Turn(run.asked.key)
            seconds = _measured_or_why(run.asked.candidate, run.turn)
            if isinstance(seconds, Result):
                runs.remove(run)
                yield seconds
            else:
                run.rounds.append(seconds)
                yield Timed(run.asked.key, seconds)
    yield from (run.result() for run in runs)


def _measured_or_why(candidate: Candidate, measure: Callable[[], Any]) -> Any:
    """Returns what `measure` returns, or a result with the reason why it failed."""
    failed = Result(candidate.mesh, candidate.layout, candidate.topology)
    try:
        return measure()
    except ValueError as error:  # the candidate's own fault
        return replace(failed, reason=plain_text(error))
    except Exception as error:  # whatever it is, the other candidates go on
        text = user_text(error) or f"{type(error).__name__}: {error}"
        if "RESOURCE_EXHAUSTED" in text:
            text = f"out of memory on a device\n{text}"
        return replace(failed, reason=text, passing=True)


def _plan(subject: Subject, asked: Asked) -> tuple[Result, Any]:
    from meshdsl.reports.explain import explain
    from meshdsl.reports.explain.html.page import page

    with _noted() as notes:
        program = subject.program(asked.candidate)
    topology = asked.candidate.topology
    report = explain(program, subject.hardware(topology))
    result = planned(asked.candidate, report, program, subject.room(topology))
    name = ""
    if subject.setup.folder is not None:
        name = f"{PAGES}/{asked.key}.html"
        (Path(subject.setup.folder) / name).write_text(page(report), encoding="utf-8")
    return replace(result, notes=tuple(notes), page=name), program


@contextmanager
def _noted() -> Iterator[list[str]]:
    """Gives a list that has, when its block ends, what was warned of in it."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield notes
    notes += [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def _compile(subject: Subject, asked: Asked) -> tuple[Result, Compiled]:
    result, program = _plan(subject, asked)
    start = time.perf_counter()
    with _noted() as notes:
        compiled = program.compile()
    seconds = time.perf_counter() - start
    peak = _peak(compiled.memory_analysis())
    fits, notes = peak <= subject.room(""), [*result.notes, *notes]
    result = replace(result, notes=tuple(notes), compile_seconds=seconds)
    return replace(result, peak_bytes=peak, fits=fits), compiled


def _compile_ahead(subject: Subject, asked: Asked) -> Result:
    from meshdsl.lowering.backends.jax.ahead import compile_ahead

    result, program = _plan(subject, asked)
    name = asked.candidate.topology
    machine = subject.setup.topologies[name]
    used = chosen(subject.values.compiler_flags, RECOMMENDED[machine.name])
    with _noted() as notes:
        compiled = compile_ahead(program, machine, used)
    peak = compiled.peak_bytes
    fits = compiled.fits and peak <= subject.room(name)
    result = replace(result, notes=(*result.notes, *notes), compile_seconds=compiled.seconds)
    return replace(result, peak_bytes=peak, fits=fits)


def _peak(account: Any) -> int:
    """Returns the peak memory of a device in bytes, by a compiler's account."""
    total = account.argument_size_in_bytes + account.output_size_in_bytes
    total += account.temp_size_in_bytes - account.alias_size_in_bytes
    return account.peak_memory_in_bytes or total


@dataclass
class _Run:
    """A candidate that is compiled, to be run now and then."""

    asked: Asked
    planned: Result
    step: Compiled
    create: Compiled
    batch: Mapping[str, NamedArray]
    seed: int
    rounds: list[tuple[float, ...]] = field(default_factory=list)

    @staticmethod
    def of(subject: Subject, asked: Asked) -> _Run:
        from meshdsl.ops.random import KEY
        from meshdsl.tensors.named_array import spec

        job, (mesh, layout) = subject.job, (asked.candidate.mesh, asked.candidate.layout)
        result, step = _compile(subject, asked)
        make = job.recipe.create_state()

        def state(key: Any) -> dict[str, Any]:
            return {"state": make(key)}  # so that its paths are those of the step's state

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayoutWarning)  # lowering the step has warned already
            creation = jit(state, mesh, layout, job.backend, options=job.options)
            program = creation.lower(spec([KEY], "uint32"))
        batch = random_batch(job.batch_spec, jobs.vocabulary(job.model))
        stored = step.executable.inputs[-len(batch) :]
        placed = {  # where the step wants it, as a data loader would
            name: NamedArray(at.put(batch[name]), batch[name].dims, at.cuts)
            for name, at in zip(sorted(batch), stored, strict=True)
        }
        rounds = list(asked.rounds)
        return _Run(asked, result, step, program.compile(), placed, subject.values.seed, rounds)

    def turn(self) -> tuple[float, ...]:
        """Returns the seconds of some steps from a state of their own."""
        import jax

        from meshdsl.ops.random import key

        state, seconds = self.create(key(self.seed))["state"], []
        for _ in range(_WARM_UP + _TIMED):
            start = time.perf_counter()
            state, metrics = self.step(state, self.batch)
            jax.block_until_ready(jax.tree.leaves((state, metrics)))
            seconds.append(time.perf_counter() - start)
        return tuple(seconds[_WARM_UP:])

    def result(self) -> Result:
        """Returns what has been measured: the median of all steps, and their quartiles."""
        seconds = [each for one in self.rounds for each in one]
        low, high = (float(q) for q in np.quantile(seconds, [0.25, 0.75]))
        return replace(self.planned, seconds=statistics.median(seconds), quartiles=(low, high))


def random_batch(specs: Mapping[str, Spec], vocab: int) -> dict[str, NamedArray]:
    """Returns a batch: normal numbers, tokens, and for other whole numbers 0 and 1."""
    rng = np.random.default_rng(0)
    batch = {}
    for name, one in specs.items():
        is_integer = np.issubdtype(one.dtype, np.integer)
        sizes, below = one.dims.sizes, vocab if name in ("tokens", "targets") else 2
        drawn = rng.integers(0, below, sizes) if is_integer else rng.standard_normal(sizes)
        batch[name] = named(drawn.astype(one.dtype), one.dims)
    return batch
