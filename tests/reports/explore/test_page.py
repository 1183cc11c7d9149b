"""The page in a browser: every edit shows its plan, by mouse and keyboard, on any screen."""

import copy
import itertools
import json

import pytest

from meshdsl.reports.explain.values import as_values
from meshdsl.reports.explore.choices import Choice
from meshdsl.reports.explore.packing import Packing
from meshdsl.reports.explore.page import page
from tests.reports.explain.steps import explained

BASE = "batch:data; heads:model; d_ff:model"
MESH = "data:2 model:2"
CHOICES = [
    Choice(MESH, BASE),
    Choice(MESH, "batch:data; heads:model"),
    Choice(MESH, "batch:data"),
    Choice(MESH, f"{BASE}; length:model?"),
    Choice("data:4", "batch:data"),
    Choice("model:4", "heads:model; d_ff:model"),
    Choice(MESH, f"{BASE}; params/embed:data"),
]
HEAD = {
    "model": "transformer (layers=4)",
    "batch": "8 × 16",
    "machine": "4 devices of TPU v5p",
    "memory_bytes": 95 * 2**30,
    "command": ["--model=transformer"],
    "dims": [["batch", 8], ["length", 16], ["heads", 4], ["d_ff", 64], ["embed", 32]],
    "meaning": {part: part for part in as_values(explained()[1])["memory"]},
}
FOUND = "document.querySelector('.meshdsl').dataset.plan"
REFUSED = Choice(MESH, f"{BASE}; embed:data")


@pytest.fixture(scope="module")
def plans():
    """Returns the values of some choices of a step."""
    return [(one, as_values(explained(mesh=one.mesh, layout=one.layout)[1])) for one in CHOICES]


def many():
    """Yields many choices."""
    dims = ["batch", "length", "heads", "d_ff", "embed", "kv", "vocab"]
    for axes in itertools.product(["", "data", "model", "model?"], repeat=len(dims)):
        rules = [f"{dim}:{axis}" for dim, axis in zip(dims, axes, strict=True) if axis]
        yield Choice(MESH, "; ".join(rules))


def packed(plans, more=0, **head):
    packing = Packing(HEAD | head)
    for choice, values in plans:
        packing.add(choice, values)
    packing.refuse(REFUSED, "both claim mesh axis `data`")
    known = {one.key for one in packing.choices}
    others = (one for one in many() if one.key not in known)
    for number, choice in enumerate(itertools.islice(others, more)):
        values = copy.copy(plans[number % len(plans)][1])
        values["seconds"] = values["seconds"] * (2 + number / more)
        values["peak_bytes"] = values["peak_bytes"] * (2 + number / more)
        packing.add(choice, values)
    return packing


@pytest.fixture
def show(chromium, tmp_path):
    """Returns a function that opens the page of a packing, on a screen of some width."""

    def opened(packing, width=1300, dark=False):
        file = tmp_path / "explore.html"
        file.write_text(page(packing)[0], encoding="utf-8")
        chromium.screen(width)
        chromium.dark(dark)
        chromium.open(file)
        while not chromium.evaluate("document.querySelector('[data-explored]') !== null"):
            assert chromium.problems == []
        assert chromium.problems == [] and chromium.requests == [file.as_uri()]
        return chromium

    return opened


def choose(browser, selector, value):
    """Chooses an option as a user does; returns how long that took, in milliseconds."""
    return browser.evaluate(
        f"(() => {{ const select = [...document.querySelectorAll('.dims label')].find((one) =>"
        f" one.textContent.startsWith({json.dumps(selector)}))?.querySelector('select')"
        f" || document.querySelector({json.dumps('select.' + selector)});"
        f" const start = performance.now(); select.value = {json.dumps(value)};"
        " select.dispatchEvent(new Event('change')); return performance.now() - start; })()"
    )


def text(browser, selector):
    return browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


def shown(browser):
    return int(browser.evaluate(FOUND))


def test_every_plan_shows_its_own_figures(show, plans):
    browser = show(packed(plans))
    for number, (choice, values) in enumerate(plans):
        choose(browser, "mesh", choice.mesh)
        line = "document.querySelector('input.line')"
        browser.evaluate(f"{line}.value = {json.dumps(choice.layout)}")
        browser.evaluate(f"{line}.dispatchEvent(new Event('input'))")
        assert shown(browser) == number
        tiles = text(browser, ".tiles")
        collectives = values["collectives"]
        assert f"{collectives} collective" in tiles
        rows = browser.evaluate("document.querySelectorAll('.view-sent tbody tr').length")
        assert rows == len(values["sent"])
        assert values["limit"] in text(browser, ".limits")
        command = text(browser, ".command")
        assert f"--mesh_shape={choice.mesh.replace(' ', ',')}" in command
        assert command.startswith("meshdsl explain --model=transformer ")
        assert ";" not in choice.layout or f'--layout="{choice.layout}"' in command


def test_edits_of_dims_and_of_the_line_find_the_same_plans(show, plans):
    browser = show(packed(plans))
    assert shown(browser) == 0
    choose(browser, "d_ff", "")
    assert shown(browser) == 1
    choose(browser, "heads", "")
    assert shown(browser) == 2
    choose(browser, "heads", "model")
    choose(browser, "d_ff", "model")
    choose(browser, "length", "model?")
    assert shown(browser) == 3
    browser.evaluate("document.querySelector('input.line').focus()")
    browser.evaluate("document.querySelector('input.line').select()")
    browser.type("d_ff:model;  heads:model, batch:data")
    assert shown(browser) == 0
    browser.evaluate("document.querySelector('input.line').select()")
    browser.type("data:4 | batch:data")
    assert shown(browser) == 4
    assert text(browser, ".problem") == ""


def test_a_wrong_line_says_what_is_wrong_and_keeps_the_plan(show, plans):
    browser = show(packed(plans))
    browser.evaluate("document.querySelector('input.line').focus()")
    browser.evaluate("document.querySelector('input.line').select()")
    browser.type("batch=data; heads:model; heads:data")
    assert "batch=data is not of the form" in text(browser, ".problem")
    assert "heads is given twice" in text(browser, ".problem")
    assert shown(browser) == 0


def test_a_plan_that_was_not_computed_has_its_command_and_its_neighbours(show, plans):
    browser = show(packed(plans))
    choose(browser, "embed", "model")
    assert browser.evaluate(FOUND) == ""
    assert "not computed" in text(browser, ".tiles")
    assert text(browser, ".view-missing h2") == "This plan was not computed"
    assert "embed:model" in text(browser, ".command")
    browser.click(".near button")
    assert shown(browser) == 0
    assert browser.evaluate("document.querySelector('.view-missing').offsetHeight") == 0


def test_a_choice_that_is_no_plan_says_why(show, plans):
    browser = show(packed(plans))
    choose(browser, "embed", "data")
    assert shown(browser) == len(plans)
    assert text(browser, ".view-missing .reason") == "both claim mesh axis data"
    options = browser.evaluate(
        "[...document.querySelectorAll('.dims label')].find((one) =>"
        " one.textContent.startsWith('embed')).querySelector('select').innerText"
    )
    assert "data ✕" in options and "model ·" in options


def test_controls_without_a_choice_are_not_shown(show, plans):
    browser = show(packed(plans))
    for name in ("microbatches", "remat"):
        assert browser.evaluate(f"document.querySelector('select.{name}').offsetHeight") == 0


@pytest.mark.parametrize("room", [95 * 2**30, 1])
def test_the_buttons_choose_the_fastest_and_the_smallest(show, plans, room):
    browser = show(packed(plans, memory_bytes=room))
    browser.click(".fastest")
    assert shown(browser) == min(range(len(plans)), key=lambda n: plans[n][1]["seconds"])
    assert ("none fits" in text(browser, ".fastest")) == (room == 1)
    assert ("does not fit" in text(browser, ".tiles")) == (room == 1)
    browser.click(".smallest")
    least = min(values["peak_bytes"] for _, values in plans)
    assert plans[shown(browser)][1]["peak_bytes"] == least


def test_the_pareto_front_is_reached_with_the_arrow_keys(show, plans):
    packing = packed(plans)
    browser = show(packing)
    browser.evaluate("document.querySelector('.view-front svg').focus()")
    browser.click(".fastest")
    browser.evaluate("document.querySelector('.view-front svg').focus()")
    seen = [shown(browser)]
    for _ in packing.front[1:]:
        browser.press("ArrowRight")
        seen.append(shown(browser))
    assert seen == packing.front
    browser.press("ArrowLeft")
    assert shown(browser) == packing.front[max(len(seen) - 2, 0)]


def test_a_click_on_a_mark_chooses_its_plan_and_moves_nothing(show, plans):
    browser = show(packed(plans))
    where = "document.querySelector('.view-front svg').getBoundingClientRect().top + scrollY"
    before = browser.evaluate(where)
    chosen = set()
    for number in range(len(plans)):
        browser.click(f".view-front circle.plan:not(.ahead):nth-of-type({number + 1})")
        chosen.add(shown(browser))
        assert browser.evaluate(where) == before
    assert len(chosen) > 2


def test_the_tab_key_reaches_every_control_and_shows_where_it_is(show, plans):
    browser = show(packed(plans))
    wanted = browser.evaluate(
        "[...document.querySelectorAll('select, input, button, summary, svg[tabindex]')]"
        ".filter((one) => one.getClientRects().length).length"
    )
    seen = browser.evaluate(
        "(() => { const all = [...document.querySelectorAll('select, input, button, summary,"
        " svg[tabindex]')].filter((one) => one.getClientRects().length);"
        " return all.filter((one) => { one.focus({focusVisible: true});"
        " return document.activeElement === one"
        " && getComputedStyle(one).outlineStyle !== 'none'; }).length; })()"
    )
    assert seen == wanted > 20


def test_a_tensor_shows_the_block_of_each_device(show, plans):
    browser = show(packed(plans))
    rows = [one for one in plans[0][1]["inputs"] if one["part"] == "parameters"]
    split = next(one for one in rows if any(dim["axes"] for dim in one["dims"]))
    assert text(browser, ".view-where h3") == split["path"]
    assert browser.evaluate("document.querySelectorAll('.device').length") == 4
    dim = next(dim for dim in split["dims"] if dim["axes"])
    words = text(browser, ".devices")
    for block in range(dim["size"] // dim["local"]):
        first = block * dim["local"]
        assert f"{dim['name']} {first}–{first + dim['local'] - 1}" in words
    browser.click(".view-where tbody tr:last-child button.path")
    assert text(browser, ".view-where h3") == rows[-1]["path"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [420, 800, 1300])
def test_nothing_is_cut_off_or_wider_than_the_screen(show, plans, width, dark):
    browser = show(packed(plans), width, dark)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    wide = browser.evaluate(
        "[...document.querySelectorAll('.scroll, .tile, .view, .choice, .command')]"
        ".filter((one) => one.scrollWidth > one.clientWidth + 1)"
        ".map((one) => one.className + ': ' + one.textContent.slice(0, 60))"
    )
    assert wide == []
    outside = browser.evaluate(
        "[...document.querySelectorAll('.view svg')].flatMap((svg) => {"
        " const box = svg.getBoundingClientRect(); return [...svg.querySelectorAll('text')].filter("
        "(one) => { const own = one.getBoundingClientRect(); return own.left < box.left - 1 ||"
        " own.right > box.right + 1; }).map((one) => one.textContent); })"
    )
    assert outside == []


def test_views_do_not_lie_over_each_other(show, plans):
    browser = show(packed(plans), 420)
    boxes = browser.evaluate(
        "[...document.querySelectorAll('section')].filter((one) => one.offsetHeight).map((one) => {"
        " const box = one.getBoundingClientRect();"
        " const inner = [...one.querySelectorAll('svg')].map("
        "(svg) => svg.getBoundingClientRect().bottom);"
        " return [box.top, box.bottom, Math.max(0, ...inner)]; })"
    )
    for (_, bottom, inner), (top, _, _) in itertools.pairwise(boxes):
        assert bottom <= top + 1 and inner <= bottom + 1


@pytest.mark.long
def test_a_change_among_ten_thousand_plans_shows_at_once(show, plans):
    packing = packed(plans, 10_000)
    browser = show(packing)
    taken = sorted(choose(browser, "d_ff", value) for value in ["", "model"] * 6)
    assert shown(browser) == 0
    assert len(packing.choices) > 10_000
    print(f"a change takes {taken[len(taken) // 2]:.0f} ms, {taken[-1]:.0f} at most")  # by -s
