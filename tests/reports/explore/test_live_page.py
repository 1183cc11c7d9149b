"""The page with its process: it asks for what it lacks, and says what becomes of that."""

import json
import threading
import time

import pytest

pytest.importorskip("uvicorn")

from meshdsl.cli.exploring.computing import Impossible
from meshdsl.cli.exploring.live import Offer, application
from meshdsl.cli.exploring.newest import Newest
from meshdsl.layouts.layout import Layout
from meshdsl.reports.explain.values import as_values
from meshdsl.reports.explore.choices import Choice
from meshdsl.reports.explore.packing import Packing
from meshdsl.reports.explore.page import page
from tests.cli.exploring.served import served
from tests.reports.explain.steps import explained
from tests.reports.explore.test_page import BASE, CHOICES, FOUND, HEAD, MESH, choose, text

OFFER = Offer(4, (1, 2), ("", "full"))
REASON = "layout does not fit this program\n\n  1. `btach:data` ... Did you mean `batch`?"
OTHER = f"{BASE}; vocab:model?"
LINE = "document.querySelector('input.line')"


@pytest.fixture(scope="module")
def plans():
    """Returns the values of some choices of a step."""
    return [(one, as_values(explained(mesh=one.mesh, layout=one.layout)[1])) for one in CHOICES[:4]]


class Computing:
    """Stands for the computing of plans: what it computed, and a gate.

    It also counts what came, before it is computed or replaced.
    """

    def __init__(self, values, monkeypatch):
        self.values, self.asked, self.gate = values, [], threading.Event()
        self.gate.set()
        self.came = 0

        def ask(newest, choice):
            self.came += 1
            return Newest.ask(newest, choice)

        counting = type("Counting", (Newest,), {"ask": ask})
        monkeypatch.setattr("meshdsl.cli.exploring.live.Newest", counting)

    def wait(self, count):
        """Waits until so many choices have come, and the first of them is being computed."""
        end = time.monotonic() + 60
        while self.came < count or not self.asked:
            assert time.monotonic() < end
            time.sleep(0.01)

    def __call__(self, choice):
        self.asked.append(choice)
        assert self.gate.wait(60)
        return Impossible(REASON) if "btach" in choice.layout else self.values


@pytest.fixture
def live(chromium, plans, monkeypatch):
    """Returns a browser that shows the page of a process, and the computing behind it.

    The answer to what was not computed ahead is the fastest plan of all.
    """
    packing = Packing(HEAD | {"live": {"microbatches": [1, 2], "remats": ["", "full"]}})
    for choice, values in plans:
        packing.add(choice, values)
    least = min(seconds for seconds, _ in packing.places.values())
    computing = Computing(plans[0][1] | {"seconds": least / 2}, monkeypatch)
    chromium.screen(1300)
    chromium.dark(False)
    with served(application(page(packing)[0], OFFER, computing)) as port:
        chromium.open(f"http://127.0.0.1:{port}/")
        until(chromium, "document.querySelector('[data-explored]') !== null")
        assert chromium.problems == []
        yield chromium, computing
        computing.gate.set()


def until(browser, script):
    """Waits until an expression is true in the page."""
    end = time.monotonic() + 60
    while not browser.evaluate(script):
        assert time.monotonic() < end, script
        time.sleep(0.01)


def write(browser, layout):
    """Writes a layout as a user does."""
    browser.evaluate(f"{LINE}.focus(); {LINE}.select()")
    browser.type(layout)


def missing(browser):
    return text(browser, ".view-missing h2")


def test_a_layout_that_was_not_computed_is_asked_for_and_shown(live, plans):
    browser, computing = live
    computing.gate.clear()
    write(browser, OTHER)
    assert missing(browser) == "This plan is being computed"
    assert "being computed" in text(browser, ".tiles")
    computing.gate.set()
    until(browser, f"{FOUND} === '{len(plans)}'")
    assert computing.asked == [Choice(MESH, OTHER)]
    assert browser.evaluate("document.querySelector('.view-missing').offsetHeight") == 0
    assert "the fastest that fits" in text(browser, ".tiles")
    rows = browser.evaluate("document.querySelectorAll('.view-sent tbody tr').length")
    assert rows == len(plans[0][1]["sent"])
    marks = browser.evaluate("document.querySelectorAll('.view-front circle.plan').length")
    assert marks > len(plans) + 1  # each plan, and those on the front once more
    browser.evaluate(f"{LINE}.blur()")
    choose(browser, "heads", "")
    choose(browser, "d_ff", "")
    until(browser, f"{FOUND} === '{len(plans) + 1}'")
    browser.click(".fastest")
    assert browser.evaluate(FOUND) == str(len(plans))
    assert len(computing.asked) == 2  # it remembers what it has
    assert browser.problems == []


def test_what_does_not_fit_says_why_in_the_words_of_meshdsl(live, plans):
    browser, _ = live
    write(browser, "btach:data")
    until(browser, f"{FOUND} === '{len(plans)}'")
    assert missing(browser) == "This layout does not fit the model"
    assert "Did you mean batch?" in text(browser, ".view-missing .reason")


def test_nothing_is_asked_for_while_the_user_goes_on_writing(live):
    browser, computing = live
    for end in range(len(BASE) + 2, len(OTHER) + 1):
        browser.evaluate(f"{LINE}.value = {json.dumps(OTHER[:end])}")
        browser.evaluate(f"{LINE}.dispatchEvent(new Event('input'))")
    until(browser, f"{FOUND} !== ''")
    assert [one.layout for one in computing.asked] == [OTHER]


def test_the_newest_choice_is_shown_though_others_were_asked_for(live):
    browser, computing = live
    computing.gate.clear()
    layouts = [f"batch:data; {dim}:model" for dim in ("vocab", "kv", "embed")]
    for count, layout in enumerate(layouts, 1):
        write(browser, layout)
        computing.wait(count)
    computing.gate.set()
    until(browser, f"{FOUND} !== ''")
    assert [one.layout for one in computing.asked] == [layouts[0], layouts[2]]
    assert "embed:model" in text(browser, ".command")
    write(browser, layouts[0])  # it was computed, and is known
    assert browser.evaluate(FOUND) != ""


def test_a_choice_that_was_replaced_is_asked_for_again_when_it_is_the_newest(live):
    browser, computing = live
    computing.gate.clear()
    layouts = [f"batch:data; {dim}:model" for dim in ("vocab", "kv", "embed", "kv")]
    for count, layout in enumerate(layouts, 1):
        write(browser, layout)
        computing.wait(count)
    computing.gate.set()
    until(browser, f"{FOUND} !== ''")
    assert [one.layout for one in computing.asked] == layouts[:2]


def test_the_mesh_and_the_flags_that_are_offered_are_asked_for(live):
    browser, computing = live
    choose(browser, "microbatches", "2")
    until(browser, f"{FOUND} !== ''")
    choose(browser, "remat", "full")
    until(browser, f"{FOUND} !== ''")
    write(browser, "data:1 model:4 | heads:model")
    until(browser, f"{FOUND} !== ''")
    assert computing.asked == [
        Choice(MESH, BASE, 2),
        Choice(MESH, BASE, 2, "full"),
        Choice("data:1 model:4", "heads:model", 2, "full"),
    ]
    write(browser, "model:8 | heads:model")
    until(browser, f"{FOUND} !== ''")
    assert "has 8 devices, and all plans of this page have 4" in text(browser, ".reason")


def test_a_process_that_has_gone_is_named_and_asked_again(live, chromium):
    browser, computing = live
    browser.call("Network.emulateNetworkConditions", offline=True, latency=0,
                 downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
    write(browser, OTHER)
    until(browser, "document.querySelector('.again') !== null")
    assert missing(browser) == "This plan was not computed"
    assert "The process of this page does not answer" in text(browser, ".view-missing")
    browser.call("Network.emulateNetworkConditions", offline=False, latency=0,
                 downloadThroughput=-1, uploadThroughput=-1)  # fmt: skip
    browser.click(".again")
    until(browser, f"{FOUND} !== ''")
    assert [one.layout for one in computing.asked] == [OTHER]


def test_another_page_that_asks_meanwhile_is_named(live):
    browser, computing = live
    computing.gate.clear()
    other = json.dumps(json.dumps({"mesh": MESH, "layout": "", "microbatches": 2, "remat": ""}))
    post = f"void fetch('plan', {{method: 'POST', body: {other}}})"
    browser.evaluate(post)
    computing.wait(1)
    write(browser, OTHER)
    computing.wait(2)
    browser.evaluate(post)
    until(browser, "document.querySelector('.again') !== null")
    assert "Another page has asked the same process" in text(browser, ".view-missing")
    assert [one.layout for one in computing.asked] == [""]


def test_the_front_is_that_of_the_command_line(live, plans):
    browser, computing = live
    write(browser, OTHER)
    until(browser, f"{FOUND} === '{len(plans)}'")
    packing = Packing(HEAD)
    for choice, values in [*plans, (Choice(MESH, OTHER), computing.values)]:
        packing.add(choice, values)
    browser.evaluate("document.querySelector('.view-front svg').focus()")
    browser.click(".fastest")
    seen = [int(browser.evaluate(FOUND))]
    browser.evaluate("document.querySelector('.view-front svg').focus()")
    for _ in range(len(packing.front)):
        browser.press("ArrowRight")
        seen.append(int(browser.evaluate(FOUND)))
    assert seen == [*packing.front, packing.front[-1]]


@pytest.mark.parametrize(
    "wrong", ["batch=data; heads:model", "batch:data; batch:model; heads", "heads:model+model"]
)
def test_a_layout_that_cannot_be_read_is_told_as_meshdsl_tells_it(live, wrong):
    browser, computing = live
    write(browser, wrong)
    with pytest.raises(ValueError, match="malformed layout") as error:
        Layout.parse(wrong)
    reasons = str(error.value).split("^\n  ")[-1].split("\n  ")
    assert text(browser, ".problem") == "; ".join(reasons).replace("`", "")
    assert not computing.asked


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [420, 1300])
def test_nothing_is_wider_than_the_screen_while_it_waits(live, width, dark):
    browser, computing = live
    browser.screen(width)
    browser.dark(dark)
    computing.gate.clear()
    write(browser, f"{OTHER}; " + "; ".join(f"a_long_name_of_a_dim_{n}:model" for n in range(9)))
    assert missing(browser) == "This plan is being computed"
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    shown = browser.evaluate("document.querySelector('.waiting').getBoundingClientRect().width")
    assert shown > width / 3
