"""The text of an explanation: plain, aligned, at most 120 columns, every figure with its unit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from meshdsl.lowering.costs.units import (
    show_bytes,
    show_count,
    show_flops,
    show_seconds,
    show_share,
)
from meshdsl.lowering.program import Value
from meshdsl.reports.explain.explanation import PHASES, Explanation, Part, Traffic
from meshdsl.reports.explain.limits import room, simulated_time, step_time
from meshdsl.reports.explain.lines import table, wrapped
from meshdsl.reports.explain.pipeline import pipeline_lines
from meshdsl.tensors.dims import Shape
from meshdsl.tensors.dtypes import short

_WIDTH = 120
_MOST_VALUES = 3
MEANING = {
    "parameters": ("parameters", ""),
    "optimizer": ("optimizer state", ""),
    "gradients": ("gradients", "of the parameters"),
    "copies": ("copies", "of parameters and optimizer state: cast, gathered, or updated"),
    "activations": ("activations", "values of the forward pass, kept for the backward pass"),
    "working": ("working values", "temporaries of what runs at that moment"),
    "batch": ("batch", "and other inputs"),
}


def show(explanation: Explanation) -> str:
    """Returns the report."""
    pipeline = explanation.pipeline
    sections = [head(explanation), pipeline_lines(pipeline, _WIDTH) if pipeline else []]
    sections += [_memory(explanation), _pads(explanation), _wire(explanation)]
    sections += [_alternatives(explanation)]
    sections += [_parameters(explanation), _legend(explanation)]
    return "\n\n".join("\n".join(section) for section in sections if section)


def head(explanation: Explanation) -> list[str]:
    """Returns the lines about the program itself, and the least time of a step."""
    mesh = explanation.mesh
    devices = f"{mesh.size:,} device{'s' if mesh.size > 1 else ''}"
    facts = [f"{show_count(explanation.parameter_count)} parameters"]
    if explanation.batch is not None:
        sizes = " × ".join(f"{dim.name} {dim.size:,}" for dim in explanation.batch.shape)
        facts += [sizes] if sizes else []
    kind = f" in {explanation.dtype}" if explanation.dtype is not None else ""
    facts.append(f"{show_flops(explanation.flops)}/device/step{kind}")
    where = f" on {mesh}" if mesh.axes else ""
    lines = wrapped("", f"{explanation.name}{where}: " + " · ".join([devices, *facts]), _WIDTH)
    lines += [f"layout {explanation.layout}"] if str(explanation.layout) else []
    if explanation.timeline.seconds:
        head = f"at the peaks of {explanation.timeline.hardware.title}: "
        lines += wrapped(head, step_time(explanation), _WIDTH)
        lines += wrapped("simulated: ", simulated_time(explanation), _WIDTH)
        lines += wrapped("to be faster: ", explanation.faster, _WIDTH)
    if explanation.only:
        lines += wrapped("shown: ", explanation.shown.note, _WIDTH)
    for note in explanation.notes:
        lines += wrapped("note: ", note, _WIDTH)
    return lines


def _memory(explanation: Explanation) -> list[str]:
    rows = []
    for part, count in explanation.bytes_of.items():
        label, meaning = MEANING[part]
        rows.append((label, show_bytes(count), meaning))
    source = explanation.memory.source
    moment = f"reached at {source}" if source.line else "reached at the start"
    moment = f"{room(explanation)}; {moment}"
    rows.append(("peak", show_bytes(explanation.memory.peak_bytes), ""))
    *lines, peak = table(rows, right=(1,))
    lines = ["memory per device, at the peak", *lines, *wrapped(f"{peak}  ", moment, _WIDTH)]
    inputs = ("parameters", "optimizer", "batch")
    lines += largest_values(explanation, without=inputs, most=_MOST_VALUES)
    lines += wrapped("  to use less: ", explanation.advice, _WIDTH) if explanation.advice else []
    if explanation.search:  # in one line, to be copied
        lines += ["  several changes at once may fit; this looks for them:"]
        lines += [f"    {explanation.search}"]
    return lines


def largest_values(
    explanation: Explanation, without: Sequence[str] = (), most: int = 2 * _MOST_VALUES
) -> list[str]:
    """Returns a table of what is largest at the peak.

    Args:
        without: parts that are left out.
        most: how many values are listed.
    """
    largest = [part for part in explanation.shown.part_rows if part.part not in without]
    if not largest:
        return []
    shown = [_value(part, explanation) for part in largest[:most]]
    rows = table(shown, right=(2,), squeezed=1, width=_WIDTH - 2)
    return ["  the largest values then:", *(f"  {line}" for line in rows)]


def _value(part: Part, explanation: Explanation) -> tuple[str, ...]:
    buffer = part.buffer
    kind = _type(buffer.value, explanation).replace(", ", ",")
    kind += times(part.count)
    return part.name, kind, show_bytes(part.bytes), buffer.path or buffer.source.place


def _type(value: Value, explanation: Explanation) -> str:
    where = value.layout.complete()  # a partial sum has the same size
    return short(value.dtype) + where.show(value.shape, explanation.mesh)


def _pads(explanation: Explanation) -> list[str]:
    """Returns the dims that do not divide, those that waste most first."""
    pads = explanation.pads
    if not pads.dims:
        return []
    rows = [("dim", "over", "blocks", "pads", "of it", "in")]
    rows += [
        (
            str(one.dim),
            "+".join(one.axes),
            f"{one.blocks:,} × {one.block:,}",
            f"{one.pads:,}",
            show_share(one.share),
            f"{one.tensors:,} tensor{'s' if one.tensors > 1 else ''}",
        )
        for one in pads.dims[:_MOST_VALUES]
    ]
    if len(pads.dims) > _MOST_VALUES:
        rows.append((f"and {len(pads.dims) - _MOST_VALUES} more", "", "", "", "", ""))
    total = f"{show_bytes(pads.peak_bytes)} of the peak"
    return [f"pads, where sizes do not divide: {total}", *table(rows, right=(2, 3, 4))]


def _wire(explanation: Explanation) -> list[str]:
    if not explanation.traffic:
        return ["on the wire: nothing; no device needs what another has"]
    rows: list[tuple[str, ...]] = [("collective", "of", "over", "count", "payload", "wire", "line")]
    for phase in PHASES:
        sent = [t for t in explanation.traffic if t.phase == phase]
        if not sent:
            continue
        rows.append((phase, "", "", "", "", show_bytes(sum(t.wire_bytes for t in sent)), ""))
        rows += [_row(t) for t in explanation.shown.traffic if t.phase == phase]
    if explanation.only:
        listed = sum(traffic.wire_bytes for traffic in explanation.shown.traffic)
        rows.append(("listed", "", "", "", "", show_bytes(listed), ""))
    total = show_bytes(explanation.wire_bytes)
    rows.append(("total", "", "", f"{explanation.collectives:,}", "", total, ""))
    lines = table(rows, right=(3, 4, 5), squeezed=1)
    return ["on the wire, per device and step", *lines, *_kept(explanation)]


def _kept(explanation: Explanation) -> list[str]:
    """Returns which weights are not gathered again for the backward pass, those of most bytes."""
    largest = sorted(explanation.shown.kept, key=lambda one: -one.bytes)
    named = [f"{one.path} ({show_bytes(one.bytes)})" for one in largest[:_MOST_VALUES]]
    if len(largest) > _MOST_VALUES:
        named.append(f"{len(largest) - _MOST_VALUES} more")
    text = ", ".join(named)
    return wrapped("  gathered once for both passes: ", text, _WIDTH) if text else []


def _row(traffic: Traffic) -> tuple[str, ...]:
    return (
        f"  {traffic.kind}",
        f"{_few(traffic.what)} {_names(traffic.dims)}",
        "+".join(traffic.axes),
        f"{traffic.count:,}",
        show_bytes(traffic.payload_bytes / traffic.count),
        show_bytes(traffic.wire_bytes),
        traffic.source.place,
    )


def _few(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} more"


def _names(dims: Shape) -> str:
    return f"[{','.join(dims.names)}]" if dims else ""


def _alternatives(explanation: Explanation) -> list[str]:
    if not explanation.alternatives:
        return []
    rows = [("", "wire", "peak", "step")]
    rows += [
        (one.how, show_bytes(one.wire_bytes), show_bytes(one.peak_bytes), show_seconds(one.seconds))
        for one in explanation.alternatives
    ]
    return ["the same step by other options", *table(rows, right=(1, 2, 3))]


def _parameters(explanation: Explanation) -> list[str]:
    if not explanation.shown.parameters:
        return []
    paths = [parameter.path for parameter in explanation.parameters]
    root = shared_root(paths)
    rows = [
        (
            parameter.path.removeprefix(root),
            _type(parameter.value, explanation) + times(parameter.count),
            show_bytes(parameter.bytes),
            _splits(parameter.value),
        )
        for parameter in explanation.shown.parameters
    ]
    head = f"parameters, per device{f', under {root}' if root else ''}"
    head += " (in a layout, a scope is any part of a path: params/embed:data)" if root else ""
    return [head, *table(rows, right=(2,), squeezed=1)]


def times(count: int) -> str:
    """Returns what a row says that stands for several of a kind."""
    return f" × {count}" if count > 1 else ""


def shared_root(paths: Sequence[str]) -> str:
    """Returns the common prefix of all parameters' paths, up to `params/`, or an empty string."""
    root = paths[0][: paths[0].index("params") + len("params/")]
    return root if all(path.startswith(root) for path in paths) else ""


def _splits(value: Value) -> str:
    splits = "; ".join(f"{dim}:{'+'.join(axes)}" for dim, axes in value.layout.splits)
    return splits or "not split"


def _legend(explanation: Explanation) -> list[str]:
    words = [
        "GiB, MiB, KiB: 2^30, 2^20, 2^10 bytes.",
        "heads=2/8: one device holds 2 of 8; heads:model: they are split over mesh axis model."
        if explanation.mesh.size > 1
        else "",
        "a+b: one collective over both axes. count: times per step; payload: the larger of what "
        "one device gives and gets, each time; wire: what it sends, all times of a step together. "
        "x[layers]: x of all layers, stacked; x.2: the second of that name; x.exp: a step on the "
        "way to x; x_grad: its gradient."
        if explanation.traffic
        else "",
        "Tensors that travel together are listed each with its line; the total counts collectives."
        if explanation.collectives < sum(t.count for t in explanation.traffic)
        else "",
        "Of a cond both branches are listed, also in a sum of rows; the total counts the one that "
        "sends more."
        if "cond" in explanation.unsure
        else "",
        "Of a while loop one iteration is counted." if "while" in explanation.unsure else "",
    ]
    return textwrap.wrap(" ".join(filter(None, words)), _WIDTH)
