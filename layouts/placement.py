"""Placement: the layout of every tensor of a program, as data.

A layout is a list of rules; a placement has the layout of each tensor that follows from them. It
prints as text, one line for each tensor, and is read from such text. `lowering.lower` accepts all
of it, or a part:

    in   state/params/w_in                  embed:data; d_ff:model
    out  state/params/w_in                  embed:data; d_ff:model
         state/params/w_in                  d_ff:model
         mlp/h.einsum                       batch:data; d_ff:model
         mlp/y.multiply                     batch:data (partial over model)

Inputs and outputs are named by their paths (`in`, `out`). A line with the path of an input, but
without `in`, is for the input as it is read inside the program, which may be in another layout. All
other tensors have the names of `lowering.placement.identity`. A tensor that is partial over an axis
stays a partial sum over it; its line also has the layout that it has once it is reduced.
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
    """Layouts by the names of tensors; a placement that the user gives may lack any of them.

    A layout may be given as its text: `Placement(tensors={"mlp/h.tanh": "batch:data"})`.

    Attributes:
        inputs, outputs: the layouts of the program's inputs and outputs, by path.
        tensors: the layouts of tensors inside the program, by name.
        partial: for those that stay partial sums, the axes over which they do.

    Raises:
        ValueError: a layout is malformed.

    Examples:
        >>> batch, embed = md.dims(batch=8, embed=4)
        >>> @md.jit(mesh="data:2", layout="batch:data")
        ... def double(x):
        ...     y = x * 2.0
        ...     return y
        >>> placement = double.stages(md.spec([batch, embed])).placement
        >>> print(placement)
        in   x                  batch:data
        out  result             batch:data
             x                  batch:data
             double/y.multiply  batch:data
        >>> md.Placement.parse(str(placement)) == placement
        True
    """

    inputs: Mapping[str, TensorLayout] = field(default_factory=dict)
    outputs: Mapping[str, TensorLayout] = field(default_factory=dict)
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    partial: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for field_ in ("inputs", "outputs", "tensors"):
            layouts = {name: _layout(value, name) for name, value in getattr(self, field_).items()}
            object.__setattr__(self, field_, layouts)
        partial = {
            name: frozenset([axes] if isinstance(axes, str) else axes)
            for name, axes in self.partial.items()
        }
        object.__setattr__(self, "partial", partial)

    @staticmethod
    def of(placement: PlacementLike) -> Placement:
        """Returns a placement, or reads it from its text.

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
        """Reads the text of `str(placement)`; skips empty lines, and text after `#`.

        Raises:
            ValueError: lines are malformed, or name a tensor twice; it lists all, with numbers.
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
                wrong.append(f"line {number}: inputs and outputs are not partial")
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
