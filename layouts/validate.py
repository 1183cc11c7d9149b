"""Does a layout fit a program on a mesh? Every reason why not, at once, each with its fix.

The rules of `Layout` raise short reasons; here they become what a user needs: the tensor, the line
of the model, the mesh, the layout, and what to write instead.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from meshdsl.dims import Shape, did_you_mean
from meshdsl.layouts.layout import Layout, Rule
from meshdsl.mesh import Mesh
from meshdsl.source import UNKNOWN, Source

LabelledTensor: TypeAlias = tuple[str, Shape, str, Source]  # label, shape, path, source

_MISSPELT = 0.8  # difflib's ratio from which one name is taken for a misspelling of another


class LayoutError(ValueError):
    """A layout does not fit a program; the message lists every problem."""


def check(
    layout: Layout,
    mesh: Mesh,
    tensors: Iterable[LabelledTensor],
    *,
    known_dims: Collection[str],
    allow_unknown_dims: bool = False,
) -> None:
    """Raises one `LayoutError` with everything that `problems` finds, if anything."""
    found = problems(
        layout, mesh, tensors, known_dims=known_dims, allow_unknown_dims=allow_unknown_dims
    )
    _raise(layout, mesh, found)


def check_scopes(layout: Layout, mesh: Mesh, paths: Collection[str]) -> None:
    """Raises one `LayoutError` with every scope that fits none of a program's paths.

    For the program that a whole job is about, such as a training step; others may lack some paths.
    """
    parts = {part for path in paths for part in path.split("/")}
    found = []
    for rule in layout.rules:
        if not any(rule.applies_to(path) for path in paths):
            unknown = [p for p in rule.scope.split("/") if "*" not in p and p not in parts]
            hint = did_you_mean(unknown[0], parts) if unknown else ""
            nearest = difflib.get_close_matches(rule.scope, paths, n=2, cutoff=0) if paths else []
            paths_told = f". Paths look like {' or '.join(f'`{p}`' for p in nearest)}"
            found.append(f"`{rule}` fits no path of this program{hint or paths_told}")
    _raise(layout, mesh, found)


def _raise(layout: Layout, mesh: Mesh, found: Sequence[str]) -> None:
    if not found:
        return
    count = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    lines = [f"layout does not fit this program ({count})", ""]
    for number, problem in enumerate(found, start=1):
        head = f"  {number}. "
        lines.append(head + problem.replace("\n", "\n" + " " * len(head)))
    lines += ["", f"  mesh    {mesh if mesh.axes else 'no axes'}", f"  layout  {layout}"]
    raise LayoutError("\n".join(lines))


def problems(
    layout: Layout,
    mesh: Mesh,
    tensors: Iterable[LabelledTensor],
    *,
    known_dims: Collection[str],
    allow_unknown_dims: bool = False,
) -> list[str]:
    """Returns one text per problem, each problem once, in an order that depends on nothing else.

    Args:
        layout: The rules.
        mesh: The mesh they are for.
        tensors: Every tensor of the program: its label, shape, path ('' if none) and source.
        known_dims: The names of all dims of the program.
        allow_unknown_dims: For layouts that serve several programs: a dim that this program lacks
            is reported only if its name is nearly that of a dim without a rule.
    """
    listed = list(tensors)
    return [
        *_conflicts(layout, listed),
        *_unknown_axes(layout, mesh),
        *_unknown_dims(layout, known_dims, allow_unknown_dims),
    ]


def _conflicts(layout: Layout, tensors: Sequence[LabelledTensor]) -> Iterator[str]:
    found: dict[tuple[str, tuple[Rule, Rule]], list[LabelledTensor]] = {}
    for tensor in tensors:
        for conflict in layout.resolve(tensor[1], tensor[2])[1]:
            found.setdefault((conflict.axis, conflict.rules), []).append(tensor)
    involved = Counter(rule for _, rules in found for rule in rules)

    for (axis, rules), clashes in found.items():
        other = {rules[0]: rules[1], rules[1]: rules[0]}
        # The rule worth making optional still splits something then; better if that settles
        # several conflicts; else it is the later one.
        keeping, yielding = sorted(
            rules,
            key=lambda rule: (_acts_without(layout, tensors, rule, other[rule]), involved[rule]),
        )
        lines = [f"`{rules[0]}` and `{rules[1]}` both claim mesh axis `{axis}` in"]
        lines.append(f"  {_show(clashes[0])}")
        if more := len(clashes) - 1:
            lines.append(f"  and {more} more tensor{'s' if more > 1 else ''}")
        lines.append(
            f"A tensor can use an axis once. Write `{replace(yielding, optional=True)}` to let "
            f"`{yielding.dim}` take it only where `{keeping.dim}` is absent."
        )
        yield "\n".join(lines)


def _unknown_axes(layout: Layout, mesh: Mesh) -> Iterator[str]:
    users: dict[str, list[Rule]] = {}
    for rule in layout.rules:
        for axis in rule.axes:
            if axis not in mesh.sizes:
                users.setdefault(axis, []).append(rule)
    has = "has " + ", ".join(f"`{name}`" for name in mesh.names) if mesh.axes else "has no axes"
    for axis, rules in users.items():
        advice = did_you_mean(axis, mesh.names) or "."
        yield f"{_names(rules)} mesh axis `{axis}`, but the mesh {has}{advice}"


def _unknown_dims(layout: Layout, known: Collection[str], allow: bool) -> Iterator[str]:
    users: dict[str, list[Rule]] = {}
    for rule in layout.rules:
        if rule.dim not in known:
            users.setdefault(rule.dim, []).append(rule)
    # A dim with a rule of its own is not what another rule's name was meant to be.
    unruled = set(known) - {rule.dim for rule in layout.rules}
    for dim, rules in users.items():
        if not allow or difflib.get_close_matches(dim, unruled, n=1, cutoff=_MISSPELT):
            advice = did_you_mean(dim, unruled if allow else known)
            own = [name for name in sorted(known) if not name.endswith("_")]  # not an operation's
            listed = ", ".join(f"`{name}`" for name in own) or "none"
            advice = advice or f". Its dims: {listed}."
            yield f"{_names(rules)} a dim that this program does not have{advice}"


def _acts_without(
    layout: Layout, tensors: Iterable[LabelledTensor], rule: Rule, other: Rule
) -> bool:
    """Returns whether `rule` decides about some tensor in which the dim of `other` is absent."""
    return any(
        shape.find(rule.dim) is not None
        and shape.find(other.dim) is None
        and layout.rule_for(rule.dim, path) == rule
        for _, shape, path, _ in tensors
    )


def _show(tensor: LabelledTensor) -> str:
    label, shape, _, source = tensor
    named = f"{label}: {shape}" if label else str(shape)
    return f"{named}      {_place(source)}  {source.code}".rstrip()


def _place(source: Source) -> str:
    return "" if source == UNKNOWN else str(source)


def _names(rules: Sequence[Rule]) -> str:
    """Returns the rules with their verb: `a:x`, `b:x` and `c:x` name."""
    *rest, last = [f"`{rule}`" for rule in rules]
    return f"{', '.join(rest)} and {last} name" if rest else f"{last} names"
