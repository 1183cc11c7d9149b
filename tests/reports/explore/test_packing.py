"""Packing: all figures of all plans are on the page, whatever its limit."""

import base64
import copy
import gzip
import json
import random

import pytest

from meshdsl.reports.explain.values import as_values
from meshdsl.reports.explore.choices import Choice, canonical
from meshdsl.reports.explore.packing import FIGURES, Packing, Pool, merged
from meshdsl.reports.explore.page import MOST_BYTES, page
from tests.reports.explain.steps import explained

HEAD = {
    "model": "mlp",
    "batch": "8",
    "machine": "4 devices of TPU v5p",
    "memory_bytes": 95 * 2**30,
    "command": ["--model=mlp"],
    "dims": [["batch", 8]],
    "meaning": {},
}


def decoded(text):
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.fixture(scope="module")
def values():
    """Returns the values of one plan."""
    return as_values(explained()[1])


def packed(values, count, seed=0):
    """Returns so many plans with figures that differ in all digits."""
    draw = random.Random(seed)
    packing = Packing(HEAD)
    for number in range(count):
        one = copy.deepcopy(values)
        one["seconds"] = round(draw.uniform(1e-3, 1e-2), 9)
        one["peak_bytes"] = draw.randrange(2**30, 2**37)
        for sent in one["sent"]:
            sent["wire_bytes"] = draw.randrange(2**30)
        for interval in one["intervals"]:
            interval["seconds"] *= draw.uniform(0.5, 2)
        packing.add(Choice("data:2 model:2", f"batch:data; d{number}:model"), one)
    return packing


def test_a_pool_keeps_each_value_once():
    pool = Pool()
    assert [pool.at(one) for one in ("a", [1, 2], "a", [1, 2], "b")] == [0, 1, 0, 1, 2]
    assert pool.values == ["a", [1, 2], "b"]


def test_the_front_has_the_plans_that_no_other_beats(values):
    packing = packed(values, 200)
    places = packing.places
    beaten = {
        one
        for one in places
        for other in places
        if other != one and all(a <= b for a, b in zip(places[other], places[one], strict=True))
    }
    assert sorted(packing.front) == sorted(set(places) - beaten)
    assert [places[n][0] for n in packing.front] == sorted(places[n][0] for n in packing.front)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.3, 0.0])
def test_with_less_room_details_go_and_figures_stay(values, share):
    packing = packed(values, 60)
    whole, _ = packing.text(10**9)
    limit = int(share * len(whole))
    text, detailed = packing.text(limit)
    document = decoded(text)
    assert len(text) <= limit or not detailed
    assert sum(1 for row in document["plans"] if row[5]) == detailed
    for row, original in zip(document["plans"], decoded(whole)["plans"], strict=True):
        assert row[4][: len(FIGURES)] == original[4][: len(FIGURES)]
    front = packing.front
    kept = [number for number in front if document["plans"][number][5]]
    assert kept == front[: len(kept)] and (kept == front or detailed == len(kept))
    assert (detailed == 60) == (share == 1.0)


@pytest.mark.long
def test_ten_thousand_plans_stay_below_the_limit(values):
    packing = packed(values, 10_000)
    text, detailed = page(packing)
    assert len(text.encode()) <= MOST_BYTES
    assert detailed >= len(packing.front)


def test_a_choice_that_is_no_plan_has_its_reason(values):
    packing = packed(values, 2)
    packing.refuse(Choice("data:4", "batch:data"), "there is no dim batch")
    document = decoded(packing.text(10**9)[0])
    *_, figures, details = document["plans"][-1]
    assert document["texts"][figures] == "there is no dim batch" and details == 0


def test_brief_intervals_are_joined_and_no_time_is_lost():
    rows = [
        {"name": name, "seconds": seconds, "memory_bytes": memory}
        for name, seconds, memory in [("a", 1, 5), ("b", 3, None), ("c", 90, 7), ("d", 2, 9)]
    ]
    found = merged(rows, 10)
    assert [(one["name"], one["seconds"], one["memory_bytes"]) for one in found] == [
        ("b + 1 more", 4, 5),
        ("c", 90, 7),
        ("d", 2, 9),
    ]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("b:x; a:y", "a:y; b:x"),
        ("a:x; b:-", "a:x"),
        ("a:x; p/b:-", "p/b:-; a:x"),
        ("c:z; a:x?; b:x?", "a:x?; b:x?; c:z"),
    ],
)
def test_layouts_that_mean_the_same_have_one_text(one, other):
    assert canonical(one) == canonical(other)


def test_what_changes_a_layout_changes_its_text():
    texts = ["", "a:x", "a:x?", "a:y", "p/a:x", "p/a:-", "a:x?; b:x?", "b:x?; a:x?"]
    assert len({canonical(text) for text in texts}) == len(texts)
