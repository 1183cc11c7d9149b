"""CSV, JSON, the table on a terminal, the plot and the page all show the same rows."""

import csv
import io
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from rich.console import Console

from meshdsl.reports.sweeps import tables
from meshdsl.reports.sweeps.page import Heading, page
from meshdsl.reports.sweeps.plot import plot
from meshdsl.reports.sweeps.ranking import ranked
from meshdsl.reports.sweeps.result import Result
from tests.reports.fitting import misfits, overlaps

GIB = 2**30
ONE = Result(
    "data:8",
    'batch:data; a<b"&',
    devices=8,
    seconds=1.0,
    estimated_seconds=1.0,
    overlapped_seconds=0.5,
    wire_bytes={"data": 4.0 * GIB},
    peak_bytes=GIB,
    planned_peak_bytes=GIB,
    fits=True,
    page="pages/one.html",
)
TWO = replace(ONE, layout="", seconds=2.0, wire_bytes={}, peak_bytes=9 * GIB, fits=False, page="")
THREE = replace(
    ONE,
    layout="batch:data+model",
    seconds=3.0,
    quartiles=(2.5, 3.5),
    wire_bytes={"data": 5.0 * GIB, "data+model": 1.0},
    notes=("a rule takes no axis", "more"),
    page="pages/three.html",
)
LOST = Result("data:8", "x:data", reason="no\ndim `x`, 2 > 1")
ROWS = ranked([THREE, LOST, ONE, TWO])
_LIMIT = "waiting for all_reduce over data+model (63 %)"
SVG = "{http://www.w3.org/2000/svg}"


def test_csv_has_every_figure_in_full():
    found = list(csv.DictReader(io.StringIO(tables.as_csv(ROWS))))
    assert [row["layout"] for row in found] == [ONE.layout, THREE.layout, "", "x:data"]
    assert [row["rank"] for row in found] == ["1", "2", "3", "4"]
    assert [row["front"] for row in found] == ["True", "False", "False", "False"]
    for row, one in zip(found, [ONE, THREE, TWO], strict=False):
        assert float(row["seconds"]) == one.seconds
        assert int(row["peak_bytes"]) == one.peak_bytes
        assert float(row["wire_bytes"]) == one.wire
        for axes in ("data", "data+model"):
            assert float(row[f"wire_bytes over {axes}"]) == one.wire_bytes.get(axes, 0.0)
    assert (found[1]["lower_quartile"], found[1]["upper_quartile"]) == ("2.5", "3.5")
    assert found[1]["notes"] == "a rule takes no axis\nmore"
    assert found[3]["reason"] == LOST.reason
    assert found[3]["wire_bytes"] == found[3]["seconds"] == found[3]["peak_bytes"] == ""


def test_json_has_the_facts_and_the_rows():
    found = json.loads(tables.as_json(ROWS, {"model": "gpt_mini"}))
    assert found["model"] == "gpt_mini"
    kept = ("rank", "front")
    rows = [{k: v for k, v in row.items() if k not in kept} for row in found["candidates"]]
    assert [Result.of_json(row) for row in rows] == [row.result for row in ROWS]
    assert [row["front"] for row in found["candidates"]] == [row.front for row in ROWS]


def test_without_candidates_the_files_are_empty_and_nothing_breaks():
    assert tables.as_csv([]).strip() == ""
    assert json.loads(tables.as_json([], {})) == {"candidates": []}
    assert plot([], {"": GIB}) == ""


def test_a_terminal_shows_times_bytes_by_axis_and_the_front():
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(tables.shown(ROWS, measured=False))
    head, *lines = console.export_text().splitlines()
    assert head.split() == ["#", "layout", "step", "data", "data+model", "peak"]
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert lines[0].split()[-7:] == ["s", "4.0", "GiB", "-", "1.0", "GiB", "front"]
    assert lines[2].rstrip().endswith("9.0 GiB  does not fit")


def test_machines_of_several_sizes_are_compared_by_what_a_step_costs():
    larger = replace(ONE, devices=4 * ONE.devices, topology="larger", seconds=ONE.seconds / 2)
    rows = ranked([larger, ONE])
    assert [row.result for row in rows] == [ONE, larger]  # twice as fast, for twice the cost
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(tables.shown(rows, measured=False))
    assert "devices × step" in console.export_text()


def test_a_long_reason_is_one_short_line():
    text = (
        "layout does not fit this program (2 problems)\n\n  1. `x:data` names a dim\n     it\n"
        "  2. more\n\n  mesh    data:8\n  layout  x:data"
    )
    assert tables.why(replace(LOST, reason=text)) == "1. `x:data` names a dim it 2. more"
    assert tables.why(LOST) == "no dim `x`, 2 > 1"
    assert len(tables.why(replace(LOST, reason="word " * 1000))) <= 300


def test_only_the_first_rows_are_on_a_terminal():
    many = ranked([replace(ONE, layout=f"x:a{n}", seconds=float(n)) for n in range(33)])
    assert tables.shown(many, measured=True).row_count == 30
    assert tables.left_out(many) == 3


def marks(svg):
    """Returns the place of the mark of each rank."""
    found = {}
    for circle in svg.iter(f"{SVG}circle"):
        rank = int(re.match(r"\d+", circle.find(f"{SVG}title").text).group())
        found[rank] = float(circle.get("cx")), float(circle.get("cy")), circle
    return found


def test_the_plot_has_a_mark_for_each_candidate_at_its_bytes():
    svg = ET.fromstring(plot(ROWS, {"": 2 * GIB}))
    found = marks(svg)
    assert found.keys() == {1, 2, 3}
    assert found[3][0] < found[1][0] < found[2][0]  # sends nothing, less, more
    assert found[3][1] < found[1][1] == found[2][1]  # more memory is higher
    assert found[3][2].get("fill") == "none"  # does not fit
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert "2.0 GiB: all there is" in texts and "0" in texts
    assert [link.get("href") for link in svg.iter(f"{SVG}a")] == [THREE.page, ONE.page]
    assert "1" in texts and not {"2", "3"} & set(texts)  # ranks of the front


def test_ranks_of_marks_close_together_share_a_label():
    def labels(*points):
        found = [
            replace(ONE, layout=f"x:a{n}", peak_bytes=held, wire_bytes={"data": sent})
            for n, (held, sent) in enumerate(points)
        ]
        svg = ET.fromstring(plot(ranked(found), {"": GIB}))
        return {text.text for text in svg.iter(f"{SVG}text")} & {"1", "2", "3", "1, 2", "1, 3"}

    far = (2**20, 2.0**40)
    assert labels((GIB, 2.0**20), (GIB - 1, 2.0**20 + 1), far) == {"1, 2", "3"}
    assert labels((GIB, 2.0**20), (2**25, 2.0**30), far) == {"1", "2", "3"}


def test_places_are_logarithmic():
    rows = [replace(ONE, layout=f"x:a{n}", wire_bytes={"data": 2.0**n}) for n in (10, 20, 30)]
    xs = [x for _, (x, _, _) in sorted(marks(ET.fromstring(plot(ranked(rows), {"": GIB}))).items())]
    assert math.isclose(xs[1] - xs[0], xs[2] - xs[1], abs_tol=0.02)


@pytest.mark.parametrize("rows", [[ONE], [TWO], [replace(ONE, peak_bytes=0)], [ONE, THREE, TWO]])
def test_any_rows_can_be_drawn(rows):
    svg = ET.fromstring(plot(ranked(rows), {"": 2 * GIB}))
    for x, y, _ in marks(svg).values():
        assert 0 <= x <= 1000 and 0 <= y <= 520


def test_the_page_links_every_report_and_tells_what_failed():
    text = page(ROWS, Heading("a sweep", "TPU v5p", "estimated", "planned", {"": 2 * GIB}))
    assert text.startswith("<!doctype html>") and "http://www.w3.org/2000/svg" in text
    assert not re.search(r'(?:src|href)="(?:https?:)?//', text)
    assert text.count('href="pages/one.html"') == text.count('href="pages/three.html"') == 2
    assert "batch:data; a&lt;b&quot;&amp;" in text
    assert "no\ndim `x`, 2 &gt; 1" in text


@pytest.mark.parametrize(
    "rooms", [{"": 2 * GIB}, {"": 80 * GIB}, {"v5e:4": 16 * GIB, "v5p:4x4x4": 95 * GIB}]
)
@pytest.mark.parametrize("width", [420, 1300])
def test_nothing_of_the_page_is_cut_or_lies_over_other_text(chromium, tmp_path, width, rooms):
    several = [
        replace(ONE, layout=f"batch:data; d_ff:model; embed:{n}", peak_bytes=GIB << n, limit=_LIMIT)
        for n in range(4)
    ]
    several += [
        replace(THREE, wire_bytes={"data": 3.0 * GIB * 2**n, "model": GIB / 3}) for n in range(9)
    ]
    heading = Heading("a sweep", "TPU v5p", "estimated", "planned", rooms)
    file = tmp_path / "page.html"
    file.write_text(page(ranked([*several, LOST]), heading), encoding="utf-8")
    chromium.open(file)
    chromium.screen(width)
    assert misfits(chromium) == []
    assert overlaps(chromium, "svg.plot > text") == []
