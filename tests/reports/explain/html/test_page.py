"""The page in a browser: it opens, sorts, filters and folds, and asks the network for nothing."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest

import meshdsl as md
from meshdsl.lowering.costs.units import show_bytes, show_seconds
from meshdsl.reports.explain import compare, explain
from tests.lowering.pipelining.steps import GPT, lower
from tests.reports.explain.steps import LARGE, MEGATRON, explained
from tests.reports.fitting import misfits, overlaps

FOUR_AXES = "slice@dcn:2,data:8,fsdp:4,model:8"
HEADS = "[...document.querySelectorAll('{} thead th')].map(h => h.textContent)"
CELLS = (
    "[...document.querySelectorAll('{} tbody tr:not([hidden])')]"
    ".map(r => [...r.cells].map(c => [c.textContent.trim(), c.dataset.order ?? null]))"
)


@pytest.fixture
def show(chromium, tmp_path):
    """Returns a function that opens a report in the browser."""

    def opened(report):
        file = tmp_path / "report.html"
        file.write_text(report if isinstance(report, str) else report.html(), encoding="utf-8")
        chromium.call("Emulation.clearDeviceMetricsOverride")
        chromium.dark(False)
        chromium.open(file)
        assert chromium.problems == []
        assert chromium.requests == [file.as_uri()]
        return chromium

    return opened


def comparison():
    first, second = explained()[1], explained(layout=f"{MEGATRON}; length:model?")[1]
    return compare(first, second)


def report_of(kind):
    """Returns a report of one of `KINDS`."""
    n, m = md.dims(n=8, m=4)
    if kind == "comparison":
        return comparison()
    if kind == "four axes":
        layout = "batch:slice+data; heads:model; embed:fsdp"
        return explained(mesh=FOUR_AXES, layout=layout)[1]
    if kind == "pipeline":
        return explain(lower(GPT, 8, "pipe:2", "layers:pipe"))
    if kind in STEPS:
        return explained(**STEPS[kind])[1]
    if kind == "tiny":
        f = md.jit(lambda x: md.sum(x, "n"), "data:2", "n:data")
        return explain(f.lower(md.spec([n, m])))
    if kind == "view":
        return explain(md.jit(lambda x: x.rename(n="k")).lower(md.spec([n, m])))
    assert kind == "nothing"
    return explain(md.jit(lambda: md.zeros([n])).lower())


STEPS = {
    "step": {},
    "one device": {"mesh": None, "layout": None},
    "large": {"mesh": "data:64 model:8", **LARGE},
    "pads": {"mesh": "data:2 model:3"},
}
KINDS = (*STEPS, "four axes", "pipeline", "tiny", "view", "nothing", "comparison")


class Checker(HTMLParser):
    """Checks that elements are closed in order; collects ids and attributes that would fetch."""

    void = frozenset(["meta", "input", "wbr"])

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.fetching = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, name, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.fetching += [a for a in ("src", "href", "srcset", "data", "action") if a in found]
        assert name not in ("link", "img", "iframe", "object", "base")
        if name not in self.void:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        assert name in ("path", "line", "rect")

    def handle_endtag(self, name):
        assert self.open.pop() == name


@pytest.mark.parametrize("kind", KINDS)
def test_every_report_opens_without_an_error_or_a_request(show, kind):
    report = report_of(kind)
    text = report.html()
    found = Checker(text)
    assert found.fetching == [] and found.ids == []
    assert not re.search(r"https?:|@import|url\(", text)
    browser = show(report)
    assert report.name in browser.evaluate("document.querySelector('h1').textContent")
    assert browser.evaluate("document.querySelectorAll('.meshdsl[data-ready]').length") == 1


def test_the_browser_keeps_record_of_what_a_page_asks_for(chromium, tmp_path):
    file = tmp_path / "asking.html"
    file.write_text("<img src='http://example.invalid/a.png'><script>undefined_name()</script>")
    chromium.open(file)
    assert "http://example.invalid/a.png" in chromium.requests
    assert "undefined_name is not defined" in chromium.problems[0]


def tables(browser):
    """Returns the names of the tables that are shown, folded ones too."""
    return browser.evaluate(
        "[...document.querySelectorAll('table')].map(t => t.getAttribute('aria-label'))"
    )


def key_of(cell):
    """Returns what a cell should be sorted by: its number, or the words and numbers of its text."""
    text, order = cell
    if order is not None:
        return float(order)
    parts = re.split(r"(\d+)", text.lower())
    return [int(part) if part.isdigit() else re.sub(r"\W", "", part) for part in parts]


def test_every_column_sorts_both_ways(show):
    browser = show(explained()[1])
    table = "table[aria-label=collectives]"
    heads = browser.evaluate(HEADS.format(table))
    assert heads[:3] == ["phase", "collective", "name in source"] and heads[-1] == "line"
    before = browser.evaluate(CELLS.format(table))
    for column, head in enumerate(heads):
        for _ in range(2):
            browser.click(f"{table} th:nth-child({column + 1}) button")
            rows = browser.evaluate(CELLS.format(table))
            assert sorted(map(json.dumps, rows)) == sorted(map(json.dumps, before))
            sorted_as = browser.evaluate(
                f"document.querySelectorAll('{table} th')[{column}].getAttribute('aria-sort')"
            )
            numeric = rows[0][column][1] is not None
            keys = [key_of(row[column]) for row in rows]
            if numeric or head in ("phase", "collective", "over"):
                assert keys == sorted(keys, reverse=sorted_as == "descending"), (head, keys)
            else:
                assert (
                    keys != [key_of(row[column]) for row in before] or len(set(map(str, keys))) < 3
                )
    assert browser.evaluate(f"document.querySelectorAll('{table} th[aria-sort]').length") == 1


def test_the_box_filters_rows_and_the_total_follows(show):
    _, report = explained(layout=f"{MEGATRON}; length:model?")
    browser = show(report)
    holder = "section:has(table[aria-label=collectives])"
    browser.click(f"{holder} input")
    browser.type("all_gather FORWARD")
    rows = browser.evaluate(CELLS.format(f"{holder} table"))
    expected = [t for t in report.traffic if t.kind == "all_gather" and t.phase == "forward"]
    assert len(rows) == len(expected) < len(report.traffic)
    assert {tuple(cell[0] for cell in row[:2]) for row in rows} == {("forward", "all_gather")}
    count = browser.evaluate(f"document.querySelector('{holder} .count').textContent")
    assert count == f"{len(expected)} of {len(report.traffic)} rows"
    total = browser.evaluate(f"document.querySelector('{holder} tfoot .sum').textContent")
    assert total == show_bytes(sum(t.wire_bytes for t in expected))


def test_loops_unfold_by_their_summary_and_by_their_segment(show):
    browser = show(explained()[1])
    folds = "[...document.querySelectorAll('details.fold:not(.plain)')].map(d => d.open)"
    assert browser.evaluate(folds) == [False, False]
    browser.click("details.fold summary")
    assert browser.evaluate(folds) == [True, False]
    inner = "document.querySelector('details[open] .segment').getBoundingClientRect().height > 30"
    assert browser.evaluate(inner)
    browser.click(".segment[data-loop='1']")
    assert browser.evaluate(folds) == [True, True]


def test_the_strip_is_to_scale_and_without_gaps(show):
    _, report = explained()
    browser = show(report)
    spans = browser.evaluate(
        "(() => { const s = document.querySelector('.strip'), w = s.getBoundingClientRect();"
        "return [...s.querySelectorAll('.segment')].map(e => { const r = e.getBoundingClientRect();"
        "return [(r.left - w.left) / w.width, r.width / w.width, e.dataset.loop ?? null]; }); })()"
    )
    assert spans[0][0] == pytest.approx(0, abs=1e-3)
    assert spans[-1][0] + spans[-1][1] == pytest.approx(1, abs=1e-3)
    for one, other in itertools.pairwise(spans):
        assert one[0] + one[1] == pytest.approx(other[0], abs=1e-3)
    loops = [i for i in report.timeline.intervals if i.inside]
    drawn = [width for _, width, loop in spans if loop is not None]
    shares = [i.seconds / report.timeline.seconds for i in loops]
    assert drawn == pytest.approx(shares, abs=1e-3)


def test_intervals_are_read_with_the_mouse_and_with_the_keys(show):
    _, report = explained()
    browser = show(report)
    told = "document.querySelector('section > .told').textContent"
    assert browser.evaluate(told) == ""
    browser.click(".segment[data-loop='0']")
    assert browser.evaluate(told).startswith("scan layers ×4: ")
    browser.evaluate("document.querySelector('.strip').focus()")
    browser.press("Home")
    first = report.timeline.intervals[0]
    assert browser.evaluate(told).startswith(f"{first.name}: ")
    assert "steps.py:" in browser.evaluate(told)
    browser.press("End")
    last = browser.evaluate(told)
    browser.press("ArrowLeft")
    assert browser.evaluate(told) != last
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = false)")
    browser.press("Home")
    while "scan" not in browser.evaluate(told):
        browser.press("ArrowRight")
    browser.press("Enter")
    assert browser.evaluate("document.querySelectorAll('details[open]').length") == 1


def test_the_peak_is_marked_where_the_curve_is_highest(show):
    _, report = explained(batch=512)
    browser = show(report)
    mark = "document.querySelector('.memory .mark')"
    peak, room = report.memory.peak_bytes, report.timeline.hardware.memory_bytes
    says = f"peak {show_bytes(peak)} of {show_bytes(room)}"
    assert browser.evaluate(f"{mark}.textContent") == says
    shape = browser.evaluate("document.querySelector('.memory .edge').getAttribute('d')")
    steps = [(float(y), float(x)) for y, x in re.findall(r"V([\d.]+)H([\d.]+)", shape)]
    top = min(y for y, _ in steps)
    left, bottom = browser.evaluate(
        f"[parseFloat({mark}.style.left), parseFloat({mark}.style.bottom)]"
    )
    assert 100 - bottom == pytest.approx(top, abs=0.1)
    place = next(n for n, (_, x) in enumerate(steps) if 10 * left <= x)
    assert steps[place][0] == top


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read_in_light_and_in_dark(show, dark):
    browser = show(explained()[1])
    browser.dark(dark)
    script = """(() => {
        const light = (text) => {
            const c = document.createElement('canvas').getContext('2d');
            c.fillStyle = text; c.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...c.getImageData(0, 0, 1, 1).data].slice(0, 3)
                .map((v) => v / 255)
                .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        };
        const paper = light(getComputedStyle(document.querySelector('.meshdsl')).backgroundColor);
        const shown = 'h1,.lead,td code,.quiet,th,.plain summary,.tile strong'.split(',');
        return [paper, ...shown.map(
            (s) => light(getComputedStyle(document.querySelector(s)).color))];
    })()"""
    paper, *inks = browser.evaluate(script)
    assert paper < 0.05 if dark else paper > 0.9
    for ink in inks:  # WCAG 2.2, success criterion 1.4.3
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5


@pytest.mark.long
@pytest.mark.parametrize("kind", ["four axes", "pipeline", "pads", "comparison"])
@pytest.mark.parametrize("width", [420, 800, 1300])
def test_nothing_is_cut_or_wider_than_its_box(show, width, kind):
    browser = show(report_of(kind))
    browser.screen(width)
    assert misfits(browser) == []
    assert overlaps(browser, ".ruler span, .phases i") == []


def test_on_a_narrow_screen_each_row_is_a_card_with_the_heads_beside_its_cells(show):
    _, report = explained()
    browser = show(report)
    browser.screen(420)
    first = "document.querySelector('table[aria-label=collectives] tbody tr')"
    heads = browser.evaluate(
        f"[...{first}.cells].map((one) => getComputedStyle(one, '::before').content)"
    )
    names = browser.evaluate(HEADS.format("table[aria-label=collectives]"))
    assert heads == [f'"{name}"' for name in names]
    lefts = browser.evaluate(f"[...{first}.cells].map((one) => one.getBoundingClientRect().left)")
    assert len(set(lefts)) == 1
    before = browser.evaluate(CELLS.format("table[aria-label=collectives]"))
    browser.click("table[aria-label=collectives] th:nth-child(8) button")
    after = browser.evaluate(CELLS.format("table[aria-label=collectives]"))
    wires = [float(row[7][1]) for row in after]
    assert wires == sorted(wires, reverse=True) and sorted(map(str, before)) == sorted(
        map(str, after)
    )


def test_the_figure_at_the_head_is_the_simulated_time(show):
    _, report = explained()
    tile = "document.querySelector('.tile')"
    text = show(report).evaluate(f"[...{tile}.children].map((one) => one.textContent)")
    assert text[:2] == ["step, simulated", show_seconds(report.simulated.seconds)]
    assert text[2].startswith(f"{show_seconds(report.timeline.seconds)} at the peaks")


@pytest.mark.parametrize("kind", ["four axes", "pipeline"])
def test_the_numbers_that_tell_equal_names_apart_are_small(show, kind):
    browser = show(report_of(kind))
    browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    sizes = browser.evaluate(
        "[...document.querySelectorAll('td code small')].filter((one) => one.offsetHeight)"
        ".map((one) => [one, one.parentElement]"
        ".map((each) => parseFloat(getComputedStyle(each).fontSize)))"
    )
    assert sizes and all(small < around for small, around in sizes)
    names = browser.evaluate("[...document.querySelectorAll('td code')].map((c) => c.textContent)")
    assert any(re.fullmatch(r"\w+\.\d+", name) for name in names)  # nothing of a name is lost


def test_everything_has_a_name_for_those_who_do_not_see_it(show):
    browser = show(explained()[1])
    for selector in ("table", "input", "svg[role=img]", ".strip"):
        names = browser.evaluate(
            f"[...document.querySelectorAll('{selector}')].map(e => e.getAttribute('aria-label'))"
        )
        assert names and all(names), selector
    levels = browser.evaluate(
        "[...document.querySelectorAll('h1,h2,h3')].map(e => Number(e.tagName[1]))"
    )
    assert levels[0] == 1 and levels.count(1) == 1
    assert browser.evaluate("[...document.querySelectorAll('button')].every(b => b.textContent)")


def test_names_of_a_program_are_never_markup(show):
    n = md.dims(n=4)[0]
    evil = "<img src=x onerror='document.title = 1'>"
    tree = {"params": {evil: md.spec([n]), "</script><b>": md.spec([n])}}

    def f(given):
        return {key: md.sin(value) for key, value in given["params"].items()}

    browser = show(explain(md.jit(f).lower(tree)))
    assert browser.evaluate("document.querySelectorAll('img, td b').length") == 0
    assert browser.evaluate("document.title") == "f"
    assert evil in browser.evaluate("document.querySelector('main').textContent")


def test_four_axes_and_512_devices_are_drawn_by_axes(show):
    report = report_of("four axes")
    assert report.mesh.size == 512 and len(report.html()) < 400_000
    browser = show(report)
    table = "table[aria-label=parameters]"
    assert browser.evaluate(HEADS.format(table))[3:7] == ["slice", "data", "fsdp", "model"]
    most = "Math.max(...[...document.querySelectorAll('.pieces')].map(p => p.children.length))"
    assert browser.evaluate(most) <= 8
    rows = browser.evaluate(CELLS.format(table))
    assert len(rows) == len(report.parameters)
    query = next(row for row in rows if row[0][0] == "blocks/query")
    assert [text for text, _ in query[3:7]] == ["2 copies", "8 copies", "embed ÷4", "heads ÷8"]


def test_two_reports_in_a_notebook_disturb_neither_it_nor_each_other(chromium, tmp_path):
    program, report = explained()
    around = (
        "<!doctype html><meta charset=utf-8><h1>mine</h1><p>text <code>code</code></p>"
        "<table class=sortable><thead><tr><th><button>b</button><th>c<tbody><tr><td>1<td>2</table>"
        "<details class=fold><summary>s</summary>d</details>"
    )
    file = tmp_path / "notebook.html"
    styles = (
        "JSON.stringify([...document.querySelectorAll('body > *:not(.meshdsl), "
        "body > *:not(.meshdsl) *')].map(e => ['color', 'font', 'padding', 'border', 'margin', "
        "'display', 'background'].map(p => getComputedStyle(e)[p])))"
    )
    file.write_text(around, encoding="utf-8")
    chromium.open(file)
    before = chromium.evaluate(styles)
    file.write_text(f"{around}{program._repr_html_()}{report._repr_html_()}", encoding="utf-8")
    chromium.open(file)
    assert chromium.problems == [] and chromium.requests == [file.as_uri()]
    assert chromium.evaluate(styles) == before
    assert chromium.evaluate("document.querySelectorAll('.meshdsl[data-ready]').length") == 2
    assert chromium.evaluate("document.querySelectorAll('[id]').length") == 0
    chromium.click(".meshdsl:last-of-type table[aria-label=collectives] th:nth-child(6) button")
    sorted_in = (
        "[...document.querySelectorAll('.meshdsl')].map(r => !!r.querySelector('[aria-sort]'))"
    )
    assert chromium.evaluate(sorted_in) == [False, True]


def test_a_notebook_decides_between_light_and_dark_not_the_machine(chromium, tmp_path):
    file = tmp_path / "notebook.html"
    colour = "getComputedStyle(document.querySelector('.meshdsl')).backgroundColor"
    found = {}
    for theme in ("true", "false"):
        fragment = explained()[0]._repr_html_()
        file.write_text(f"<!doctype html><body data-jp-theme-light={theme}>{fragment}")
        for machine in (False, True):
            chromium.dark(machine)
            chromium.open(file)
            found[theme, machine] = chromium.evaluate(colour)
    assert found["true", False] == found["true", True] == "rgb(255, 255, 255)"
    assert found["false", False] == found["false", True] != "rgb(255, 255, 255)"


def test_two_layouts_are_drawn_to_one_scale(show):
    found = comparison()
    browser = show(found)
    widths = browser.evaluate(
        "[...document.querySelectorAll('main > section .strip')].map(s => {"
        "const w = s.getBoundingClientRect(); const r = s.lastChild.getBoundingClientRect();"
        "return (r.right - w.left) / w.width; })"
    )
    seconds = [found.before.timeline.seconds, found.after.timeline.seconds]
    assert widths == pytest.approx([one / max(seconds) for one in seconds], abs=2e-3)
    table = 'table[aria-label="changed collectives"]'
    rows = browser.evaluate(CELLS.format(table))
    assert len(rows) == len(found.traffic)
    assert {row[0][0] for row in rows} == {one.what for one in found.traffic}
    more = browser.evaluate(HEADS.format(table)).index("more")
    browser.click(f"{table} th:nth-child({more + 1}) button")
    orders = [float(row[more][1]) for row in browser.evaluate(CELLS.format(table))]
    assert orders == sorted(orders, reverse=True)
    names = tables(browser)
    assert names.count("parameters") == 2 and names.count("totals") == 1
