"""`meshdsl explore`: many plans of a training step on one page, to edit and to compare.

The page needs no server and no network. Its figures are those of `meshdsl explain --json`. With
`--live` this process serves it, and computes any other plan that is chosen there.
"""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from absl import flags as absl_flags

from meshdsl.cli import flags
from meshdsl.cli.exploring.computing import Computer, Impossible, prepare
from meshdsl.cli.exploring.points import (
    by_turns,
    different,
    dims_of,
    edited,
    in_order,
    of_search,
    on_meshes,
)
from meshdsl.cli.mistakes.calibrated import check_machine
from meshdsl.cli.mistakes.problems import Problems
from meshdsl.cli.plan import machine_of
from meshdsl.cli.planning.commands import typed
from meshdsl.cli.planning.interrupting import interruptible
from meshdsl.cli.planning.pages import write_page
from meshdsl.cli.planning.searched import Asked, asked, put
from meshdsl.cli.serving.listening import listening, server_of
from meshdsl.cli.sweeping.workers import Died, perform
from meshdsl.layouts.calibration import find_hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.lowering.lower import validate
from meshdsl.reports.explain.text import MEANING
from meshdsl.reports.explore.choices import Choice
from meshdsl.reports.explore.packing import Packing
from meshdsl.reports.explore.page import page
from meshdsl.reports.sweeps import candidates
from meshdsl.search.facts import Facts
from meshdsl.search.plans import Effort
from meshdsl.search.searching import Search
from meshdsl.search.space import Variant
from meshdsl.training.reporting.output import tell
from meshdsl.training.reporting.progress import Progress

MOST = 10_000
_PAGE = "explore.html"
_HOST = "127.0.0.1"
_GRACE = 1  # seconds in which answers may come to their ends when the server stops
# Flags that choices have, that say what to compute, or that are of other commands.
_ASIDE = frozenset(
    "html host plans live port parallel microbatches topology slices hardware".split()
)


def main(values: absl_flags.FlagValues, problems: Problems) -> None:
    """Runs the command.

    Raises:
        ValueError: mistakes as in `explain` and `plan`; or no plan could be computed.
    """
    make_server = _make_server(values, problems) if values.live else None
    request, given = _request(values, problems)
    listener = _listener(values) if make_server else None
    space = _Space.of(request, given)
    packing = Packing(_head(request, space.facts))
    with interruptible() as stopped:
        done, wanted = _compute(space, packing, values, stopped)
    if not packing.front:
        reasons = list(packing.reasons.values())
        raise ValueError(f"no plan could be computed: {reasons[0] if reasons else 'stopped'}")
    if values.html or not make_server:
        text, detailed = page(packing)
    if make_server:
        step = space.searches[-1].step
        packing.head["live"] = {"microbatches": step.microbatches, "remats": step.remats}
        served, detailed = page(packing)
    _print(packing, detailed, given)
    if done < wanted:
        print(f"stopped early: {done:,} of {wanted:,} plans were computed")
    if values.html or not make_server:
        write_page(values.html or _PAGE, text)
    if make_server and listener:
        _serve(make_server, listener, served, space)


def _make_server(values: absl_flags.FlagValues, problems: Problems) -> Callable[[Any], Any]:
    """Returns a function from an application to its server."""
    if values["host"].present and values.host != _HOST:
        problems.add(
            "--host is of `serve`: `explore --live` answers this machine alone; forward its port "
            "to see the page elsewhere"
        )
    return server_of("explore --live", _GRACE, problems)


def _listener(values: absl_flags.FlagValues) -> socket.socket:
    """Returns a socket that listens on this machine alone."""
    port = values.port if values["port"].present else 0
    return listening(_HOST, port, f"--port={port}")


def _serve(
    make_server: Callable[[Any], Any], listener: socket.socket, text: str, space: _Space
) -> None:
    """Serves the page, and computes plans for it, until the process is interrupted."""
    from meshdsl.cli.exploring.live import Offer, application

    step = space.searches[-1].step
    offer = Offer(space.request.machine.devices, step.microbatches, step.remats)
    computer = Computer(_arguments(space.request))
    server = make_server(application(text, offer, computer.result))
    tell(
        f"the page is at http://{_HOST}:{listener.getsockname()[1]}/ for this machine; what is "
        "chosen there is computed here. Ctrl-C ends it"
    )
    server.run(sockets=[listener])


def _request(values: absl_flags.FlagValues, problems: Problems) -> tuple[Asked, list[Choice]]:
    """Returns the search of more plans, and the choices that the user wrote."""
    meshes, layouts = values.mesh_shape or [], values.layout or []
    reading = candidates.read(meshes, layouts or [""])
    problems.found += [text for text in reading.problems if meshes or layouts]
    check_machine(values, problems)
    if isinstance(values.plans, int) and values.plans > MOST:
        problems.add(f"--plans: at most {MOST:,}, got {values.plans:,}")
    if values.compare_layout:
        problems.add("--compare_layout is for `explain`; give `explore` a second --layout")
    pairs = reading.candidates
    first = Mesh.parse(pairs[0].mesh) if pairs else None
    put(values, "mesh_shape", None if values.topology else first)
    put(values, "layout", None)
    request = asked(values, problems, machine_of, unset=True)
    devices = request.machine.devices
    for one in pairs:
        if Mesh.parse(one.mesh).size != devices:
            problems.add(
                f"--mesh_shape: all meshes of a page have the same number of devices; {one.mesh} "
                f"does not have {devices:,}"
            )
    if devices == 1:
        problems.add("nothing can be split over 1 device: give --mesh_shape of several")
    problems.check()
    microbatches = values.microbatches
    return request, [Choice(one.mesh, one.layout, microbatches) for one in pairs]


@dataclass(frozen=True)
class _Space:
    """What a page may have, and the computing of it.

    Attributes:
        given: what the user wrote.
        searches: searches on the user's mesh, if there is one, and on all meshes.
        facts: what the step shows about splitting it.
    """

    request: Asked
    given: Sequence[Choice]
    searches: Sequence[Search]
    facts: Facts

    @staticmethod
    def of(request: Asked, given: Sequence[Choice]) -> _Space:
        everywhere = request.search(Effort(), left=("layout", "mesh_shape"))
        step = replace(everywhere.step, graph=cache(everywhere.step.graph))
        meshes = dict.fromkeys(one.mesh for one in given)
        places: list[int | Mesh] = [*map(Mesh.parse, meshes), everywhere.devices]
        name, slices = everywhere.name, request.machine.slices
        searches = [Search(step, name, place, slices=slices) for place in places]
        return _Space(request, given, searches, searches[-1].bounds(_variant(searches[-1])).facts)

    def choices(self) -> Iterator[Choice]:
        """Yields what to compute, each plan once; see `exploring.points`."""
        found = [list(of_search(search.candidates()[0])) for search in self.searches]
        firsts = [*self.given, *itertools.chain(*found)]
        if not firsts:
            return
        start = firsts[0]
        moved = on_meshes(start, (one.mesh for one in firsts))
        step = self.searches[-1].step
        parts = (replace(start, microbatches=count) for count in step.microbatches)
        kept = (replace(start, remat=remat) for remat in step.remats)
        near = itertools.chain(parts, kept, edited(start, self.facts, 1))
        yield from different(
            itertools.chain(self.given, by_turns(near, *found, moved), edited(start, self.facts, 2))
        )

    def reason(self, choice: Choice) -> str:
        """Returns why a choice cannot be a plan, as far as that is known at once; else ""."""
        graph = self.searches[-1].step.graph(_variant(self.searches[-1]))
        try:
            validate(graph, Mesh.parse(choice.mesh), Layout.parse(choice.layout))
        except ValueError as error:
            return str(error)
        return ""


def _variant(search: Search) -> Variant:
    return Variant(search.step.microbatches[0], search.step.remats[0])


def _compute(
    space: _Space, packing: Packing, values: absl_flags.FlagValues, stopped: Callable[[], bool]
) -> tuple[int, int]:
    """Computes plans until there are enough, no more, or the user stops it.

    Returns:
        How many were computed, of how many.
    """
    tasks: list[Choice] = []
    for choice in space.choices():
        if len(tasks) == values.plans or stopped():
            break
        if not (reason := space.reason(choice)):
            tasks.append(choice)
        elif choice in space.given:
            raise ValueError(reason)
        elif len(packing.reasons) < values.plans:
            packing.refuse(choice, reason)
    before = len(packing.choices)
    with Progress(len(tasks), "plans") as progress:
        results = _results(tasks, _arguments(space.request), values)
        for choice, result in in_order(tasks, _counted(results, progress, stopped)):
            if isinstance(result, Impossible | Died):
                packing.refuse(choice, result.reason)
            else:
                packing.add(choice, result)
    return len(packing.choices) - before, len(tasks)


def _counted(
    results: Iterator[tuple[Choice, Any]], progress: Progress, stopped: Callable[[], bool]
) -> Iterator[tuple[Choice, Any]]:
    """Yields results until the user stops it."""
    for choice, result in results:
        progress.step(failed=isinstance(result, Impossible | Died))
        yield choice, result
        if stopped():
            return


def _results(
    tasks: Sequence[Choice], arguments: tuple[str, ...], values: absl_flags.FlagValues
) -> Iterator[tuple[Choice, Any]]:
    processes = values.parallel or len(os.sched_getaffinity(0))
    if min(processes, len(tasks)) > 1:
        yield from perform(tasks, processes, prepare, arguments)
        return
    computer = Computer(arguments)
    for choice in tasks:
        yield choice, computer.result(choice)


def _arguments(request: Asked) -> tuple[str, ...]:
    """Returns the flags that all plans have in common."""
    values = request.values
    given = [text for text in flags.written(values) if _name(text) not in _ASIDE]
    if values["hardware"].present or values.topology:
        given.append(f"--hardware={request.machine.hardware}")
    return tuple(given)


def _name(argument: str) -> str:
    return argument.lstrip("-").partition("=")[0]


def _head(request: Asked, facts: Facts) -> dict[str, Any]:
    job, machine = request.job, request.machine
    model = job.model.name
    if request.values.model_args:
        model += f" ({request.values.model_args})"
    sizes = {
        dim: max(row.dims.get(dim, 1) for row in (*facts.inputs, *facts.peak))
        for dim in dims_of(facts)
    }
    return {
        "model": model,
        "batch": f"{job.batch_size:,} × {job.length:,}{' tokens' if request.tokens else ''}",
        "machine": machine.title,
        "memory_bytes": find_hardware(machine.hardware).memory_bytes,
        "command": [typed([one]) for one in _arguments(request)],
        "dims": list(sizes.items()),
        "meaning": {part: words[0] for part, words in MEANING.items()},
    }


def _print(packing: Packing, detailed: int, given: Sequence[Choice]) -> None:
    count = len(packing.choices) - len(packing.reasons)
    fits = [n for n in packing.front if packing.places[n][1] <= packing.head["memory_bytes"]]
    number = (fits or packing.front)[0]
    seconds, peak = packing.places[number]
    best = packing.choices[number]
    print(
        f"{count:,} plans; the fastest{' that fits' if fits else ', which does not fit'}: "
        f"{show_seconds(seconds)}, {show_bytes(peak)}: {typed(best.flags())}"
    )
    for refused, reason in packing.reasons.items():
        if packing.choices[refused] in given:
            print(f"no plan: {' '.join(packing.choices[refused].flags())}: {reason}")
    if detailed < count:
        print(f"{count - detailed:,} of them are on the page without details: it has a limit")
