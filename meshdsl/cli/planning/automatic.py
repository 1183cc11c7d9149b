"""Flags that are `auto`: a search chooses their values, for `train`, `explain` and `compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from absl import flags

from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.planning.nearness import progress
from meshdsl.cli.planning.searched import (
    SEARCHED,
    Asked,
    Machine,
    asked,
    clear,
    effort_of,
    found_by,
    put,
    settle,
    shown,
)
from meshdsl.layouts.automatic import AUTO, OpenLayout, is_auto
from meshdsl.layouts.hardware import hardware_of
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.units import show_seconds, show_share
from meshdsl.search.plans import DoesNotFit, Plans

_OF_THE_RUN = ("microbatches", "remat")  # settings that a run keeps on other devices, too


@dataclass(frozen=True)
class Chosen:
    """The values of the flags that are `auto`.

    Attributes:
        says: the line to print.
        asked: the flags, the machine and the settings that the search was for, as text.
        found: the values that the search chose, as text.
    """

    says: str
    asked: Mapping[str, str]
    found: Mapping[str, str]


def settled(
    values: flags.FlagValues,
    problems: Problems,
    machine: Callable[[flags.FlagValues, Problems], Machine | None],
    feeds_text: bool = False,
    before: tuple[dict[str, str], dict[str, str]] | None = None,
    settings: Mapping[str, str] | None = None,
    going_on: bool = False,
) -> Chosen | None:
    """Sets the flags that are `auto`; returns what was chosen, and None if there are none.

    Args:
        machine: returns the machine to search for; adds to the problems.
        feeds_text: as in `job.build`.
        before: `asked` and `found` of an earlier start of the run.
        settings: the settings of the run; another plan is made if they change.
        going_on: whether the run has checkpoints, with the settings of the earlier start.

    Raises:
        ValueError: the user's mistakes; nothing fits, or nothing can be split.
    """
    if isinstance(values.layout, OpenLayout) and values.mesh_shape is None:
        put(values, "mesh_shape", AUTO)
    if is_auto(values.mesh_shape) and values.layout is None:  # without rules, no axis has a use
        put(values, "layout", OpenLayout(Layout()))
    left = [name for name in SEARCHED if is_auto(values[name].value)]
    if not left or left == ["remat"]:  # `steps.decided` chooses it for the given layout
        return None
    written = {f"--{name}": str(values[name].value) for name in SEARCHED}
    kept: dict[str, str] = {}
    if before is not None and going_on:
        kept = {name: before[1][name] for name in left if name in before[1]}
    given = {name: values[name].value for name in left}
    search = asked(values, problems, machine, feeds_text=feeds_text)
    for_what = {
        **written,
        "devices": str(search.machine.devices),
        "hardware": search.machine.hardware,
        **{name: text for name, text in (settings or {}).items() if name not in _OF_THE_RUN},
    }
    if before is not None and before[0] == for_what:
        found = before[1]
        says = f"the layout of the earlier start: {shown(found)}"
    else:
        of_run = {name: text for name, text in kept.items() if name in _OF_THE_RUN}
        if of_run:
            for name, value in given.items():  # the first request has cleared them
                put(values, name, value)
            settle(values, of_run)
            search = asked(values, problems, machine, feeds_text=feeds_text)
        found, says = {}, "nothing is left to choose"
        if search.left:
            plans = _plans(search, values)
            found = found_by(plans.best, search)
            says = f"chosen: {shown(found)} ({_certificate(plans)})"
        found = {**found, **of_run}
    clear(values, left)
    settle(values, found)
    return Chosen(says, for_what, found)


def _plans(search: Asked, values: flags.FlagValues) -> Plans:
    try:
        with progress() as on_progress:
            plans = search.search(effort_of(values, on_progress=on_progress)).run()
        plans.best  # noqa: B018 - raises where none fits
    except DoesNotFit as error:
        raise ValueError(f"{error}. `meshdsl plan` finds out what makes it fit") from error
    return plans


def _certificate(plans: Plans) -> str:
    best = plans.best
    text = f"{show_seconds(best.seconds)} per step by simulation on {plans.hardware.title}"
    if not plans.gap:
        return text
    return f"{text}, at most {show_share(plans.gap)} above the optimum of {plans.points:,} plans"


def described_machine(values: flags.FlagValues, problems: Problems) -> Machine | None:
    """Returns the machine of `--topology`, or of `--hardware` and a mesh, or one device."""
    from meshdsl.cli.plan import machine_of

    if values.topology is not None or is_auto(values.mesh_shape):
        return machine_of(values, problems)
    mesh = values.mesh_shape
    return Machine(values.hardware, mesh.size if isinstance(mesh, Mesh) else 1)


def machine_at_hand(values: flags.FlagValues, problems: Problems) -> Machine | None:
    """Returns the machine of JAX's devices; `--hardware`, if it is given, says their times."""
    import jax

    if isinstance(values.backend, Mistake):
        return None
    on_jax = values.backend.startswith("jax")
    mesh = values.mesh_shape
    if is_auto(mesh) and not on_jax:
        problems.add(f"--mesh_shape=auto: --backend={values.backend} needs a mesh; give its axes")
        return None
    if values.search_seconds is not None and values.coordinator is not None:
        problems.add(
            "--search_seconds: processes would find different plans; give --mesh_shape and "
            "--layout of `meshdsl plan`"
        )
    count = mesh.size if isinstance(mesh, Mesh) else jax.device_count() if on_jax else 1
    if values["hardware"].present:
        return Machine(values.hardware, count)
    known = hardware_of(jax.local_devices()[0].device_kind) if on_jax else None
    return Machine("cpu" if known is None else known.name, count)
