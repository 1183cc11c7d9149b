"""Points: which plans a page has, and in which order they are computed."""

import pytest

from meshdsl.cli.exploring.points import by_turns, different, edited, in_order, of_search, on_meshes
from meshdsl.layouts.layout import Layout
from meshdsl.reports.explore.choices import Choice
from meshdsl.search.facts import Facts
from meshdsl.search.searching import Search
from meshdsl.search.space import Variant
from tests.search.steps import mlp

START = Choice("data:2 model:2", "batch:data; a:model")


@pytest.mark.parametrize("sources", [[], [""], ["abc", "", "12"], ["a", "123"]])
def test_sources_take_turns_and_nothing_is_lost(sources):
    found = list(by_turns(*sources))
    assert sorted(found) == sorted("".join(sources))
    for source in sources:
        assert [one for one in found if one in source] == list(source)
    assert found[: len([one for one in sources if one])] == [one[0] for one in sources if one]


def test_layouts_that_mean_the_same_are_one_plan():
    texts = ["batch:data; heads:model", "heads:model; batch:data", "batch:data; heads:model; kv:-"]
    assert len(list(different(Choice("data:2", text) for text in texts))) == 1
    texts = ["a:x?; b:x?", "b:x?; a:x?"]  # the first that can takes the axis
    assert len(list(different(Choice("x:2", text) for text in texts))) == 2
    assert len(list(different([START, Choice(START.mesh, START.layout, 2)]))) == 2


def test_results_come_in_the_order_of_the_choices_though_some_are_missing():
    choices = [Choice("data:2", f"a{n}:data") for n in range(5)]
    came = [(choices[n], n) for n in (1, 4, 0, 3)]
    assert [result for _, result in in_order(choices, came)] == [0, 1, 3, 4]
    assert list(in_order([], [])) == []
    assert [result for _, result in in_order(choices[:2], came[:1])] == [1]


def test_the_first_results_do_not_wait_for_the_last():
    choices = [Choice("data:2", f"a{n}:data") for n in range(3)]

    def results():
        yield choices[0], 0
        pytest.fail("asked for more than was needed")

    assert next(in_order(choices, results()))[1] == 0


@pytest.fixture(scope="module")
def search():
    return Search(mlp(64, 256, 8), "v5p", 4)


@pytest.fixture(scope="module")
def facts(search):
    return search.bounds(Variant(search.step.microbatches[0], search.step.remats[0])).facts


def rules_of(choice):
    return {rule.target: str(rule) for rule in Layout.parse(choice.layout).rules}


@pytest.mark.parametrize("times", [1, 2])
def test_an_edit_changes_so_many_rules_at_most(facts: Facts, times):
    start = rules_of(START)
    found = [rules_of(one) for one in edited(START, facts, times)]
    changes = [{key for key in {*start, *one} if start.get(key) != one.get(key)} for one in found]
    assert max(map(len, changes)) == times
    assert all(len(change) <= times for change in changes)


def test_edits_split_every_dim_over_every_axis_or_not(facts: Facts):
    found = {one.layout for one in edited(START, facts, 1)}
    for axis in ("data", "model", "data?", "model?"):
        assert {f"batch:data; a:model; b:{axis}", f"batch:data; a:{axis}"} <= found | {START.layout}
    assert {"a:model", "batch:data", "batch:model; a:model"} <= found
    assert any("optimizer/" in text for text in found)
    assert any("params/" in text for text in found)


def test_a_layout_is_tried_on_the_meshes_that_have_its_axes():
    meshes = ["data:4", "data:1 model:4", "model:2 data:2", "data:4 context:2"]
    found = list(on_meshes(START, [*meshes, meshes[1]]))
    assert [one.mesh for one in found] == meshes[1:3]
    assert {one.layout for one in found} == {START.layout}


def test_a_search_gives_its_fastest_and_its_smaller_points_by_turns(search):
    rows = search.candidates()[0]
    found = list(of_search(rows))
    fast = min(rows, key=lambda row: (row.bound, row.order)).point
    small = min(rows, key=lambda row: (row.bound * row.peak, row.order)).point
    first = [(one.mesh, one.layout) for one in found[:2]]
    assert first[0] == (str(fast.mesh), str(fast.layout))
    assert (str(small.mesh), str(small.layout)) in first
    assert len({one.key for one in found}) == len(found)
    assert {(one.mesh, one.layout) for one in found} == {
        (str(row.point.mesh), str(row.point.layout)) for row in rows
    }
