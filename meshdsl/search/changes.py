"""Changes: what a step becomes if one thing about it is changed, tried and in order.

Advice must not promise what it has not seen. So each change here is lowered and simulated, and has
the figures of the changed step. A change adds a rule to the layout, leaves one out, or sets one
flag. What the layout has already is not tried again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from meshdsl.layouts.hardware import Hardware
from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.lowering.program import SpmdProgram, Value

_LIGHT = 1500  # instructions of a program for which all changes are tried
_LEAST = 4  # changes that are tried of any program
_MOST = 0.98  # of the most bytes that a rule saves: another one that saves these is as good
_RULES, _WITHOUT = 3, 2  # rules that are added and left out at most


@dataclass(frozen=True)
class Change:
    """One change of a step.

    Attributes:
        how: as it is typed: a rule in backquotes, or a flag.
        layout, mesh: those of the step with this change.
        microbatches, remat: the values of these flags with this change; None: as they are.
    """

    how: str
    layout: Layout
    mesh: Mesh
    microbatches: int | None = None
    remat: str | None = None


@dataclass(frozen=True)
class Tried:
    """A step, or one with a change.

    Attributes:
        how: that of the change; empty for the step as it is.
        seconds: the simulated time of the step.
        fits: whether its peak is within the memory of a device.
    """

    how: str
    seconds: float
    peak_bytes: int
    fits: bool


def single_changes(
    program: SpmdProgram, microbatches: Sequence[int] = (), remats: Sequence[str] = ()
) -> Iterator[Change]:
    """Yields changes of a step, the most promising first; those without effect may be among them.

    Args:
        microbatches, remats: the other values that these flags may have.
    """
    layout, mesh = program.layout, program.mesh
    kinds = [
        _added(program, _stored_rules(program)),
        _meshes(program),
        (Change(f"--microbatches={n}", layout, mesh, microbatches=n) for n in microbatches),
        islice(_added(program, _free_rules(program)), _RULES),
        (Change(f"--remat={kind}", layout, mesh, remat=kind) for kind in remats),
        _without(program),
    ]
    while kinds:  # one of each kind, then the next of each
        left = []
        for changes in kinds:
            if (change := next(changes, None)) is not None:
                yield change
                left.append(changes)
        kinds = left


def try_changes(
    program: SpmdProgram,
    changes: Iterable[Change],
    write: Callable[[Change], SpmdProgram],
    hardware: Hardware,
    most: int = 12,
) -> tuple[Tried, ...]:
    """Returns the step as it is, and then each change that can be made, with its figures.

    Of large programs, fewer changes are tried.

    Args:
        write: lowers the step with a change; it raises ValueError if the change cannot be made.
    """
    count = sum(1 for _ in program.block.walk())
    limit = max(_LEAST, min(most, round(most * _LIGHT / max(1, count))))
    tried = [_tried("", program, hardware)]
    for change in changes:
        if len(tried) > limit:
            break
        try:
            tried.append(_tried(change.how, write(change), hardware))
        except ValueError:
            continue
    return tuple(tried)


def _tried(how: str, program: SpmdProgram, hardware: Hardware) -> Tried:
    peak = program.peak_bytes
    return Tried(how, step_seconds(program, hardware), peak, peak <= hardware.memory_bytes)


def _added(program: SpmdProgram, rules: Iterator[Rule]) -> Iterator[Change]:
    """Yields the layout with each rule for what it has no rule for."""
    layout = program.layout
    given = {rule.target for rule in layout.rules}
    for rule in dict.fromkeys(rules):
        if rule.target not in given:
            yield Change(f"`{rule}`", Layout((*layout.rules, rule)), program.mesh)


def _meshes(program: SpmdProgram) -> Iterator[Change]:
    """Yields meshes in which one axis is twice as large, and another half."""
    mesh = program.mesh
    axes = [name for name, _ in mesh.axes if name not in mesh.slow]
    for larger, smaller in itertools.permutations(axes, 2):
        if mesh.sizes[smaller] > 2 and mesh.sizes[smaller] % 2 == 0 and mesh.sizes[larger] > 1:
            sizes = {
                **mesh.sizes,
                larger: mesh.sizes[larger] * 2,
                smaller: mesh.sizes[smaller] // 2,
            }
            changed = Mesh(tuple((name, sizes[name]) for name, _ in mesh.axes), mesh.slow)
            text = str(changed).replace(" ", ",")
            yield Change(f"--mesh_shape={text}", program.layout, changed)


def _without(program: SpmdProgram) -> Iterator[Change]:
    """Yields the layout without each optional or scoped rule: the others are what it is about."""
    layout = program.layout
    chosen = [rule for rule in layout.rules if rule.optional or rule.scope]
    for rule in chosen[:_WITHOUT]:
        rest = tuple(one for one in layout.rules if one is not rule)
        yield Change(f"without `{rule}`", Layout(rest), program.mesh)


def _stored_rules(program: SpmdProgram) -> Iterator[Rule]:
    """Yields rules that store the optimizer's state, then the parameters, in shards.

    Of each, the rule is one that saves most: that of a dim which most of them have. Of several,
    it is the one of the largest dim.
    """
    scanned = _scanned(program)
    for scope in ("optimizer", "params"):
        rows = [
            value
            for value, path in zip(program.block.inputs, program.input_paths, strict=True)
            if scope in path.split("/") and (scope == "optimizer" or "optimizer" not in path)
        ]
        saved: dict[tuple[str, str], float] = {}
        for value in sorted(rows, key=lambda value: -value.bytes):
            for dim, axis in _open(program, value, scanned):
                bytes_off = value.bytes * (1 - 1 / program.mesh.sizes[axis])
                saved[dim, axis] = saved.get((dim, axis), 0.0) + bytes_off
        if saved:
            enough = _MOST * max(saved.values())
            dim, axis = next(pair for pair, bytes_off in saved.items() if bytes_off >= enough)
            yield Rule(scope, dim, (axis,))


def _free_rules(program: SpmdProgram) -> Iterator[Rule]:
    """Yields rules that split what is largest at the peak over axes that it does not use."""
    scanned = _scanned(program)
    for buffer in sorted(program.memory.buffers, key=lambda buffer: -buffer.bytes):
        if not buffer.path:
            for dim, axis in _open(program, buffer.value, scanned):
                yield Rule("", dim, (axis,), True)


def _scanned(program: SpmdProgram) -> set[str]:
    """Returns the dims over which the program has loops."""
    return {one.params["dim"] for one, _ in program.block.walk() if one.op == "scan"}


def _open(
    program: SpmdProgram, value: Value, scanned: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yields pairs of a dim and an axis over which a value could be split further."""
    busy = value.layout.split_axes | set(value.layout.partial_axes)
    if program.pipeline is not None:  # the stages of a pipeline have values of their own
        busy |= set(program.pipeline.axes)
    idle = [axis for axis, size in program.mesh.axes if size > 1 and axis not in busy]
    for axis in sorted(idle, key=lambda axis: -program.mesh.sizes[axis]):
        for dim in sorted(value.shape, key=lambda dim: -dim.size):
            free = not value.layout.axes(dim.name) and dim.name not in scanned
            if free and dim.size % program.mesh.sizes[axis] == 0:
                yield dim.name, axis
