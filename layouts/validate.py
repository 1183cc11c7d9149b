"""Validate: all reasons why a layout does not fit a program on a mesh, each with its fix.

`Layout` raises short reasons. This module adds the tensor, the line of the model, the mesh, the
layout, and the text to write instead.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from meshdsl.layouts.layout import Layout, Rule
from meshdsl.layouts.mesh import Mesh
from meshdsl.tensors.dims import Shape, did_you_mean
from meshdsl.tracing.source import UNKNOWN, Source

LabelledTensor: TypeAlias = tuple[str, Shape, str, Source]  # label, shape, path, source

_WILD = re.compile(r"[*?[]")
_PARAMS = "params"  # as in `mirrors`
_MISSPELT = 0.8  # a name with at least this ratio of difflib to another is a misspelling of it
_OF_STACKS = "layers"  # the dim of the layers of a model, by which a pipeline divides them


class LayoutError(ValueError):
    """A layout does not fit a program; the message lists every problem."""


class LayoutWarning(UserWarning):
    """A part of a layout has no effect on a program."""


class ScopeWarning(LayoutWarning):
    """A scope applies to no path of a program, and is misspelt or meant for other arguments."""


def check(
    layout: Layout,
    mesh: Mesh,
    tensors: Iterable[LabelledTensor],
    *,
    known_dims: Collection[str],
    allow_unknown_dims: bool = False,
    mesh_given: bool = True,
) -> None:
    """Raises one `LayoutError` with all problems, if there are any; arguments as in `problems`.

    Args:
        mesh_given: False for a layout without a mesh; then `mesh` is a mesh of the layout's axes.
    """
    texts = problems(
        layout, mesh, tensors, known_dims=known_dims, allow_unknown_dims=allow_unknown_dims
    )
    _raise(layout, mesh, texts, mesh_given)


def check_scopes(layout: Layout, mesh: Mesh, paths: Collection[str]) -> None:
    """Raises one `LayoutError` with every scope that applies to none of a program's paths.

    It is meant for the main program of a job, such as a training step; others may lack some paths.
    """
    texts = []
    known = _parts(paths)
    for rule in not_applying(layout, paths):
        hint = _corrected(rule, paths, known)
        nearest = [f"`{path}`" for path in _nearest(rule, paths)]
        listed = f" The nearest paths: {' and '.join(nearest)}" if nearest else ""
        texts.append(f"`{rule}` fits no path of this program{hint or '.'}{listed}")
    _raise(layout, mesh, texts)


def misspelt_scopes(layout: Layout, paths: Collection[str]) -> dict[Rule, str]:
    """Returns a text for each rule whose scope is misspelt: it nearly applies to a program's path.

    Other rules that apply to no path are not reported: they may be for another program with the
    same layout.
    """
    named = {part for rule in layout.rules for part in rule.scope.split("/")}
    known = _parts(paths)
    texts = {}
    for rule in not_applying(layout, paths):
        hint = _corrected(rule, paths, known, known - named, _MISSPELT)
        if hint.endswith("?"):
            texts[rule] = f"`{rule}` fits no path of this program{hint}"
    return texts


def scopes_of_other_arguments(
    layout: Layout,
    paths: Collection[str],
    inputs: Mapping[str, Shape],
    name: str,
    renewed: Collection[str],
) -> dict[Rule, str]:
    """Returns a text for each rule whose scope fits no path, but may be meant for other arguments.

    In a training step these are rules that could split what it returns anew, and rules that begin
    with one of its arguments. In other programs they are rules for `params` that could split a
    tree, if no path has `params`. All others may be for another program with the same layout.

    Args:
        layout: The rules.
        paths: All paths of the program that scopes apply to.
        inputs: The shapes of the arguments' leaves, by path.
        name: The program's.
        renewed: The arguments that it returns anew if it is a training step; empty if it is none.
    """
    if not renewed and any(_PARAMS in path.split("/") for path in paths):
        return {}  # the parameters are there: the rule is for some that this program lacks
    likely_ones = renewed or {path.split("/")[0] for path in inputs if "/" in path}
    candidates = {path: inputs[path] for path in inputs if path.split("/")[0] in likely_ones}
    arguments = dict.fromkeys(path.split("/")[0] for path in inputs)
    texts = {}
    for rule in not_applying(layout, paths):
        parts = rule.scope.split("/")
        if not rule.axes or not (renewed or _PARAMS in parts):
            continue
        likely = _renamed(rule, layout, candidates)
        if len(likely) == 1:
            hint = f"Did you mean `{likely[0]}`?"
        elif likely:
            hint = f"Did you mean {_list(likely, 'or')}?"
        elif renewed and parts[0] in arguments:
            nearest = _list(_nearest(rule, list(inputs)), "and")
            hint = f"The nearest paths: {nearest}. Correct the scope, or leave the rule out"
        else:
            continue
        has = f"`{name}` has the arguments {_list(arguments, 'and')}"
        texts[rule] = f"`{rule}` fits no path of this program: {has}. {hint}"
    return texts


def _renamed(rule: Rule, layout: Layout, inputs: Mapping[str, Shape]) -> list[Rule]:
    """Returns the rule with other arguments in place of its scope's first component.

    Each could split a leaf of that argument whose axes no other rule claims.
    """
    _, _, rest = rule.scope.partition("/")
    renamed: dict[Rule, None] = {}
    for path, shape in inputs.items():
        argument = path.split("/")[0]
        other = replace(rule, scope=f"{argument}/{rest}" if rest else argument)
        if other in renamed or shape.find(rule.dim) is None or not other.applies_to(path):
            continue
        claimed = layout.resolve(shape, path)[0]
        if not any(claimed.dim_of(axis) for axis in rule.axes):
            renamed[other] = None
    return list(renamed)


def idle_rules(layout: Layout, tensors: Iterable[LabelledTensor]) -> list[str]:
    """Returns one text per optional rule that never gets an axis, with the rules that get it.

    A rule that decides about no tensor is not reported: it may be for another program.
    """
    optional = [rule for rule in layout.rules if rule.optional]
    if not optional:
        return []
    holders: dict[Rule, dict[Rule | None, None]] = {rule: {} for rule in optional}
    applied, seen = set(), set()
    for _, shape, path, _ in tensors:
        names = frozenset(shape.names)
        if (names, path) in seen:
            continue
        seen.add((names, path))
        tensor_layout = layout.resolve(shape, path)[0]
        for rule in optional:
            if rule.dim not in names or layout.rule_for(rule.dim, path) != rule:
                continue
            if tensor_layout.axes(rule.dim):
                applied.add(rule)
            for axis in rule.axes:
                dim = tensor_layout.dim_of(axis)
                holder = layout.rule_for(dim, path) if dim else None
                if holder not in (None, rule):
                    holders[rule][holder] = None
    return [
        f"`{rule}` takes no axis anywhere: wherever it would, {_list(others, 'or')} has it "
        f"already. Leave the rule out, or give `{rule.dim}` an axis that is free"
        for rule, others in holders.items()
        if others and rule not in applied
    ]


def not_applying(layout: Layout, paths: Collection[str]) -> list[Rule]:
    """Returns the rules whose scopes apply to none of the paths."""
    applying = layout.applying(paths)
    return [rule for rule in layout.rules if rule not in applying]


def _parts(paths: Collection[str]) -> set[str]:
    return {part for path in paths for part in path.split("/")}


def _corrected(
    rule: Rule,
    paths: Collection[str],
    parts: Collection[str],
    among: Collection[str] | None = None,
    cutoff: float = 0.7,
) -> str:
    """Returns `. Did you mean ...?` with a rule like `rule` that applies to some path, or ''."""
    words = rule.scope.split("/")
    mirrors = _PARAMS in parts and all(word in parts for word in words)
    # Paths of trees that mirror the parameters have `params` inside, which a scope may lack.
    for position in range(1, len(words) if mirrors else 0):
        longer = replace(rule, scope="/".join([*words[:position], _PARAMS, *words[position:]]))
        if any(longer.applies_to(path) for path in paths):
            return f". Did you mean `{longer}`?"
    scope = []
    for part in words:
        known = part in parts or bool(_WILD.search(part))
        candidates = parts if among is None else among
        near = difflib.get_close_matches(part, candidates, n=1, cutoff=cutoff)
        if not known and not near:
            return ""
        scope.append(part if known else near[0])
    corrected = replace(rule, scope="/".join(scope))
    fits = corrected != rule and any(corrected.applies_to(path) for path in paths)
    return f". Did you mean `{corrected}`?" if fits else ""


def _nearest(rule: Rule, paths: Collection[str], count: int = 2) -> list[str]:
    """Returns the paths with consecutive components that are most like a rule's scope."""
    length = rule.scope.count("/") + 1

    def likeness(path: str) -> float:
        parts = path.split("/")
        rows = ["/".join(parts[i : i + length]) for i in range(max(1, len(parts) - length + 1))]
        return max(difflib.SequenceMatcher(None, rule.scope, row).ratio() for row in rows)

    return sorted(paths, key=lambda path: (-likeness(path), len(path)))[:count]


def _raise(layout: Layout, mesh: Mesh, texts: Sequence[str], mesh_given: bool = True) -> None:
    if not texts:
        return
    count = "1 problem" if len(texts) == 1 else f"{len(texts)} problems"
    lines = [f"layout does not fit this program ({count})", ""]
    for number, problem in enumerate(texts, start=1):
        head = f"  {number}. "
        lines.append(head + problem.replace("\n", "\n" + " " * len(head)))
    shown = (str(mesh) or "no axes") if mesh_given else "none given"
    lines += ["", f"  mesh    {shown}", f"  layout  {layout}"]
    raise LayoutError("\n".join(lines))


def problems(
    layout: Layout,
    mesh: Mesh,
    tensors: Iterable[LabelledTensor],
    *,
    known_dims: Collection[str],
    allow_unknown_dims: bool = False,
) -> list[str]:
    """Returns one text per problem, each problem once, in the order of the rules and tensors.

    Args:
        layout: The rules.
        mesh: The mesh that the rules are for.
        tensors: Every tensor of the program: its label, shape, path ('' if none) and source.
        known_dims: The names of all dims of the program.
        allow_unknown_dims: For layouts of several programs: a dim that this program lacks is
            reported only if its name is nearly that of a dim without a rule.
    """
    listed = list(tensors)
    return [
        *_conflicts(layout, listed),
        *_contradictions(layout, listed),
        *_unknown_axes(layout, mesh),
        *_unknown_dims(layout, known_dims, allow_unknown_dims),
    ]


def _conflicts(layout: Layout, tensors: Sequence[LabelledTensor]) -> Iterator[str]:
    conflicts: dict[tuple[str, tuple[Rule, Rule]], list[LabelledTensor]] = {}
    free: set[tuple[Shape, str]] = set()  # most tensors inside a program share few shapes
    for tensor in tensors:
        if (tensor[1], tensor[2]) in free:
            continue
        found = layout.resolve(tensor[1], tensor[2])[1]
        if not found:
            free.add((tensor[1], tensor[2]))
        for conflict in found:
            conflicts.setdefault((conflict.axis, conflict.rules), []).append(tensor)
    involved = Counter(rule for _, rules in conflicts for rule in rules)

    for (axis, rules), clashes in conflicts.items():
        other = {rules[0]: rules[1], rules[1]: rules[0]}
        # Advise to make the rule optional that still splits a tensor then. If both do, it is the
        # rule in more conflicts; else the later one.
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
        lines += _of_mirror(rules, [path for _, _, path, _ in clashes], tensors)
        yield "\n".join(lines)


def _of_mirror(
    rules: Sequence[Rule], clashing: Sequence[str], tensors: Sequence[LabelledTensor]
) -> Iterator[str]:
    """Yields why a rule for parameters applies to a tree that mirrors them, and how to avoid it."""
    paths = {path for _, _, path, _ in tensors}
    for path in clashing:
        before, _, rest = path.partition(f"/{_PARAMS}/")
        of_params = [rule for rule in rules if rule.scope.split("/")[0] == _PARAMS]
        if rest and f"{_PARAMS}/{rest}" in paths and len(of_params) == 1:
            own = replace(of_params[0], scope=f"{before}/{_PARAMS}", axes=(), optional=False)
            yield (
                f"`{before}` has the structure of `{_PARAMS}`, so `{_PARAMS}` is put into its "
                f"paths and rules for `{_PARAMS}` apply\nto it too. Write `{own}` to keep "
                f"`{of_params[0]}` off it."
            )
            return


def _contradictions(layout: Layout, tensors: Sequence[LabelledTensor]) -> Iterator[str]:
    """Yields scoped rules that are equally specific for a tensor, and have different axes."""
    contradictions: dict[tuple[Rule, Rule], list[str]] = {}
    times = Counter(rule.dim for rule in layout.rules if rule.scope)
    scoped = {dim for dim, count in times.items() if count > 1}
    for _, shape, path, _ in tensors:
        for name in shape.names if path else ():
            if name in scoped:
                for other in (equal := layout.rules_for(name, path))[1:]:
                    if (other.axes, other.optional) != (equal[0].axes, equal[0].optional):
                        contradictions.setdefault((equal[0], other), []).append(path)
    for (first, other), paths in contradictions.items():
        unique = list(dict.fromkeys(paths))
        more = f" and {len(unique) - 1} more" if len(unique) > 1 else ""
        yield (
            f"`{first}` and `{other}` contradict each other: both scopes describe\n"
            f"  {unique[0]}{more}\n"
            f"and neither is longer. Lengthen the one that is to decide{_longer(other, unique[0])}."
        )


def _longer(rule: Rule, path: str) -> str:
    """Returns `, as in ...`: the rule with one more component of the path before its scope."""
    parts, scope = path.split("/"), rule.scope.split("/")
    for start in range(1, len(parts)):
        if parts[start : start + len(scope)] == scope:
            longer = "/".join(parts[start - 1 : start + len(scope)])
            return f", as in `{replace(rule, scope=longer)}`"
    return ""


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
    # A dim that has a rule is not the dim that a misspelt rule was meant for.
    unruled = set(known) - {rule.dim for rule in layout.rules}
    for dim, rules in users.items():
        if not allow or difflib.get_close_matches(dim, unruled, n=1, cutoff=_MISSPELT):
            # Names of dims that operations add end with `_`.
            own = [name for name in sorted(known) if not name.endswith("_")]
            listed = ", ".join(f"`{name}`" for name in own) or "none"
            advice = _of_attention(dim, known)
            if not advice:
                advice = did_you_mean(dim, unruled if allow else known)
            if not advice.endswith("?"):
                advice += f". Its dims: {listed}."
            if dim == _OF_STACKS:
                advice += f' A loop over its layers, md.scan(..., dim="{dim}"), gives it this dim.'
            yield f"{_names(rules)} a dim that this program does not have{advice}"


def _of_attention(dim: str, known: Collection[str]) -> str:
    """Returns the advice for a rule for the memory of attention that the model does not name."""
    length = dim.removeprefix("memory_")
    if length == dim or length not in known:
        return ""
    return (
        f": attention, if it has any, has to name the keys' and values' `{length}` apart from the "
        f"queries', as in "
        f'md.attention(q, k.rename({length}="{dim}"), v.rename({length}="{dim}"), '
        f'over="{dim}")'
    )


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
    return f"{named}      {_line(source)}  {source.code}".rstrip()


def _line(source: Source) -> str:
    return "" if source == UNKNOWN else str(source)


def _list(rules: Iterable[object], word: str) -> str:
    """Returns `a`, `b` and `c`."""
    *rest, last = [f"`{rule}`" for rule in rules]
    return f"{', '.join(rest)} {word} {last}" if rest else last


def _names(rules: Sequence[Rule]) -> str:
    """Returns the rules with their verb: `a:x`, `b:x` and `c:x` name."""
    return f"{_list(rules, 'and')} name{'s' if len(rules) == 1 else ''}"
