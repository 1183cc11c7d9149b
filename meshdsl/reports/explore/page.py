"""Page: the plans of one training step, which a reader edits and compares.

The page has the figures of all its plans. It asks for nothing else, unless the process that serves
it computes other plans (`live.js`): then the head has `live`, what may be asked for. `drawing.js`
draws, and `explore.js` has what the reader chooses. They use no ids and touch nothing outside of
`.meshdsl`.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain.html.elements import Child, Html, facts, tag
from meshdsl.reports.explain.html.page import document
from meshdsl.reports.explain.html.sections import section
from meshdsl.reports.explore.packing import Packing

MOST_BYTES = 2_000_000
_MEANINGS = (
    ("dim", "a named dimension of tensors, such as batch, embed or heads"),
    ("mesh", "the devices as a grid with named axes: data:4 model:2 are 4 × 2 devices"),
    ("layout", "rules that split dims over axes; what no rule splits, every device holds"),
    ("batch:data", "a rule: split batch over the axis data, in every tensor that has this dim"),
    ("length:model?", "split it only in tensors where no other rule uses that axis"),
    ("params/embed:data", "a rule for some tensors: those with params in their path, as stored"),
    ("microbatches", "parts of the batch that are computed one after another, to save memory"),
    ("recompute", "what the backward pass computes again, instead of keeping it in memory"),
    ("collective", "what devices do together to exchange data, such as an all_reduce, a sum"),
    ("waiting", "time in which a device has no work, because it waits for what is sent"),
    ("Pareto front", "the plans for which no other plan is both faster and smaller"),
)


def page(packing: Packing) -> tuple[str, int]:
    """Returns the page, and how many of its plans have details."""
    empty = len(_written(packing, "", 0).encode())
    text, detailed = packing.text(MOST_BYTES - empty - 100)  # for longer numbers
    return _written(packing, text, detailed), detailed


def _written(packing: Packing, plans: str, detailed: int) -> str:
    head = packing.head
    count = len(packing.choices) - len(packing.reasons)
    counted = f"{count:,}"
    if packing.reasons:
        counted += f"; {len(packing.reasons):,} more layouts do not fit the model"
    if detailed < count:
        counted += f"; {count - detailed:,} are here without details, so that the page stays small"
    title = f"{head['model']}: {count:,} plans"
    header = tag(
        "header",
        tag("h1", title),
        facts(
            [
                ("batch", head["batch"]),
                ("machine", head["machine"]),
                ("memory of a device", show_bytes(head["memory_bytes"])),
                ("plans", counted),
            ]
        ),
        tag("noscript", tag("p", "This page needs JavaScript.", class_="warn")),
    )
    return document(
        title,
        tag("style", Html(_file("explore.css"))),
        header,
        _editor(live="live" in head),
        _views(),
        tag("script", Html(plans), type="application/gzip+base64", class_="plans"),
        tag("script", Html(_script())),
    )


def _script() -> str:
    code = "\n".join(map(_file, ("drawing.js", "live.js", "explore.js")))
    return f'(() => {{\n"use strict";\n{code}\n}})();'


def _editor(live: bool) -> Html:
    computed = (
        "Options marked · are computed when you choose them, and so is any layout that you write, "
        "or a mesh before it: data:4 | batch:data."
        if live
        else "Options marked · were not computed: the command computes them."
    )
    return section(
        "Choose a plan",
        tag(
            "form",
            tag(
                "div",
                _choice("mesh", tag("select", class_="mesh")),
                _choice("microbatches", tag("select", class_="microbatches")),
                _choice("recompute (remat)", tag("select", class_="remat")),
                class_="choices",
            ),
            tag("div", class_="choices dims", role="group", aria_label="how each dim is split"),
            tag(
                "label",
                tag("span", "layout"),
                tag(
                    "input",
                    type="text",
                    class_="line",
                    spellcheck="false",
                    autocomplete="off",
                    placeholder="batch:data; heads:model",
                ),
                class_="line",
            ),
            tag("p", class_="warn problem", role="alert"),
            autocomplete="off",
        ),
        tag("pre", tag("code"), class_="command", tabindex="0", aria_label="the command"),
        tag(
            "div",
            tag("button", "copy the layout", type="button", class_="copy-layout"),
            tag("button", "copy the command", type="button", class_="copy-command"),
            tag("button", "the fastest that fits", type="button", class_="fastest"),
            tag("button", "the least memory", type="button", class_="smallest"),
            tag("span", class_="quiet copied", role="status"),
            class_="buttons",
        ),
        _words(),
        lead=(
            "Choose how the devices are arranged and over which axis each dim is split. All below "
            f"is of that plan. {computed} Those marked ✕ do not fit the model."
        ),
    )


def _words() -> Html:
    """The words of the page, for somebody who meets them for the first time."""
    return tag(
        "details",
        tag("summary", "What these words mean"),
        facts(_MEANINGS),
        class_="fold plain",
    )


def _choice(name: str, control: Html) -> Html:
    return tag("label", tag("span", name), control, class_="choice")


def _views() -> Html:
    return tag(
        "div",
        tag("div", class_="tiles", aria_live="polite"),
        tag("p", class_="limits"),
        tag(
            "div",
            _view("front", "Time against memory", "Each mark is a plan; click one to choose it. "
                  "The line is the Pareto front; arrow keys move along it."),
            _view("memory", "The step, and memory over it", "One device, from left to right. Each "
                  "part is as long as it takes at the peaks of the hardware, so all of them are "
                  "shorter than the simulated step. Point at it, or use the arrow keys."),
            tag("div", tag("section"), class_="view-missing", hidden=True),
            class_="beside",
        ),
        _view("sent", "What is sent", "By one device in a step: by axis, then by source line."),
        _view("where", "Where tensors are", "Choose a tensor to see which block of it each device "
              "holds. A bar is a dim; the part in colour is the device's own."),
        _view("pipeline", "The pipeline", None),
    )  # fmt: skip


def _view(name: str, title: str, lead: Child) -> Html:
    return tag("div", section(title, tag("div", class_="view"), lead=lead), class_=f"view-{name}")


@cache
def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
