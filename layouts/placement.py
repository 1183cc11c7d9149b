"""Placement: where every tensor of a program is, as data.

A layout is rules; a placement is what follows from them, tensor by tensor. It prints as text, one
line for each tensor, reads back from that text, and `lowering.lower` takes it, whole or in part:

    in   state/params/w_in                  embed:data; d_ff:model
    out  state/params/w_in                  embed:data; d_ff:model
         state/params/w_in                  d_ff:model
         mlp/h.einsum                       batch:data; d_ff:model
         mlp/y.multiply                     batch:data (partial over model)

Inputs and outputs are called by their paths (`in`, `out`), and so is what is read of an input
inside of the program, which may be elsewhere. All other tensors are called by who makes them (see
`lowering.placement.identity`). A tensor that is partial over an axis stays a partial sum over it;
where it becomes whole, it has the layout that stands before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from meshdsl.layouts.tensor_layout import TensorLayout

_LAYOUT = r"(?:replicated|\w+:[\w+-]+)(?:[;,\s]+\w+:[\w+-]+)*"
_LINE = re.compile(
    rf"(?:(?P<role>in|out)\s+)?(?P<name>\S.*?)\s+(?P<layout>{_LAYOUT})"
    r"(?:\s*\(partial over (?P<partial>\w+(?:,\s*\w+)*)\))?"
)


@dataclass(frozen=True)
class Placement:
    """Layouts by the names of tensors; where a placement is given, any of them may be missing.

    A layout may be given as its text: `Placement(tensors={"mlp/h.tanh": "batch:data"})`.

    Attributes:
        inputs, outputs: where the program takes and leaves what has these paths.
        tensors: where tensors are inside of the program.
        partial: of some of these, the axes over which they stay partial sums; others are whole.
    """

    inputs: Mapping[str, TensorLayout] = field(default_factory=dict)
    outputs: Mapping[str, TensorLayout] = field(default_factory=dict)
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    partial: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for field_ in ("inputs", "outputs", "tensors"):
            layouts = {name: _layout(at, name) for name, at in getattr(self, field_).items()}
            object.__setattr__(self, field_, layouts)
        partial = {
            name: frozenset([axes] if isinstance(axes, str) else axes)
            for name, axes in self.partial.items()
        }
        object.__setattr__(self, "partial", partial)

    @staticmethod
    def of(placement: PlacementLike) -> Placement:
        """Returns the placement that is meant: itself, or what its text says.

        Raises:
            ValueError: it is something else, or malformed.
        """
        if isinstance(placement, Placement):
            return placement
        if isinstance(placement, str):
            return Placement.parse(placement)
        raise ValueError(
            "a placement is given as md.Placement(...), or as its text, not as "
            f"{type(placement).__name__}: {placement!r}"
        )

    @staticmethod
    def parse(text: str) -> Placement:
        """Reads what `str(placement)` gives; empty lines and what follows `#` are left out.

        Raises:
            ValueError: lines are malformed, or name a tensor twice; all of them, with numbers.
        """
        layouts: dict[str, dict[str, TensorLayout]] = {"in": {}, "out": {}, "": {}}
        partial: dict[str, frozenset[str]] = {}
        wrong: list[str] = []
        for number, line in enumerate(text.splitlines(), 1):
            line = re.sub(r"(^|\s)#(\s.*|$)", "", line).strip()
            if not line:
                continue
            match = _LINE.fullmatch(line)
            if match is None:
                wrong.append(
                    f"line {number}: `{line}` is not of the form `tensor  dim:axis`, perhaps with "
                    "`(partial over axis)`"
                )
                continue
            role, name = match["role"] or "", match["name"]
            if name in layouts[role]:
                wrong.append(f"line {number}: `{name}` has a layout already")
                continue
            try:
                layouts[role][name] = parse_layout(match["layout"])
            except ValueError as error:
                wrong.append(f"line {number}: {error}")
            if match["partial"] and role:
                wrong.append(f"line {number}: what enters or leaves a program is not partial")
            elif match["partial"]:
                partial[name] = frozenset(re.split(r",\s*", match["partial"]))
        if wrong:
            raise ValueError("\n  ".join(["malformed placement", *wrong]))
        return Placement(layouts["in"], layouts["out"], layouts[""], partial)

    def __str__(self) -> str:
        rows = [("in", *item) for item in self.inputs.items()]
        rows += [("out", *item) for item in self.outputs.items()]
        rows += [("", *item) for item in self.tensors.items()]
        width = max((len(name) for _, name, _ in rows), default=0)
        lines = []
        for role, name, layout in rows:
            axes = "" if role else ", ".join(sorted(self.partial.get(name, ())))
            line = f"{role:4} {name:{width}}  {layout}"
            lines.append(line + (f" (partial over {axes})" if axes else ""))
        return "\n".join(lines)


PlacementLike: TypeAlias = Placement | str


def _layout(layout: TensorLayout | str, name: str) -> TensorLayout:
    if isinstance(layout, str):
        return parse_layout(layout)
    if not isinstance(layout, TensorLayout) or layout.partial:
        raise ValueError(f"`{name}` has {layout!r}, which is no layout such as 'batch:data'")
    return layout


def parse_layout(text: str) -> TensorLayout:
    """Reads a layout as it prints: `batch:data; d_ff:slice+model`, or `replicated`.

    Raises:
        ValueError: it is of another form, or an axis occurs twice.
    """
    splits: dict[str, tuple[str, ...]] = {}
    parts = re.split(r"[;,\s]+", text.strip())
    for part in parts:
        rule = re.fullmatch(r"(\w+):(-|\w+(?:\+\w+)*)", part)
        if parts == ["replicated"]:
            continue
        if rule is None or rule[1] in splits:
            raise ValueError(
                f"`{text}` is not a layout such as `batch:data; d_ff:slice+model` or `replicated`"
            )
        splits[rule[1]] = () if rule[2] == "-" else tuple(rule[2].split("+"))
    used = [axis for axes in splits.values() for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(f"`{text}` has axis `{axis}` twice")
    return TensorLayout.of(splits)
