"""Curves: metrics over steps, several runs in one picture, drawn by Matplotlib.

Each metric has a panel. What was measured on held-out text (`eval_loss`, `test_loss`) is drawn in
the panel of the metric itself, with marks. A metric that no run has reported, or that is zero
everywhere, has no panel. The same runs make the same file, to the byte.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdsl.reports.explain.html.elements import Html, tag
from meshdsl.reports.explain.html.page import document
from meshdsl.reports.runs.reading import RunHistory
from meshdsl.training.reporting.time_shares import PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = (".svg", ".png", ".pdf", ".html")
# The first panels, in their order; other metrics follow by name.
_PANELS = {
    "loss": "loss (nats)",
    "learning_rate": "learning rate",
    "grad_norm": "norm of the gradients",
    "tokens_per_second": "tokens per second",
    "mfu": "model FLOPs utilisation",
    "steps_share": "share of the time in steps",
    "memory_bytes": "memory of a device (GiB)",
    "host_memory_bytes": "memory of the host (GiB)",
    "skipped_steps": "skipped steps",
}
# Other metrics say the same: `steps_share` is what those of other parts leave.
_LEFT_OUT = {"step", "step_seconds", "tflops_per_device", *(f"{part}_share" for part in PARTS)}
_GIB = {"memory_bytes", "host_memory_bytes"}
# Prefixes of metrics, with their marks and what these are called.
_HELD_OUT = {"eval_": ("o", "held out: ●"), "test_": ("s", "test: ■")}
# Of Okabe and Ito (2008): told apart by those who see few colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")  # for more runs than colours
_SVG_DASHES = (None, "6 3", "2 3", "6 3 2 3")  # the same in the legend of a page
# Names of Matplotlib's that nothing refers to: each picture of a page has the same ones.
_PLACES = re.compile(
    r' id="(?:figure|axes|patch|line2d|text|legend|matplotlib\.axis|[xy]tick)_\d+"'
)
_WIDTH, _HEIGHT, _COLUMNS = 5.4, 3.1, 2  # of a panel, in inches; panels beside each other


def draw(runs: Sequence[RunHistory], out: Path) -> None:
    """Writes a picture of runs, or a page with it, by the end of the file's name.

    Raises:
        ValueError: Matplotlib is not installed, the end is none of `KINDS`, no run has a metric, or
            the file cannot be written.
    """
    if out.suffix not in KINDS:
        raise ValueError(f"{out} must end in {', '.join(KINDS)}")
    panels = panels_of(runs)
    if not panels:
        raise ValueError(f"nothing to draw: no metric in {', '.join(run.name for run in runs)}")
    if out.suffix == ".html":
        data = _page(runs, panels).encode()
    else:
        data = _drawn(_figure(runs, panels), out.suffix[1:])
    try:
        out.write_bytes(data)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error


def _drawn(figure: Figure, kind: str, salt: str = "meshdsl") -> bytes:
    """Returns a figure as a file of a kind; the same figure makes the same bytes."""
    import matplotlib

    metadata = {"CreationDate": None} if kind == "pdf" else {"Date": None} if kind == "svg" else {}
    content = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    return content.getvalue()


def panels_of(runs: Sequence[RunHistory]) -> list[str]:
    """Returns the metrics that have panels: those of which a run has reported more than zeros."""
    names = {name for run in runs for report in run.reports for name in report}
    base = {_base(name, names) for name in names if _says_something(name, runs)} - _LEFT_OUT
    return [name for name in _PANELS if name in base] + sorted(base - set(_PANELS))


def _base(name: str, names: set[str]) -> str:
    """Returns the metric in whose panel another is drawn."""
    for prefix in _HELD_OUT:
        if name.startswith(prefix) and name.removeprefix(prefix) in names:
            return name.removeprefix(prefix)
    return name


def _says_something(name: str, runs: Sequence[RunHistory]) -> bool:
    values = [value for run in runs for value in run.curve(name)[1]]
    return any(values)


def _figure(runs: Sequence[RunHistory], panels: Sequence[str], legend: bool = True) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError("pictures need Matplotlib: pip install -e '.[plot]'") from None
    columns = min(_COLUMNS, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = _WIDTH * columns, _HEIGHT * rows + (0.6 if legend else 0)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    steps = [int(report["step"]) for run in runs for report in run.reports]
    margin = 0.04 * (max(steps) - min(steps)) or 0.5
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.remove()
            continue
        _panel(axes, panels[place], runs)
        axes.set_xlim(min(steps) - margin, max(steps) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if place + columns >= len(panels):
            axes.set_xlabel("step")
    if not legend:
        return figure
    names = [run.name for run in runs]
    figure.legend(
        grid[0][0].lines[:: 1 + len(_HELD_OUT)],
        names,
        loc="outside upper left",
        frameon=False,
        ncols=1 if max(map(len, names)) > 40 else 3,
    )
    return figure


def _panel(axes: Any, metric: str, runs: Sequence[RunHistory]) -> None:
    for number, run in enumerate(runs):
        style = {"color": _colour(number), "linestyle": _DASHES[_dash(number)]}
        axes.plot(*_in_units(metric, run), linewidth=1.4, **style)
        for prefix, (mark, _) in _HELD_OUT.items():
            axes.plot(
                *run.curve(prefix + metric), linewidth=0.7, marker=mark, markersize=4, **style
            )
    notes = [
        note
        for prefix, (_, note) in _HELD_OUT.items()
        if any(run.curve(prefix + metric)[0] for run in runs)
    ]
    words = f"{_title(metric)}{'; ' if notes else ''}{', '.join(notes)}"
    axes.set_title(words, loc="left", fontsize=10)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _title(metric: str) -> str:
    return _PANELS.get(metric, metric.replace("_", " "))


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _dash(number: int) -> int:
    return number // len(_COLOURS) % len(_DASHES)


def _in_units(metric: str, run: RunHistory) -> tuple[list[int], list[float]]:
    steps, values = run.curve(metric)
    return steps, [value / 2**30 for value in values] if metric in _GIB else values


def _page(runs: Sequence[RunHistory], panels: Sequence[str]) -> str:
    """Returns a page with a picture of each panel, beside each other where there is room.

    It needs no network.
    """
    title = f"Training: {', '.join(run.name for run in runs)}"
    pictures = []
    for metric in panels:
        svg = _drawn(_figure(runs, [metric], legend=False), "svg", salt=metric).decode()
        name = html.escape(f"{_title(metric)}, over steps")
        start = f'<svg role="img" aria-label="{name}" style="width: 100%; height: auto"'
        svg = _PLACES.sub("", svg[svg.index("<svg") :])
        pictures.append(Html(svg.replace("<svg", start, 1)))
    grid = "display: grid; grid-template-columns: repeat(auto-fit, minmax(min(480px, 100%), 1fr))"
    return document(
        title,
        tag("header", tag("h1", title), _legend(runs)),
        tag("div", pictures, style=f"{grid}; background: #fff; border-radius: 8px"),
    )


def _legend(runs: Sequence[RunHistory]) -> Html:
    """Returns the line of each run with its name."""
    items = []
    for number, run in enumerate(runs):
        line = tag(
            "line",
            x1=0,
            x2=28,
            y1=6,
            y2=6,
            stroke=_colour(number),
            stroke_width=2,
            stroke_dasharray=_SVG_DASHES[_dash(number)],
        )
        sample = tag("svg", line, width=28, height=12, aria_hidden="true")
        # On white, as in the pictures: the last colour is black.
        patch = tag("span", sample, style="background: #fff; padding: 0 4px; margin-right: 6px")
        items.append(tag("li", patch, run.name))
    return tag("ul", items, class_="legend")
