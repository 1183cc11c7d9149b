"""Simplified plans have fewer rules, and keep what was promised of them."""

import pytest

import meshdsl as md
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.search.plans import Effort
from meshdsl.search.searching import Search
from meshdsl.search.simplified import simplified
from tests.search.steps import gpt

EFFORT = Effort(estimated=60, tried=6, decided=1)


def rules(plan):
    return len(plan.point.layout.rules)


@pytest.fixture(scope="module")
def found():
    # A given mesh, so that the plan needs a rule for both axes.
    search = Search(gpt(), "v5p", md.Mesh.parse("data:2,model:2"), effort=EFFORT)
    return search, search.run()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_fewer_rules_cost_at_most_the_share(found, share):
    search, plans = found
    simple = simplified(search, plans, share)
    best, fastest = simple.best, plans.best
    assert best.seconds <= (1 + share) * fastest.seconds
    assert best.fits and best.peak_bytes <= search.room
    assert {axis for rule in best.point.layout.rules for axis in rule.axes} == {"data", "model"}
    if best is not fastest:
        assert rules(best) < rules(fastest) and simple.simplified_from is fastest
    point = best.point
    program = search.program(point.mesh, point.layout, point.variant)
    assert step_seconds(program, search.hardware) == best.seconds


def test_each_rule_that_is_left_costs_too_much_or_is_needed(found):
    search, plans = found
    share = 0.3
    best = simplified(search, plans, share).best
    assert rules(best) < rules(plans.best)
    layout, mesh = best.point.layout, best.point.mesh
    for rule in layout.rules:
        rest = md.Layout(tuple(other for other in layout.rules if other is not rule))
        if {axis for other in rest.rules for axis in other.axes} == {"data", "model"}:
            program = search.program(mesh, rest, best.point.variant)
            assert step_seconds(program, search.hardware) > (1 + share) * plans.best.seconds


def test_what_is_as_simple_as_it_can_be_stays():
    search = Search(gpt(), "v5p", 2, effort=EFFORT)
    plans = search.run()
    simple = simplified(search, plans, 1.0)
    assert rules(simple.best) == 1
    assert simplified(search, simple, 0.0) is simple


def test_rules_of_the_user_stay():
    pinned = md.Layout.parse("heads:model; d_ff:model; batch:data")
    mesh = md.Mesh.parse("data:2,model:2")
    search = Search(gpt(), "v5p", mesh, pinned, EFFORT)
    best = simplified(search, search.run(), 1.0).best
    assert set(best.point.layout.rules) == set(pinned.rules)
