"""`meshdsl plan`: the best mesh, layout, microbatches and remat of a training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from absl import flags

from meshdsl.cli import flags as all_flags
from meshdsl.cli.flags import Mistake
from meshdsl.cli.mistakes.calibrated import check_machine
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.planning.commands import typed
from meshdsl.cli.planning.interrupting import interruptible
from meshdsl.cli.planning.nearness import progress
from meshdsl.cli.planning.searched import (
    SEARCHED,
    Asked,
    Machine,
    asked,
    effort_of,
    found_by,
    put,
    shown,
)
from meshdsl.layouts.automatic import is_auto
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.topologies import Topology
from meshdsl.lowering.costs.units import show_bytes
from meshdsl.version import VERSION

if TYPE_CHECKING:
    from meshdsl.reports.plans import Figures, Heading
    from meshdsl.search.plans import Plan, Plans
    from meshdsl.search.searching import Search

_NO_ROOM = 1
_SMALLER = 3  # plans that show what less memory costs
_MOST_PARTS = 4  # sequences are divided into up to so many parts, to see if these fit
_MOST_TIMES = 64  # plans are searched for up to this multiple of the given devices
# Flags that the printed commands leave out, or write by themselves.
_ASIDE = frozenset(
    "mesh_shape layout microbatches remat memory batch_tokens batch_size topology slices hardware "
    "search_seconds within simplify json against".split()
)


def main(values: flags.FlagValues, problems: Problems) -> int:
    """Runs the command: exit code 0 if a plan fits, 1 if none does.

    Raises:
        ValueError: mistakes as in `explain`, an unknown machine, a layout to compare with that does
            not fit the program, or nothing that can be split over the machine.
    """
    from meshdsl.search.plans import DoesNotFit
    from meshdsl.search.simplified import simplified

    check_machine(values, problems)
    _use_tokens(values, problems)
    against = _against(values, problems)
    request = asked(values, problems, machine_of, unset=True)
    if against is not None:
        _check_mesh(against[0], request)
    _check_memory(request)
    with interruptible() as stopped:
        try:
            with progress() as on_progress:
                effort = effort_of(
                    values, smaller=_SMALLER, stopped=stopped, on_progress=on_progress
                )
                search = request.search(effort)
                plans = search.run()
            plans.best  # noqa: B018 - raises where none fits
            if values.simplify:
                plans = simplified(search, plans, values.simplify)
        except DoesNotFit as problem:
            _report_no_room(request, problem, values, search.is_late)
            return _NO_ROOM
    rows = [_figures(plan, request, plans) for plan in (*plans.plans, *plans.tight)]
    heading, commands = _heading(request), _commands(request, plans.best)
    if values.json:
        from meshdsl.reports.plans import as_values

        print(json.dumps(as_values(heading, plans, rows, commands), indent=2))
        return 0
    from meshdsl.reports.plans import show

    print(show(heading, plans, rows, commands))
    if against is not None:
        print()
        print(_comparison(search, plans, request, rows[0], *against))
    return 0


def machine_of(values: flags.FlagValues, problems: Problems) -> Machine | None:
    """Returns the machine of `--topology`, or of a mesh on `--hardware`; adds to `problems`."""
    mesh = values.mesh_shape
    if values.topology is None:
        if values["slices"].present:
            problems.add("--slices are those of a --topology, which is missing")
        if isinstance(mesh, Mesh) and not isinstance(values.hardware, Mistake):
            title = f"{_devices(mesh.size)} of {find_hardware(values.hardware).title}"
            return Machine(values.hardware, mesh.size, 1, title)
        if not isinstance(mesh, Mistake):
            problems.add(
                "--topology says what to plan for, as in --topology=v5p:8x8x16; or give "
                "--mesh_shape, and --hardware if it is not v5p"
            )
        return None
    if values["hardware"].present:
        problems.add("--hardware: that of --topology is known; leave it out")
    if isinstance(values.slices, Mistake):
        return None
    with problems.caught("--topology"):
        topology = Topology.parse(values.topology, values.slices)
        if isinstance(mesh, Mesh):
            problems.found += [f"--mesh_shape: {reason}" for reason in topology.problems(mesh)]
        title = f"{topology}: {_devices(topology.devices)} of {topology.hardware.title}"
        return Machine(topology.name, topology.devices, topology.slices, title)
    return None


def _devices(count: int) -> str:
    return f"{count:,} devices" if count > 1 else "1 device"


def _use_tokens(values: flags.FlagValues, problems: Problems) -> None:
    """Sets the size of a batch to that of `--batch_tokens`."""
    from meshdsl.models import load

    tokens = values.batch_tokens
    if not isinstance(tokens, int) or isinstance(values.model, Mistake):
        return
    if values["batch_size"].present:
        problems.add("--batch_tokens and --batch_size both say how large a batch is; give one")
        return
    length = values.length
    if isinstance(length, Mistake):
        return
    try:
        length = length or load(values.model, values.model_args).length
    except ValueError:  # an error of --model, which `job.build` reports
        return
    if tokens % length:
        near = max(1, tokens // length) * length
        problems.add(
            f"--batch_tokens: {tokens:,} tokens are not in sequences of {length:,}; {near:,} are, "
            "or give another --length"
        )
        return
    put(values, "batch_size", tokens // length)


def _against(values: flags.FlagValues, problems: Problems) -> tuple[Mesh | None, Layout] | None:
    """Returns the layout to compare with, and its mesh if that is given: `mesh | layout`."""
    text = values.against
    if text is None or isinstance(text, Mistake):
        return None
    with problems.caught("--against"):
        if values.json:
            raise ValueError("compares as text; leave out --json")
        if text == "jax_auto":
            raise ValueError("`plan` compares with a layout, as in --against='batch:data'")
        mesh, bar, layout = text.rpartition("|")
        return Mesh.parse(mesh) if bar else None, Layout.parse(layout)
    return None


def _figures(plan: Plan, request: Asked, plans: Plans) -> Figures:
    from meshdsl.reports.plans import figures

    return figures(plan, plans.hardware, _flags(plan, request))


def _flags(plan: Plan, request: Asked) -> str:
    """Returns the flags of a plan beside its mesh and layout."""
    found = found_by(plan, request, ("microbatches", "remat"))
    rest = {name: text for name, text in found.items() if name not in ("mesh_shape", "layout")}
    if rest.get("microbatches") == "1":
        del rest["microbatches"]
    return shown(rest)


def _heading(request: Asked) -> Heading:
    from meshdsl.reports.plans import Heading

    job = request.job
    text = f"{job.batch_size:,} x {job.length:,} tokens" if request.tokens else ""
    if not text:
        text = f"{job.batch_size:,} examples of {job.length:,}"
    count = job.batch_size * (job.length if request.tokens else 1)
    unit = "tokens" if request.tokens else "examples"
    name = job.model.name
    if request.values.model_args:
        name += f" ({request.values.model_args})"
    return Heading(name, request.machine.title, text, count, unit, VERSION)


def _commands(request: Asked, plan: Plan) -> list[str]:
    """Returns the commands that compile and run a plan."""
    values = request.values
    found = found_by(plan, request, ("mesh_shape", "layout", "microbatches", "remat"))
    written = dict(text.lstrip("-").split("=", 1) for text in all_flags.written(values))
    for name in (*SEARCHED, "memory"):
        if name in written and name not in found and not is_auto(values[name].value):
            found[name] = written[name]
    if found.get("microbatches") == "1":
        del found["microbatches"]
    given = [text for text in all_flags.written(values) if _name(text) not in _ASIDE]
    model = [] if any(_name(text) == "model" for text in given) else [f"--model={values.model}"]
    size = [f"--batch_size={request.job.batch_size}"] if values.batch_size is not None else []
    line = " ".join([typed([*model, *given, *size]), shown(found)]).rstrip()
    commands = []
    if values.topology is not None:
        slices = f" --slices={values.slices}" if values.slices > 1 else ""
        commands.append(f"meshdsl compile --topology={values.topology}{slices} {line}")
    if request.tokens:
        commands.append(f"meshdsl train {line}")
    return commands or [f"meshdsl explain --hardware={request.machine.hardware} {line}"]


def _name(argument: str) -> str:
    return argument.lstrip("-").partition("=")[0]


def _check_memory(request: Asked) -> None:
    """Raises ValueError if a plan may use more memory than a device has."""
    hardware, limit = find_hardware(request.machine.hardware), request.job.options.memory
    if limit is not None and limit > hardware.memory_bytes and hardware.name != "cpu":
        raise ValueError(
            f"--memory={show_bytes(limit)} is more than the {show_bytes(hardware.memory_bytes)} "
            f"that {hardware.title} has; leave it out"
        )


def _check_mesh(mesh: Mesh | None, request: Asked) -> None:
    """Raises ValueError if a mesh to compare with is none of this machine."""
    machine, values = request.machine, request.values
    if mesh is None:
        return
    if mesh.size != machine.devices:
        raise ValueError(
            f"--against: mesh {mesh} has {_devices(mesh.size)}, but the plan is for "
            f"{machine.title}; leave the mesh out, and the fastest one for the layout is taken"
        )
    topology = values.topology
    problems = [] if topology is None else Topology.parse(topology, values.slices).problems(mesh)
    if problems:
        raise ValueError(f"--against: mesh {mesh}: {'; '.join(problems)}")


def _comparison(
    search: Search,
    plans: Plans,
    request: Asked,
    best: Figures,
    mesh: Mesh | None,
    layout: Layout,
) -> str:
    """Returns how the best plan differs from another layout, and what its rules are worth."""
    from meshdsl.reports.explain import compare, explain
    from meshdsl.reports.plans import Without, show_against
    from meshdsl.search.against import best_mesh, without_rules

    plan, name = plans.best, plans.hardware.name
    mesh, program = best_mesh(search, plan, layout, mesh)
    compared = compare(explain(plan.program, name), explain(program, name))
    other = f"{mesh} | {layout}"
    without = [Without(*row) for row in without_rules(search, plan)]
    same = mesh == plan.program.mesh and set(layout.rules) == set(plan.point.layout.rules)
    flags_of_other = _flags(replace(plan, memory=None), request)
    return show_against(str(compared), best, other, without, flags_of_other, same)


def _report_no_room(
    request: Asked, problem: ValueError, values: flags.FlagValues, stopped: Callable[[], bool]
) -> None:
    """Prints why no plan fits, and the changes that make one fit."""
    from meshdsl.reports.plans import show_remedies

    found = [
        (change, None if plans is None else _figures(plans.best, request, plans))
        for change, plans in _remedies(request, stopped)
    ]
    if found and found[-1][1] is None and stopped():  # it is not known whether this one helps
        found.pop()
    if not values.json:
        print(show_remedies(str(problem), found))
        return
    rows = [
        {"change": change, "seconds": row.seconds, "peak_bytes": row.plan.peak_bytes}
        for change, row in found
        if row is not None
    ]
    print(json.dumps({"problem": str(problem), "remedies": rows}, indent=2))


def _remedies(request: Asked, stopped: Callable[[], bool]) -> Iterator[tuple[str, Plans | None]]:
    """Yields changes, from the cheapest to the most expensive, and the plans that fit with each.

    Args:
        stopped: whether the user, or a limit of time, has stopped it.
    """
    from meshdsl.search.plans import Effort

    effort = Effort(estimated=60, tried=4, decided=1, stopped=stopped)
    job, left = request.job, request.left
    free = [name for name in SEARCHED if name not in left and request.values[name].present]
    if getattr(job.model.config, "remat", None) is None:
        free = [name for name in free if name != "remat"]
    searches = {
        f"--{name}=auto": request.search(effort, [name])
        for name in free
        if name != "mesh_shape" or "layout" in left  # a given layout has the axes of its mesh
    }
    if request.values.memory is not None:
        options = replace(job.options, memory=None)
        unlimited = replace(request, job=replace(job, options=options))
        searches["without --memory"] = unlimited.search(effort)
    helped = False
    for change, search in searches.items():
        if stopped():
            return
        plans = _fitting(search)
        helped = helped or plans is not None
        yield change, plans
    if helped:  # what is left costs more
        return
    length = job.length // 2
    while request.tokens and length >= job.length // _MOST_PARTS > 0 and not stopped():
        batch = job.model.batch_spec(job.batch_size, length)
        shorter = replace(request, job=replace(job, length=length, batch_spec=batch))
        plans = _fitting(shorter.search(effort))
        yield f"--length={length}", plans
        if plans is not None:
            break
        length //= 2
    times = 2
    while "mesh_shape" in left and times <= _MOST_TIMES and not stopped():
        count = times * request.machine.devices
        plans = _fitting(request.search(effort, devices=count))
        yield f"{count:,} devices", plans
        if plans is not None:
            break
        times *= 2


def _fitting(search: Search) -> Plans | None:
    """Returns the plans of a search, if one fits."""
    try:
        plans = search.run()
    except ValueError:  # nothing fits, or nothing can be split that much
        return None
    return plans if plans.plans else None
