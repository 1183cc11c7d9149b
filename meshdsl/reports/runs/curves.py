"""Curves: metrics over steps, several runs in one picture, drawn by Matplotlib.

Each metric has a panel. What was measured on held-out text (`eval_loss`, `test_loss`) is drawn in
the panel of the metric itself, with marks. A metric that no run has reported, or that is zero
everywhere, has no panel. The same runs make the same file, to the byte.
"""

from __future__ import annotations

import html
import io
import math
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
_WIDTH, _HEIGHT, _COLUMNS = 5.4, 3.1, 2  # of a panel, in inches; panels beside each other


def draw(runs: Sequence[RunHistory], out: Path) -> None:
    """Writes a picture of runs, or a page with it, by the end of the file's name.

    Raises:
        ValueError: Matplotlib is not installed, the end is none of `KINDS`, no run has a metric, or
            the file cannot be written.
    """
    if out.suffix not in KINDS:
        raise ValueError(f"{out} must end in {', '.join(KINDS)}")
    content = io.BytesIO()
    figure = _figure(runs)
    kind = "svg" if out.suffix == ".html" else out.suffix[1:]
    metadata = {"CreationDate": None} if kind == "pdf" else {"Date": None} if kind == "svg" else {}
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "meshdsl", "svg.fonttype": "none"}):
        figure.savefig(content, format=kind, dpi=150, metadata=metadata)
    data = content.getvalue()
    try:
        out.write_bytes(_page(runs, data.decode()).encode() if out.suffix == ".html" else data)
    except OSError as error:
        raise ValueError(f"cannot write {out}: {error.strerror}") from error


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


def _figure(runs: Sequence[RunHistory]) -> Figure:
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ValueError("pictures need Matplotlib: pip install -e '.[plot]'") from None
    panels = panels_of(runs)
    if not panels:
        raise ValueError(f"nothing to draw: no metric in {', '.join(run.name for run in runs)}")
    rows = math.ceil(len(panels) / _COLUMNS)
    figure = Figure(figsize=(_WIDTH * _COLUMNS, _HEIGHT * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, _COLUMNS, squeeze=False, sharex=True)
    for place, axes in enumerate(grid.flat):
        if place >= len(panels):
            axes.remove()
            continue
        _panel(axes, panels[place], runs)
        if place + _COLUMNS >= len(panels):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.tick_params(labelbottom=True)
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
        style = {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": _DASHES[number // len(_COLOURS) % len(_DASHES)],
        }
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
    title = _PANELS.get(metric, metric.replace("_", " "))
    axes.set_title(f"{title}{'; ' if notes else ''}{', '.join(notes)}", loc="left", fontsize=10)
    axes.grid(True, linewidth=0.4, alpha=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _in_units(metric: str, run: RunHistory) -> tuple[list[int], list[float]]:
    steps, values = run.curve(metric)
    return steps, [value / 2**30 for value in values] if metric in _GIB else values


def _page(runs: Sequence[RunHistory], svg: str) -> str:
    """Returns a page with the picture; it needs no network."""
    picture = svg[svg.index("<svg") :]
    title = f"Training: {', '.join(run.name for run in runs)}"
    label = f'<svg role="img" aria-label="{html.escape(title)}"'
    drawn = Html(picture.replace("<svg", label, 1))
    card = tag("div", drawn, style="background: #fff; border-radius: 8px; overflow-x: auto")
    return document(title, tag("header", tag("h1", title)), card)
