"""Page: the report as one HTML file, and as a fragment that a notebook shows.

Style and script are written into it, and nothing is fetched, so it works from a disk and offline.
All rules of the style stand below `.meshdsl`, and the script touches nothing outside of it and uses
no ids, so several reports, and a notebook around them, do not disturb each other. Without the
script everything is shown and folds; sorting, filtering and reading the strip need it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from meshdsl.reports.explain.comparison import Comparison
from meshdsl.reports.explain.html import comparing, sections
from meshdsl.reports.explain.html.elements import Child, Html, joined, tag
from meshdsl.reports.explain.html.schedules import programs

if TYPE_CHECKING:
    from meshdsl.lowering.costs.schedule import Schedule
    from meshdsl.reports.explain.explanation import Explanation


_CARDS = {".cards": 860, ".cards.many": 1060}  # pixels


def page(report: Explanation | Comparison) -> str:
    """Returns a whole page.

    Path("report.html").write_text(page(explain(program)), encoding="utf-8")
    """
    title = f"{report.name} on {report.mesh}" if report.mesh.axes else report.name
    return document(title, *_content(report))


def compile_page(explanation: Explanation, schedules: Mapping[str, Schedule]) -> str:
    """Returns the page of a program that was compiled: by schedules, then as planned.

    Args:
        schedules: of the program and of others, by what to call them; the first is drawn at once.
    """
    hardware = explanation.timeline.hardware
    by_schedule = sections.section(
        "The step by its schedule",
        programs(schedules, hardware, explanation.mesh),
        lead=(
            "One device, from left to right: its work, and its waits for what is sent. What is "
            "sent beside work takes no room. Work with products has their colour, other work that "
            "of memory."
        ),
    )
    content = [sections.header(explanation), by_schedule, *sections.everything(explanation)]
    return document(f"{explanation.name} on {explanation.mesh}", *content)


def fragment(report: Explanation | Comparison) -> str:
    """Returns the report for a notebook's cell."""
    return str(_styled(_content(report), "meshdsl"))


def document(title: str, *content: Child) -> str:
    """Returns a whole page with some content, in the style of the reports."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
    )
    body = tag("body", _styled(content, "meshdsl meshdsl-page"), style="margin: 0")
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _content(report: Explanation | Comparison) -> list[Child]:
    if isinstance(report, Comparison):
        return list(comparing.everything(report))
    return [sections.header(report), *sections.everything(report)]


def _styled(content: Iterable[Child], kind: str) -> Html:
    return tag(
        "div",
        tag("style", Html(file("colours.css") + file("style.css") + _cards())),
        tag("main", joined(content)),
        tag("script", Html(file("script.js"))),
        class_=kind,
    )


@cache
def _cards() -> str:
    """Returns when tables become cards: those with many columns on wider pages, too."""
    rules = file("cards.css")
    return "".join(
        f"@container (max-width: {width}px) {{\n{rules.replace('.cards', kind)}}}\n"
        for kind, width in _CARDS.items()
    )


@cache
def file(name: str) -> str:
    """Returns the text of a file that pages contain, such as `style.css` or `script.js`."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
