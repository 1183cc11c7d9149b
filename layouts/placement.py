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

from meshdsl.layouts.tensor_layout import TensorLayout

_LINE = re.compile(
    r"(?:(?P<role>in|out)\s+)?(?P<name>\S+)\s+(?P<layout>[^()]+?)"
    r"(?:\s*\(partial over (?P<partial>\w+(?:,\s*\w+)*)\))?"
)


@dataclass(frozen=True)
class Placement:
    """Layouts by the names of tensors; where a placement is given, any of them may be missing.

    Attributes:
        inputs, outputs: where the program takes and leaves what has these paths.
        tensors: where tensors are inside of the program.
        partial: of some of these, the axes over which they stay partial sums; others are whole.
    """

    inputs: Mapping[str, TensorLayout] = field(default_factory=dict)
    outputs: Mapping[str, TensorLayout] = field(default_factory=dict)
    tensors: Mapping[str, TensorLayout] = field(default_factory=dict)
    partial: Mapping[str, frozenset[str]] = field(default_factory=dict)

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


def parse_layout(text: str) -> TensorLayout:
    """Reads a layout as it prints: `batch:data; d_ff:slice+model`, or `replicated`.

    Raises:
        ValueError: it is of another form, or an axis occurs twice.
    """
    splits: dict[str, tuple[str, ...]] = {}
    for part in re.split(r"[;,\s]+", text.strip()):
        rule = re.fullmatch(r"(\w+):(\w+(?:\+\w+)*)", part)
        if part == "replicated":
            continue
        if rule is None or rule[1] in splits:
            raise ValueError(
                f"`{text}` is not a layout such as `batch:data; d_ff:slice+model` or `replicated`"
            )
        splits[rule[1]] = tuple(rule[2].split("+"))
    used = [axis for axes in splits.values() for axis in axes]
    for axis in used:
        if used.count(axis) > 1:
            raise ValueError(f"`{text}` has axis `{axis}` twice")
    return TensorLayout.of(splits)
