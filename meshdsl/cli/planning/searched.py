"""Searches of the command line: the flags that a search chooses, the machine, and the job.

A search chooses a flag if its value is `auto`. For `plan` it also chooses flags without a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from absl import flags

from meshdsl.cli import job as jobs
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.layouts.automatic import OpenLayout, is_auto
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.search.plans import Effort, Plan
from meshdsl.search.searching import Search
from meshdsl.search.steps import parts_of, recipe_step
from meshdsl.training.recipe import Recipe

SEARCHED = ("mesh_shape", "layout", "microbatches", "remat")
_REMATS = ("none", "full")
_LONG = 10**6  # points: a search with a limit of time takes as many as it can


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is for.

    Attributes:
        hardware: its name, or the file of a calibration.
        devices: their number.
        slices: the number of slices that a slow network joins.
        title: its name in reports.
    """

    hardware: str
    devices: int
    slices: int = 1
    title: str = ""


@dataclass(frozen=True)
class Asked:
    """A search that a command line asks for.

    Attributes:
        left: the flags that it chooses.
    """

    values: flags.FlagValues
    job: jobs.Job
    machine: Machine
    left: frozenset[str]

    @property
    def tokens(self) -> bool:
        """Whether a batch is one of text."""
        return "tokens" in self.job.batch_spec

    def search(
        self, effort: Effort, left: Iterable[str] = (), devices: int | None = None
    ) -> Search:
        """Returns the search.

        Args:
            left: further flags that it chooses, without regard to their values.
            devices: another number of devices.
        """
        free = self.left.union(left)
        job = self.job
        counts = self._counts() if "microbatches" in free else None
        own = getattr(job.model.config, "remat", None)
        remats: tuple[str, ...] = ("",)
        if "remat" in free and own is not None:
            remats = ("", *(kind for kind in _REMATS if kind != own))
        step = recipe_step(job.recipe, job.batch_spec, counts, remats, self._keeping, job.options)
        layout = self.values.layout
        pinned = layout.rules if isinstance(layout, OpenLayout) else layout or Layout()
        mesh = self.values.mesh_shape
        where: int | Mesh = devices or self.machine.devices
        if "mesh_shape" not in free:
            where = mesh if isinstance(mesh, Mesh) else 1
        return Search(
            step,
            self.machine.hardware,
            where,
            Layout() if "layout" in left else pinned,
            effort,
            self.machine.slices,
            closed="layout" not in free,
        )

    def _counts(self) -> tuple[int, ...]:
        """Returns the microbatches in which every batch of the run can be computed."""
        job, ramp = self.job, self.values.batch_ramp
        batches = [job.batch_spec]
        if ramp is not None:
            sizes = ramp.sizes(job.batch_size)
            batches += [job.model.batch_spec(size, job.length) for size in sizes]
        return min((parts_of(batch, job.recipe.batch_dim) for batch in batches), key=len)

    def _keeping(self, remat: str) -> Recipe:
        return self.job.keeping(remat).recipe


def effort_of(values: flags.FlagValues, **rest: Any) -> Effort:
    """Returns the effort that `--search_seconds` and `--within` ask for."""
    effort = Effort(seconds=values.search_seconds, within=values.within, **rest)
    return replace(effort, estimated=_LONG) if effort.only_time else effort


def asked(
    values: flags.FlagValues,
    problems: Problems,
    machine: Callable[[flags.FlagValues, Problems], Machine | None],
    unset: bool = False,
    feeds_text: bool = False,
) -> Asked:
    """Returns the search that the flags ask for.

    Args:
        machine: returns the machine to search for; adds to the problems.
        unset: whether the search also chooses flags that are not given.
        feeds_text: as in `job.build`.

    Raises:
        UsageError: everything in `problems`, and what is wrong with the model and the numbers.
    """
    chosen = {name: values[name].value for name in SEARCHED}
    left = {name for name, value in chosen.items() if is_auto(value)}
    if unset:
        left |= {name for name in SEARCHED if not values[name].present}
        if chosen["layout"] == Layout():  # `--layout=` says as little
            left.add("layout")
    if not isinstance(values.backend, Mistake) and values.backend == "jax_auto":
        problems.add(
            "--backend: what jax_auto sends is XLA's choice, known once it is compiled; leave "
            "--backend out to search a layout"
        )
    where = machine(values, problems)
    clear(values, left)  # the job is one without what the search chooses
    layout = chosen["layout"]
    put(values, "layout", None)
    try:
        job = jobs.build(values, problems, feeds_text)
    finally:
        put(values, "layout", layout)
    if "remat" in left and getattr(job.model.config, "remat", None) is None:
        left.discard("remat")
    assert where is not None
    return Asked(values, job, where, frozenset(left))


def put(values: flags.FlagValues, name: str, value: Any) -> None:
    """Sets the value of a flag."""
    setattr(values, name, value)


def clear(values: flags.FlagValues, names: Iterable[str]) -> None:
    """Takes back the values of some flags that a search chooses."""
    for name in names:
        put(values, name, 1 if name == "microbatches" else None)


def settle(values: flags.FlagValues, found: dict[str, str]) -> None:
    """Sets flags as if they had been given: `{"layout": "batch:data"}`."""
    for name, text in found.items():
        values[name].parse(text)
        values[name].using_default_value = False


def found_by(plan: Plan, asked: Asked, left: Iterable[str] = ()) -> dict[str, str]:
    """Returns the flags that a search chose for a plan, and the limit of memory that it set.

    Args:
        left: further flags to return.
    """
    free = asked.left.union(left)
    mesh, variant = plan.program.mesh, plan.point.variant
    found = {}
    if mesh.axes and "mesh_shape" in free:
        found["mesh_shape"] = str(mesh).replace(" ", ",")
    if mesh.axes and "layout" in free:
        found["layout"] = str(plan.point.layout)
    if "microbatches" in free:
        found["microbatches"] = str(variant.microbatches)
    if "remat" in free and variant.remat:
        found["remat"] = variant.remat
    if plan.memory is not None:
        found["memory"] = f"{plan.memory // 2**20}MiB"  # searches set a multiple of MiB
    return found


def shown(found: dict[str, str]) -> str:
    """Returns flags as they are typed."""
    plain = ("microbatches", "remat", "memory")
    return " ".join(
        f"--{name}={text}" if name in plain else f'--{name}="{text}"'
        for name, text in found.items()
    )
