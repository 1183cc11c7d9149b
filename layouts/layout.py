"""Layout: which dims are split over which mesh axes, as one line of text.

    layout := rule (";" rule)*            axes  := "-" | axis ("+" axis)*
    rule   := [scope "/"] dim ":" axes ["?"]

`heads:model` splits every dim `heads` over axis `model`; `-` leaves a dim unsplit; several axes are
major first; `?` takes only the axes that are free in the tensor; a scope confines a rule to the
tensors whose path contains its components in a row.

The layout of a tensor is a pure function of its dim names, its path, and which of its dims have
size 1: these are not split. It does not depend on other sizes, on the order of the dims, or on the
rest of the program. If several optional rules claim one axis, the first of them gets it. Among
scopes that are equally long, the first decides; but it is an error if such scopes disagree about a
tensor of a program (`layouts.validate`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import TypeAlias

from meshdsl.late import late
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.tensor_layout import TensorLayout
from meshdsl.tensors.dims import Shape, did_you_mean

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PART = r"[^\s;,:/]+"
_RULE = re.compile(
    rf"(?:(?P<scope>{_PART}(?:/{_PART})*)/)?(?P<dim>{_NAME})"
    rf":(?P<axes>-|{_NAME}(?:\+{_NAME})*)(?P<optional>\??)"
)
_WILDCARD = re.compile(r"[*?[]")
_KINDS = frozenset(["gradients", "optimizer"])


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.

    Attributes:
        scope: the scope; '' if there is none.
        dim: the name of the dim.
        axes: the axes, major first; none for `-`.
        optional: whether it takes only axes that are free.

    Raises:
        ValueError: a part is not of the grammar's form, or an axis is named twice.
    """

    scope: str
    dim: str
    axes: tuple[str, ...]
    optional: bool = False

    def __post_init__(self) -> None:
        if _read(str(self)) != (self.scope, self.dim, self.axes, self.optional):
            raise ValueError(_malformed(str(self)))
        if len(set(self.axes)) < len(self.axes):
            axis = next(axis for axis, times in Counter(self.axes).items() if times > 1)
            raise ValueError(f"`{self}` names axis `{axis}` twice")

    @staticmethod
    def parse(text: str) -> Rule:
        """Reads one rule, such as `params/embed:slice+data?`; errors as in `Rule`."""
        return Rule(*_read(text))

    @property
    def target(self) -> str:
        """The scope and the dim: `params/embed`."""
        return f"{self.scope}/{self.dim}" if self.scope else self.dim

    @property
    def specificity(self) -> tuple[bool, int, bool, int]:
        """The rank of the scope among the scopes that apply to a path; the greatest decides.

        Scopes are compared by their number of components; then by whether they name gradients or
        optimizer state, whose paths contain those of parameters; then by their number of components
        without wildcards.
        """
        components = [part for part in self.scope.split("/") if part not in ("", "**")]
        literal = [part for part in components if not _WILDCARD.search(part)]
        return self.scope != "", len(components), not _KINDS.isdisjoint(literal), len(literal)

    def applies_to(self, path: str) -> bool:
        """Returns whether the scope's components occur in a row in `path`.

        >>> Rule.parse("params/*/embed:data").applies_to("state/params/mlp/w_in")
        True
        """
        return matches(self.scope, path)

    def __str__(self) -> str:
        return f"{self.target}:{'+'.join(self.axes) or '-'}{'?' if self.optional else ''}"


class LayoutConflict(ValueError):
    """Two rules, neither of them optional, claim one axis for two dims of a tensor."""

    def __init__(self, axis: str, rules: tuple[Rule, Rule]) -> None:
        super().__init__(axis, rules)
        self.axis = axis
        self.rules = rules

    def __str__(self) -> str:
        first, second = self.rules
        return (
            f"`{first}` and `{second}` both claim mesh axis `{self.axis}`. A tensor can use "
            f"an axis once: end one of them with `?` to let it take the axis only where it is free"
        )


_Claim: TypeAlias = tuple[str, tuple[Rule, Rule]]


@dataclass(frozen=True)
class Layout:
    """The rules in the order written; prints as the text that `Layout.parse` reads.

    Raises:
        ValueError: two rules for one dim in one scope.

    Examples:
        >>> layout = md.Layout.parse("batch:data; heads:model; length:model?")
        >>> print(layout.assign(md.Shape(md.dims(batch=8, length=16))))
        batch:data; length:model
        >>> print(layout.assign(md.Shape(md.dims(batch=8, length=16, heads=4))))
        batch:data; heads:model
    """

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        first: dict[str, Rule] = {}
        for rule in self.rules:
            if rule.target in first:
                raise ValueError(_twice(first[rule.target], rule))
            first[rule.target] = rule

    @staticmethod
    def parse(text: str) -> Layout:
        """Reads `batch:data; length:model?; params/embed:data`; `;`, `,` and spaces all separate.

        Raises:
            ValueError: malformed rules and dims given twice, all of them, with their positions.
        """
        rules: list[Rule] = []
        reasons: list[str] = []
        marked: list[re.Match[str]] = []
        first: dict[str, tuple[Rule, re.Match[str]]] = {}
        for part in re.finditer(r"[^;,\s]+", text):
            try:
                rule = Rule.parse(part.group())
            except ValueError as error:
                reasons.append(str(error))
                marked.append(part)
                continue
            first_rule, first_part = first.setdefault(rule.target, (rule, part))
            if first_part is not part:
                reasons.append(_twice(first_rule, rule))
                marked += [first_part, part]
            rules.append(rule)
        if reasons:
            raise ValueError("\n  ".join(["malformed layout", *_mark(text, marked), *reasons]))
        return Layout(tuple(rules))

    @staticmethod
    def of(layout: LayoutLike | None) -> Layout:
        """Returns the layout that is meant: `Layout.of({"batch": "data"})`.

        Args:
            layout: a layout, its text, the axes by dim, or None: no rules. Axes are written as in
                the text ("slice+data", "model?", "-"), or listed, major first; None is "-".

        Raises:
            ValueError: it is something else, or malformed.
        """
        if isinstance(layout, Layout):
            return layout
        if layout is None:
            return Layout()
        if isinstance(layout, str):
            return Layout.parse(layout)
        if not isinstance(layout, Mapping):
            raise ValueError(
                'a layout is given as "batch:data; d_ff:model", as {"batch": "data", "d_ff": '
                f'"model"}}, or as a md.Layout, not as {type(layout).__name__}: {layout!r}'
            )
        return Layout.parse("; ".join(f"{dim}:{_axes(axes)}" for dim, axes in layout.items()))

    def assign(self, shape: Shape, path: str = "", mesh: Mesh | None = None) -> TensorLayout:
        """Returns the layout of a tensor: a pure function of its dims and its path.

        For each dim, the most specific scoped rule that applies decides; if there is none, the rule
        without a scope; else the dim is not split. Optional rules come last, in the order written,
        and get those of their axes that split no other dim of the tensor. A dim of size 1 is not
        split: one device would have its position and all others padding.

        Args:
            shape: The tensor's dims; their order and sizes above 1 do not matter.
            path: The tensor's name, as in `state/params/mlp/w_in`; empty for a value inside the
                program, to which only the scope `**` applies.
            mesh: If given, it must have the axes; it does not change the result.

        Raises:
            LayoutConflict: two dims claim one axis, neither with `?`.
            ValueError: an axis is not on `mesh`.
        """
        layout, conflicts = self._resolve(shape, path)
        if conflicts:
            raise LayoutConflict(*conflicts[0])
        if mesh is not None:
            for axis in sorted(layout.split_axes - mesh.sizes.keys()):
                raise ValueError(
                    f"no axis `{axis}` in mesh `{mesh}`{did_you_mean(axis, mesh.names)}"
                )
        return layout

    def resolve(self, shape: Shape, path: str = "") -> tuple[TensorLayout, list[LayoutConflict]]:
        """Returns the layout of a tensor as `assign` does, and the conflicts instead of an error.

        If several rules claim an axis, the first of them gets it.
        """
        layout, conflicts = self._resolve(shape, path)
        return layout, [LayoutConflict(*conflict) for conflict in conflicts]

    def on(self, mesh: Mesh) -> Layout:
        """Returns the rules without the axes that have size 1 on a mesh; itself if it has none.

        To split over such an axis is the identity, so lowering must not see it: it would keep
        values apart that are the same. Rules for a dim that none of them splits are left out.

        Examples:
            >>> layout = Layout.parse("batch:slice+data; heads:model; params/heads:data")
            >>> print(layout.on(Mesh.parse("slice:1,data:4,model:1")))
            batch:data; heads:-; params/heads:data
        """
        unsplit = {axis for axis, size in mesh.axes if size == 1}
        if unsplit.isdisjoint(axis for rule in self.rules for axis in rule.axes):
            return self
        rules = [
            replace(rule, axes=tuple(axis for axis in rule.axes if axis not in unsplit))
            for rule in self.rules
        ]
        split = {rule.dim for rule in rules if rule.axes}
        return Layout(tuple(rule for rule in rules if rule.dim in split))

    def inside(self, shape: Shape) -> TensorLayout:
        """Returns the layout of a value inside a program, which has no path.

        `validate` has checked that such values have no conflicts. Only an input of the program may
        have one here, if scoped rules prevent it at the input's path. Then the first of the rules
        that claim an axis gets it.
        """
        known = self._inside.get(shape)
        if known is None:
            known = self._inside[shape] = self._resolve(shape, "")[0]
        return known

    def rule_for(self, dim: str, path: str = "") -> Rule | None:
        """Returns the rule that decides about `dim` in the tensor at `path`, or None."""
        if (dim, path) not in self._deciding:
            applying = (r for r in self._candidates(dim, path) if r.applies_to(path))
            self._deciding[dim, path] = next(applying, None)
        return self._deciding[dim, path]

    def rules_for(self, dim: str, path: str = "") -> list[Rule]:
        """Returns the most specific rules for a dim of the tensor at `path`, all equally specific.

        `rule_for` returns the first of them. If others have other axes, the layout contradicts
        itself.
        """
        applying = [r for r in self._candidates(dim, path) if r.applies_to(path)]
        return [rule for rule in applying if rule.specificity == applying[0].specificity]

    def applying(self, paths: Iterable[str]) -> set[Rule]:
        """Returns the rules whose scopes apply to some of the paths."""
        applying: set[Rule] = set()
        for path in paths:
            if len(applying) == len(self._written):  # as soon as each has one
                break
            parts = {"", *path.split("/")}
            for by_part in self._by_part.values():
                for part in parts & by_part.keys():
                    rules = [rule for _, rule in by_part[part] if rule not in applying]
                    applying.update(rule for rule in rules if rule.applies_to(path))
        return applying

    def _resolve(self, shape: Shape, path: str) -> tuple[TensorLayout, tuple[_Claim, ...]]:
        known = self._resolved.get((shape, path))
        if known is not None:
            return known
        rules = tuple([self.rule_for(dim.name, path) for dim in shape if dim.size != 1])
        if rules not in self._joined:
            self._joined[rules] = self._join(rules)
        self._resolved[shape, path] = self._joined[rules]
        return self._joined[rules]

    def _join(self, rules: Iterable[Rule | None]) -> tuple[TensorLayout, tuple[_Claim, ...]]:
        """Returns the layout of a tensor about whose dims these rules decide, and conflicts."""
        rule_of: dict[str, Rule] = {}  # by axis
        splits: dict[str, list[str]] = {}
        conflicts: list[_Claim] = []
        deciding = {rule for rule in rules if rule is not None}
        for rule in sorted(deciding, key=lambda rule: (rule.optional, self._written[rule])):
            if not rule.optional:
                claimed = [axis for axis in rule.axes if axis in rule_of]
                conflicts += [(axis, (rule_of[axis], rule)) for axis in claimed]
            splits[rule.dim] = [axis for axis in rule.axes if axis not in rule_of]
            rule_of.update(dict.fromkeys(splits[rule.dim], rule))
        return TensorLayout.of(splits), tuple(conflicts)

    @cached_property
    def _resolved(self) -> dict[tuple[Shape, str], tuple[TensorLayout, tuple[_Claim, ...]]]:
        # A program asks about thousands of tensors that share few combinations of dims and path.
        return {}

    @cached_property
    def _joined(self) -> dict[tuple[Rule | None, ...], tuple[TensorLayout, tuple[_Claim, ...]]]:
        # Thousands of paths share few combinations of rules.
        return {}

    @cached_property
    def _inside(self) -> dict[Shape, TensorLayout]:
        # Lowering asks about most tensors some ten times.
        return {}

    @cached_property
    def _deciding(self) -> dict[tuple[str, str], Rule | None]:
        return {}

    @cached_property
    def _written(self) -> dict[Rule, int]:
        """The number of each rule, in the order written."""
        return {rule: number for number, rule in enumerate(self.rules)}

    def _candidates(self, dim: str, path: str) -> list[Rule]:
        """Returns the rules that may decide about a dim at a path, the most specific first."""
        by_part = self._by_part.get(dim)
        if by_part is None:
            return []
        ranked = [row for part in {"", *path.split("/")} for row in by_part.get(part, ())]
        return [rule for _, rule in sorted(ranked, key=lambda row: row[0])]

    @cached_property
    def _by_part(self) -> dict[str, dict[str, list[tuple[int, Rule]]]]:
        """For each dim, its rules with their ranks, by a component that their paths must have.

        That component of the scope has no wildcard and occurs in the fewest scopes; "" if all have
        wildcards. So a path is compared with few rules, even if the layout has a rule for each of
        thousands of parameters.
        """
        ranked = sorted(self.rules, key=lambda rule: rule.specificity, reverse=True)
        literal = [
            [part for part in rule.scope.split("/") if part and not _WILDCARD.search(part)]
            for rule in ranked
        ]
        times = Counter(part for parts in literal for part in parts)
        by_part: dict[str, dict[str, list[tuple[int, Rule]]]] = {}
        for rank, (rule, parts) in enumerate(zip(ranked, literal, strict=True)):
            part = min(parts, key=lambda part: times[part], default="")
            by_part.setdefault(rule.dim, {}).setdefault(part, []).append((rank, rule))
        return by_part

    def __str__(self) -> str:
        return "; ".join(map(str, self.rules))

    def _repr_html_(self) -> str | None:
        """Returns the rules for notebooks, each with what it does."""
        return late("value in a notebook")(self)


LayoutLike: TypeAlias = Layout | str | Mapping[str, str | Sequence[str] | None]


def _axes(axes: str | Sequence[str] | None) -> str:
    """Returns the axes of a dim as a rule spells them."""
    return axes if isinstance(axes, str) else "+".join(map(str, axes or ())) or "-"


def _read(text: str) -> tuple[str, str, tuple[str, ...], bool]:
    """Returns the fields of the rule that `text` spells."""
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(_malformed(text))
    axes = () if match["axes"] == "-" else tuple(match["axes"].split("+"))
    return match["scope"] or "", match["dim"], axes, match["optional"] == "?"


def _malformed(text: str) -> str:
    return f"`{text}` is not of the form `dim:axis`, `dim:axis+axis?`, `dim:-` or `scope/dim:axis`"


def _twice(first: Rule, second: Rule) -> str:
    return f"`{first.target}` is given twice: `{first}` and `{second}`"


def _mark(text: str, parts: Sequence[re.Match[str]]) -> tuple[str, str]:
    """Returns the text as one line, and a line of carets under `parts`."""
    carets = [" "] * len(text)
    for part in parts:
        carets[part.start() : part.end()] = "^" * len(part.group())
    return re.sub(r"\s", " ", text).rstrip(), "".join(carets).rstrip()


def matches(scope: str, path: str) -> bool:
    """Returns whether the components of a glob occur in a row in a path; "" occurs in every path.

    The glob is run as an automaton: state i means that its first i components other than `**` have
    been matched. So a component of the path is compared at most once with each component of the
    glob, whatever the number of `**`.
    """
    if not scope:
        return True
    wanted: list[str] = []
    after_gap = {0}  # states in which any components may come before the next wanted component
    for part in scope.split("/"):
        if part == "**":
            after_gap.add(len(wanted))
        else:
            wanted.append(part)
    states = {0}
    for component in path.split("/") if path else ():
        if len(wanted) in states:
            return True
        advanced = {i + 1 for i in states if fnmatchcase(component, wanted[i])}
        states = (states & after_gap) | advanced
    return len(wanted) in states
