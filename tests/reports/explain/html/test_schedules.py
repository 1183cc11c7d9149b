"""Schedules on a page: their intervals add up to the step, and programs stand in one table."""

from html.parser import HTMLParser

import pytest

from meshdsl.layouts.hardware import hardware
from meshdsl.lowering.costs.simulation import simulate
from meshdsl.reports.explain.html.page import compile_page
from meshdsl.reports.explain.html.schedules import as_timeline
from tests.reports.explain.steps import LARGE, explained


@pytest.mark.parametrize("name", ["v3", "v5p", "h100"])
def test_the_intervals_are_the_work_and_the_waits(name):
    program, _ = explained(**LARGE)
    schedule = simulate(program, hardware(name))
    timeline = as_timeline(schedule, hardware(name), program.mesh)
    assert timeline.seconds == pytest.approx(schedule.seconds, rel=1e-3)
    waits = sum(t for limit, t in timeline.times.items() if limit.startswith("over "))
    assert waits == pytest.approx(schedule.times.exposed, rel=1e-3)
    (forward, backward) = (i for i in timeline.intervals if i.kind == "scan")
    assert forward.count == backward.count == 96
    lines = [i.source.place for i in timeline.walk() if i.kind == "local"]
    assert lines and all(line.startswith("steps.py:") for line in lines if line)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open = []
        self.heads = []

    def handle_starttag(self, tag, attributes):
        if tag not in ("meta", "input", "wbr"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["h2"]:
            self.heads.append(data)


def test_a_page_of_two_programs_is_whole():
    program, found = explained(**LARGE)
    other = explained(mesh="data:8", layout="batch:data", **LARGE)[0]
    v5p = hardware("v5p")
    schedules = {"compiler": simulate(program, v5p), "a < b": simulate(other, v5p)}
    page = compile_page(found, schedules)
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert parser.heads[0] == "The step by its schedule"
    assert "<b>compiler</b>" in page and "<b>a &lt; b</b>" in page
