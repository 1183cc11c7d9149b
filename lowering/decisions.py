"""Decisions: where the hardware is known, the fastest program by simulation is chosen.

The program that `choices` chooses is changed in one way after the other, and a change stays if the
step is faster and fits into memory. The changes are:

* each large collective starts as soon as its operand is ready: it is not joined with others, and
  loops reduce large results slice by slice;
* weights are kept from the forward to the backward pass;
* attention reads a split memory in another way than the one that sends the fewest bytes;
* a dim is computed in halves.

Where products would send less by choosing their strategies together, this is done with these
strategies and without them, and the faster program stays. So it is where other moves between
layouts take less time than those that send the fewest bytes.

`SpmdProgram.decisions` lists what each change costs if it is not made, or if it is. `fastest`
decides among programs of separate traces, such as those that keep more or less for the backward
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias, get_args

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.choices import Choice, Lowered, choose
from meshdsl.lowering.options import Context, Options
from meshdsl.lowering.parameters import axes_of
from meshdsl.lowering.passes.halves import candidates
from meshdsl.lowering.program import Alternative, Block, Decision, SpmdProgram, Value, wire_of
from meshdsl.lowering.writing.loops import within
from meshdsl.tracing.graph import Graph

ROOM = 0.85  # the share of the memory to plan with: compilers may need more than planned
_GAIN = 0.01  # a change that gains less is not worth a larger program
_ROUNDS = 4
_STRAYS = 0.15  # the share of a step that makes moves of least time worth another lowering


def decide(
    write: Callable[[Choice], Lowered],
    graph: Graph,
    layout: Layout,
    options: Options,
    hardware: Hardware,
) -> tuple[Lowered, tuple[Decision, ...]]:
    """Returns the lowering to take on some hardware, and what was decided by its time.

    Each change is tried on the best lowering before it, in turns, until none gains. The decisions
    are those of the last turn: what each change costs from the lowering that is returned.
    """
    from meshdsl.lowering.costs.simulation import Simulator

    best, usual = choose(write, graph, layout, options)
    room = hardware.memory_bytes if options.memory is None else options.memory
    if options.memory is None and usual.program.peak_bytes > room:
        best, usual = choose(write, graph, layout, replace(options, memory=room))
    # A plan may be below the compiler's peak, and a change of speed must not cost the run.
    allowed = max(ROOM * room, usual.program.peak_bytes)

    simulator = Simulator(hardware)

    @cache
    def costs(program: SpmdProgram) -> Alternative:
        return Alternative("", simulator.seconds(program), program.peak_bytes)

    @cache
    def evaluate(choice: Choice) -> Alternative:
        return costs(write(choice).program)

    def improved(best: Choice, more: Sequence[_Switch] = ()) -> _Way:
        """Returns what switches make of a choice, and what each decided last."""
        switches = [*_switches(write(best).program, graph, layout, options), *more]
        decisions: dict[_Switch, Decision] = {}
        for _ in range(_ROUNDS):
            began = best
            for switch in switches:
                other = switch.turned(best)
                its, others = evaluate(best), evaluate(other)
                if its == others:
                    decisions.pop(switch, None)  # it has no effect on this choice
                    continue
                fits = others.peak_bytes <= allowed
                chosen = replace(its, name=switch.word(best))
                rejected = replace(others, name=switch.word(other))
                if fits and others.seconds < (1 - _GAIN) * its.seconds:
                    best, chosen, rejected = other, rejected, chosen
                decisions[switch] = Decision(switch.name, chosen, rejected, fits)
            if best == began:
                break
        return best, tuple(decisions.values())

    def fits(choice: Choice) -> bool:
        return evaluate(choice).peak_bytes <= allowed

    def decided(way: _Way, other: Choice, decision: _Switch, is_open: bool) -> _Way:
        """Returns a way with one more decision, which rejected another choice."""
        best, decisions = way
        chosen, rejected = (
            replace(evaluate(one), name=decision.word(one)) for one in (best, other)
        )
        return best, (*decisions, Decision(decision.name, chosen, rejected, is_open))

    def faster(way: _Way, other: Choice, decision: _Switch, more: Sequence[_Switch] = ()) -> _Way:
        """Returns the faster of a way and of another choice, which is improved too."""
        if not fits(other):
            return decided(way, other, decision, False)
        rival = improved(other, more)
        ways = sorted([way, rival], key=lambda way: evaluate(way[0]).seconds)
        return decided(ways[0], ways[1][0], decision, True)

    def with_moves_by_time(way: _Way) -> _Way:
        """Returns the faster of a way and of one whose moves take least time; itself if equal."""
        best, other = way[0], _MOVES.turned(way[0])
        try:
            its, others = evaluate(best), evaluate(other)
        except ValueError:  # a placement may say where other moves leave partial sums
            return way
        if its == others:
            return way
        if others.seconds >= (1 - _GAIN) * its.seconds:
            return decided(way, other, _MOVES, fits(other))
        return faster(way, other, _MOVES, [_PRODUCTS])

    way = improved(best)
    # Other strategies send at other places, so that other changes may pay: each way is improved.
    other = _PRODUCTS.turned(best)
    if evaluate(best) != evaluate(other):
        way = faster(way, other, _PRODUCTS)
    if strays_from_bytes(write(way[0]).program, hardware, evaluate(way[0]).seconds):
        way = with_moves_by_time(way)
    best, decisions = way
    return write(best), decisions


@dataclass(frozen=True)
class _Switch:
    """A field of a choice that may be switched on.

    Attributes:
        name: its name in reports.
        field: the field of a `Choice`; it is off if it is "" or False.
        on: the value of the field if it is on.
        off_word: what reports write if it is off.
        on_word: what reports write if it is on.
    """

    name: str
    field: str
    on: bool | str
    off_word: str
    on_word: str

    def turned(self, choice: Choice) -> Choice:
        """Returns a choice with the switch in the other position."""
        is_on = getattr(choice, self.field) == self.on
        changes: dict[str, Any] = {self.field: type(self.on)() if is_on else self.on}
        return replace(choice, **changes)

    def word(self, choice: Choice) -> str:
        """Returns what reports call the value of a choice."""
        value = getattr(choice, self.field)
        if value == self.on:
            return self.on_word
        return str(value) if value else self.off_word  # another switch of the field may be on


def strays_from_bytes(
    program: SpmdProgram, hardware: Hardware, seconds: float, goal: float = math.inf
) -> bool:
    """Whether moves of least time (`Choice.timed`) may be much faster than those of fewest bytes.

    Time follows bytes but for four kinds of collectives: those that wait for a latency, that cross
    a slow network, that move what another one has just moved (another axis may go with it), and
    all_to_alls, whose bytes pass through other devices. Where these take little of a step, another
    lowering would be in vain.

    Args:
        seconds: the time of the program.
        goal: what the program would have to take less than.
    """
    straying = _straying_seconds(program.block, program.mesh, hardware)
    return straying > _STRAYS * seconds and seconds - straying < goal


def _straying_seconds(block: Block, mesh: Mesh, hardware: Hardware) -> float:
    slow = hardware.slow_axes(mesh)
    total, moved = 0.0, dict[Value, float]()
    for one in block.instructions:
        total += sum(one.runs * _straying_seconds(body, mesh, hardware) for body in one.bodies)
        if not one.is_collective:
            continue
        axes = axes_of(one)
        takes = hardware.seconds(one.op, wire_of(one, mesh), axes, mesh)
        before = sum(moved.get(value, 0.0) for value in one.inputs)
        waits = takes <= hardware.seconds(one.op, 1.0, axes, mesh)
        if before or waits or one.op == "all_to_all" or not slow.isdisjoint(axes):
            total += before + takes
        moved.update(dict.fromkeys(one.outputs, takes))
    return total


_PRODUCTS = _Switch("products", "joint", True, "one by one", "together")
_MOVES = _Switch("moves", "timed", True, "fewest bytes", "least time")
_Way: TypeAlias = tuple[Choice, tuple[Decision, ...]]  # a choice, and what was decided about it


def _switches(
    program: SpmdProgram, graph: Graph, layout: Layout, options: Options
) -> list[_Switch]:
    """Returns a switch for each choice that the options leave open.

    Args:
        program: the program that is lowered if nothing is decided by time.
    """
    switches: list[_Switch] = []
    if options.bucket_bytes is None:
        switches.append(_Switch("collectives", "apart", True, "joined", "apart"))
    stores = any(rule.scope for rule in layout.rules)
    if stores and options.weights == "auto":
        switches.append(_Switch("weights", "keep", True, "gathered again", "kept"))
    if options.context == "auto" and _splits_memory(graph, layout, program.mesh):
        ways = [way for way in get_args(Context) if way != "auto"]
        switches += [_Switch("context", "context", way, "fewest bytes", way) for way in ways]
    if options.halves == "auto":
        dims = candidates(program)
        switches += [_Switch("halves", "halves", dim, "none", dim) for dim in dims]
    return switches


def _splits_memory(graph: Graph, layout: Layout, mesh: Mesh) -> bool:
    """Whether an attention reads a memory that is split."""
    memories = {op.params["memory"] for op in within(graph) if op.name == "attention"}
    return any(rule.dim in memories and mesh.extent(rule.axes) > 1 for rule in layout.rules)


def fastest(
    name: str, programs: Mapping[str, SpmdProgram], hardware: Hardware, memory: int | None = None
) -> tuple[str, tuple[Decision, ...]]:
    """Returns the fastest of several ways to write a step that fits, and what each other costs.

        fastest("remat", {"none": f.lower(x), "full": g.lower(x)}, hardware("v5p"))

    Of ways that are about equally fast, the one with the least memory is taken. If none fits, that
    is the one with the least memory of all.

    Args:
        name: the subject of the decisions, for reports.
        programs: a program for each way, by its name.
        memory: bytes that a device may use; None: 85 % of those that it has.
    """
    from meshdsl.lowering.costs.simulation import Simulator

    simulator = Simulator(hardware)
    ways = [Alternative(n, simulator.seconds(p), p.peak_bytes) for n, p in programs.items()]
    allowed = ROOM * hardware.memory_bytes if memory is None else memory
    fitting = [way for way in ways if way.peak_bytes <= allowed]
    least = min((way.seconds for way in fitting), default=math.inf)
    enough = [way for way in fitting if way.seconds * (1 - _GAIN) <= least] or ways
    chosen = min(enough, key=lambda way: way.peak_bytes)
    others = [way for way in ways if way is not chosen]
    decisions = (Decision(name, chosen, way, way.peak_bytes <= allowed) for way in others)
    return chosen.name, tuple(decisions)


def small_bytes(hardware: Hardware, mesh: Mesh) -> int:
    """Returns the size of a collective up to which its latency outweighs what it sends."""
    hops = max((size for _, size in mesh.axes), default=1) if hardware.torus else 1
    return round(hops * hardware.latency * hardware.link_bandwidth)
