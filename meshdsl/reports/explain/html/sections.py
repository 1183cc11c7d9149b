"""Sections: the parts of the report, each a function from an explanation to HTML."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.lowering.costs.units import (
    show_bytes,
    show_count,
    show_flops,
    show_seconds,
    show_share,
)
from meshdsl.reports.explain.explanation import PARTS, Explanation, Traffic
from meshdsl.reports.explain.html.elements import (
    Cell,
    Child,
    Column,
    Html,
    byte_cell,
    code,
    facts,
    joined,
    line,
    place,
    table,
    tag,
    ticked,
    value_names,
)
from meshdsl.reports.explain.html.gantt import gantt
from meshdsl.reports.explain.html.placement import axis_bar, block_drawing, mesh_drawing, type_of
from meshdsl.reports.explain.html.steps import step
from meshdsl.reports.explain.html.strips import legend
from meshdsl.reports.explain.limits import too_large, what_limits
from meshdsl.reports.explain.pipeline import facts_of, headline
from meshdsl.reports.explain.text import MEANING, shared_root, times

_MOST_BUFFERS = 40


def section(title: str, *content: Child, lead: Child = None) -> Html:
    """Returns a section with its heading, and one paragraph about what it shows."""
    head = tag("p", lead, class_="lead") if lead else None
    return tag("section", tag("h2", title), head, *content)


def header(explanation: Explanation) -> Html:
    """Returns what the program is, where it runs, and its main figures."""
    mesh = explanation.mesh
    devices = f"{mesh.size:,} device{'s' if mesh.size > 1 else ''}"
    batch = explanation.batch
    sizes = " × ".join(f"{d.name} {d.size:,}" for d in batch.shape) if batch is not None else ""
    known: list[tuple[str, Child]] = [
        ("mesh", joined([mesh_drawing(mesh), tag("span", devices, class_="quiet")])),
        ("layout", code(str(explanation.layout)) if explanation.layout.rules else "none"),
        ("batch", sizes or "–"),
        ("hardware", explanation.timeline.hardware.title),
    ]
    if explanation.only:
        tables = "Tables list only its rows, and sum these. All other figures are of the whole."
        known.append(("part", joined([code(explanation.only), tag("p", tables, class_="quiet")])))
    return tag(
        "header",
        tag("h1", explanation.name),
        facts(known),
        tiles(explanation),
    )


def tiles(explanation: Explanation) -> Html:
    """Returns the main figures, large."""
    timeline, memory = explanation.timeline, explanation.memory
    best = show_seconds(timeline.overlapped_seconds)
    peaks = f"{show_seconds(timeline.seconds)} at the peaks of the hardware"
    room = timeline.hardware.memory_bytes
    wire = show_bytes(explanation.wire_bytes) if explanation.traffic else "nothing"
    count = explanation.collectives
    sent = f"{count:,} collective{'s' if count != 1 else ''}" if count else "no collective"
    return tag(
        "div",
        _tile(
            "step, simulated",
            show_seconds(explanation.simulated.seconds),
            f"{peaks}, {best} if sending overlaps" if count else peaks,
        ),
        _tile(
            "peak memory",
            show_bytes(memory.peak_bytes),
            too_large(explanation)
            or f"{show_share(memory.peak_bytes / room)} of {show_bytes(room)}",
            warn=bool(too_large(explanation)),
        ),
        _tile("on the wire", wire, sent),
        _tile(
            "arithmetic",
            show_flops(explanation.flops),
            f"{f'in {explanation.dtype}, ' if explanation.dtype is not None else ''}"
            f"{show_share(_used(explanation))} of the bf16 peak",
        ),
        _tile(
            "parameters",
            show_count(explanation.parameter_count),
            f"{show_bytes(explanation.bytes_of['parameters'])} per device",
        ),
        class_="tiles",
    )


def _used(explanation: Explanation) -> float:
    """Returns the share of the bf16 peak that the simulated step uses."""
    timeline, seconds = explanation.timeline, explanation.simulated.seconds
    return timeline.used(explanation.flops) * timeline.seconds / seconds if seconds else 0.0


def _tile(label: str, figure: str, more: str, warn: bool = False) -> Html:
    return tag(
        "div",
        tag("span", label, class_="quiet"),
        tag("strong", figure),
        tag("span", more, class_="warn" if warn else "quiet"),
        class_="tile",
    )


def limits(explanation: Explanation) -> Html:
    """Returns what takes the time, and the next things to try."""
    timeline = explanation.timeline
    slow = sorted(timeline.slow, key=explanation.mesh.names.index)
    notes = [
        ("faster", explanation.faster),
        ("less memory", explanation.advice),
        ("slow network", f"crossed by {_axes(slow)}" if slow else ""),
        *(("note", note) for note in explanation.notes),
    ]
    shown = [(name, ticked(text[0].upper() + text[1:])) for name, text in notes if text]
    if explanation.search:
        shown.append(
            ("several changes", joined(["This looks for them: ", code(explanation.search)]))
        )
    return section(
        "What limits the step",
        tag("p", "At the peaks, most is spent on ", tag("b", what_limits(timeline)), "."),
        legend(timeline.times, explanation.mesh),
        facts(shown, "facts") if shown else None,
    )


def _axes(names: Sequence[str]) -> str:
    return f"ax{'e' if len(names) > 1 else 'i'}s {', '.join(names)}"


def timeline(explanation: Explanation) -> Html | None:
    """Returns the step as a strip with the memory below it, if it does anything."""
    if not explanation.timeline.intervals:
        return None
    return section(
        "The step, and the memory over it",
        step(explanation.timeline, explanation.mesh, explanation.memory.peak_bytes),
        lead=(
            "One device, from left to right, at the peaks of "
            f"{explanation.timeline.hardware.title}; striped: sent over the mesh. "
            "Rest on an interval, or move with the arrow keys, to read it; "
            "a loop is drawn once and unfolds below."
        ),
    )


def buffers(explanation: Explanation) -> Html:
    """Returns what is alive at the peak: by part, then the largest buffers."""
    peak = explanation.memory.peak_bytes or 1
    totals = {part: count for part, count in explanation.bytes_of.items() if count}
    bar = [
        tag(
            "span",
            style=f"flex: {count / peak:.5f}; background: var(--part-{PARTS.index(part)})",
            title=f"{MEANING[part][0]}: {show_bytes(count)}",
        )
        for part, count in totals.items()
    ]
    items = [
        tag(
            "li",
            tag("i", style=f"background: var(--part-{PARTS.index(part)})"),
            f"{MEANING[part][0]} ",
            tag("b", show_bytes(count)),
            tag("span", f" {show_share(count / peak)}", class_="quiet"),
            title=MEANING[part][1] or None,
        )
        for part, count in totals.items()
    ]
    columns = [
        Column("part"),
        Column("name"),
        Column("type"),
        Column("bytes", number=True, total=True),
        Column("of the peak", number=True),
        Column("line"),
    ]
    rows: list[list[Cell | Child]] = [
        [
            MEANING[part.part][0],
            code(part.buffer.path) if part.buffer.path else value_names(part.name),
            code(type_of(part.buffer.value, explanation.mesh) + times(part.count)),
            byte_cell(part.bytes),
            Cell(show_share(part.bytes / peak), part.bytes),
            place(part.buffer.source),
        ]
        for part in explanation.shown.part_rows[:_MOST_BUFFERS]
    ]
    rest = explanation.shown.part_rows[_MOST_BUFFERS:]
    if rest:
        count = sum(part.bytes for part in rest)
        share = Cell(show_share(count / peak), count)
        rows.append(
            [
                f"{sum(part.count for part in rest)} smaller ones",
                None,
                None,
                byte_cell(count),
                share,
                None,
            ]
        )
    source = explanation.memory.source
    where = joined(["At ", place(source)]) if source.line else "At the start"
    return section(
        "Alive at the peak",
        tag("div", bar, class_="bar"),
        tag("ul", items, class_="legend"),
        table("buffers at the peak", columns, rows),
        lead=joined([where, f", one device holds {show_bytes(explanation.memory.peak_bytes)}."]),
    )


def collectives(explanation: Explanation) -> Html:
    """Returns every collective by source line."""
    if not explanation.traffic:
        return section("On the wire", tag("p", "Nothing: no device needs what another has."))
    columns = [
        Column("phase"),
        Column("collective"),
        Column("name in source"),
        Column("dims"),
        Column("over"),
        Column("count", number=True),
        Column("payload", number=True),
        Column("wire", number=True, total=True),
        Column("line"),
    ]
    rows = [(traffic.phase, *traffic_cells(traffic)) for traffic in explanation.shown.traffic]
    unsure = {
        "cond": "Of a cond both branches are listed; the figure at the top counts the one that "
        "sends more.",
        "while": "Of a while loop one iteration is counted.",
    }
    return section(
        "On the wire, by source line",
        table("collectives", columns, rows),
        lead=" ".join(
            [
                "Per device and step. Payload: the larger of what one device gives and gets, each "
                "time; wire: what it sends, all times together.",
                *(text for op, text in unsure.items() if op in explanation.unsure),
            ]
        ),
    )


def traffic_cells(traffic: Traffic) -> Sequence[Cell | Html | str]:
    """Returns the cells of one collective, without its phase."""
    names = traffic.what[0] + (f" + {len(traffic.what) - 1} more" if traffic.what[1:] else "")
    return (
        traffic.kind,
        value_names(names, ", ".join(traffic.what)),
        code(", ".join(traffic.dims.names)),
        "+".join(traffic.axes),
        Cell(f"{traffic.count:,}", traffic.count),
        byte_cell(traffic.payload_bytes / traffic.count),
        byte_cell(traffic.wire_bytes),
        line(traffic.source),
    )


def alternatives(explanation: Explanation) -> Html | None:
    """Returns what other options would send, hold and take, if any differ."""
    if not explanation.alternatives:
        return None
    columns = [Column("option"), *(Column(n, number=True) for n in ("wire", "peak", "step"))]
    rows = [
        (
            one.how if one is explanation.alternatives[0] else code(one.how),
            byte_cell(one.wire_bytes),
            byte_cell(one.peak_bytes),
            Cell(show_seconds(one.seconds), one.seconds),
        )
        for one in explanation.alternatives
    ]
    return section(
        "The same step by other options",
        table("other options", columns, rows, filtered=False),
        lead="Per device and step: what is sent, what is held at the peak, and the time it takes "
        "at the peaks of the hardware.",
    )


def parameters(explanation: Explanation) -> Html | None:
    """Returns every parameter, drawn on the mesh."""
    if not explanation.shown.parameters:
        return None
    mesh, root = explanation.mesh, shared_root([one.path for one in explanation.parameters])
    under = f" under {root}" if root else ""
    columns = [
        Column(f"parameter{under}"),
        Column("type"),
        Column("per device", number=True, total=True),
        *(Column(name) for name in mesh.names),
        Column("one device's block"),
    ]
    rows: list[list[Cell | Child]] = [
        [
            code(one.path.removeprefix(root)),
            code(type_of(one.value, mesh) + times(one.count)),
            byte_cell(one.bytes),
            *(
                Cell(axis_bar(one.value, axis, mesh), float(one.value.layout.dim_of(axis) is None))
                for axis in mesh.names
            ),
            Cell(block_drawing(one.value, mesh), one.value.bytes / (one.value.shape.volume or 1)),
        ]
        for one in explanation.shown.parameters
    ]
    return section(
        "Parameters on the mesh",
        table("parameters", columns, rows),
        lead=(
            "A column for each mesh axis. A cut bar: every device along the axis holds another "
            "block of that dim; a whole bar: all hold the same. "
            "Dims are written local/global; in a layout, a scope is any part of a path."
        ),
    )


def pads(explanation: Explanation) -> Html | None:
    """Returns what is lost to sizes that do not divide, if anything."""
    wasted = explanation.pads
    if not wasted.dims:
        return None
    dims = [
        (
            code(str(one.dim)),
            "+".join(one.axes),
            Cell(f"{one.blocks:,} × {one.block:,}", one.block),
            Cell(f"{one.pads:,}", one.pads),
            Cell(show_share(one.share), one.share),
            Cell(f"{one.tensors:,}", one.tensors),
        )
        for one in wasted.dims
    ]
    dim_columns = [Column("dim"), Column("over")]
    dim_columns += [Column(n, number=True) for n in ("blocks", "pads", "of all positions")]
    dim_columns.append(Column("tensors", number=True))
    tensors = [
        (
            code(one.name),
            code(type_of(one.value, explanation.mesh)),
            Cell(show_share(one.share), one.share),
            byte_cell(one.bytes),
        )
        for one in wasted.tensors
    ]
    tensor_columns = [
        Column("tensor"),
        Column("type"),
        Column("pads", number=True),
        Column("bytes of pads", number=True, total=True),
    ]
    peak = explanation.memory.peak_bytes or 1
    return section(
        "Wasted pads",
        table("padded dims", dim_columns, dims, filtered=False),
        table("padded tensors", tensor_columns, tensors) if tensors else None,
        lead=(
            f"Sizes that do not divide by the devices that share them. Of the peak, "
            f"{show_bytes(wasted.peak_bytes)} ({show_share(wasted.peak_bytes / peak)}) per device "
            f"are pads; of the inputs, {show_bytes(wasted.input_bytes)}."
        ),
    )


def pipeline(explanation: Explanation) -> Html | None:
    """Returns what the stages of a pipeline do, and how much of it is waiting."""
    report = explanation.pipeline
    if report is None:
        return None
    items = [tag("li", ticked(f"{line[0].upper()}{line[1:]}.")) for line in facts_of(report)]
    return section(
        "The pipeline",
        gantt(report),
        tag("ul", items),
        lead=f"{headline(report)}. A stage is a position along the axes of the pipeline; F3 is the "
        "forward pass of microbatch 3, B3 its backward pass, and the number in front is the "
        "chunk's.",
    )


def everything(explanation: Explanation) -> list[Html | None]:
    """Returns all sections below the header."""
    return [
        limits(explanation),
        pipeline(explanation),
        timeline(explanation),
        buffers(explanation),
        collectives(explanation),
        alternatives(explanation),
        parameters(explanation),
        pads(explanation),
    ]
