"""Single changes are tried: their figures are those of the changed step."""

import pytest

import meshdsl as md
from meshdsl.layouts.hardware import hardware
from meshdsl.lowering.costs.simulation import step_seconds
from meshdsl.reports.explain.advice import advice, to_be_faster
from meshdsl.search.changes import Tried, single_changes, try_changes
from meshdsl.search.searching import Search
from meshdsl.search.space import Variant
from tests.search.steps import gpt

MEGATRON = "batch:data; heads:model; d_ff:model; vocab:model"
DEVICE = hardware("v5p")


def lowered(layout, mesh="data:2,model:4"):
    search = Search(gpt(), "v5p", 8)
    search.step.graph(Variant())  # traced once
    return search.program(md.Mesh.parse(mesh), md.Layout.parse(layout), Variant(), search.quick)


def changes(layout, **rest):
    return list(single_changes(lowered(layout), **rest))


def test_each_change_is_a_single_one_and_no_rule_of_the_layout_is_added_again():
    layout = f"{MEGATRON}; length:model?; params/embed:data"
    found = changes(layout, microbatches=[2], remats=["full"])
    texts = [change.how for change in found]
    assert len(set(texts)) == len(texts) > 5
    assert {"--microbatches=2", "--remat=full", "--mesh_shape=data:4,model:2"} <= set(texts)
    assert "without `length:model?`" in texts
    before = set(md.Layout.parse(layout).rules)
    for change in found:
        added, left_out = set(change.layout.rules) - before, before - set(change.layout.rules)
        flags = (change.microbatches, change.remat, change.mesh != md.Mesh.parse("data:2,model:4"))
        assert len(added) + len(left_out) + sum(map(bool, flags)) == 1, change
        assert change.mesh.size == 8


def test_a_change_has_the_figures_of_the_changed_step_and_is_not_advised_again():
    layout = MEGATRON
    told = []
    for _ in range(3):
        program = lowered(layout)
        rules = (one for one in single_changes(program) if one.how.startswith("`"))
        tried = try_changes(program, rules, lambda one: lowered(str(one.layout)), DEVICE)
        assert tried[0] == Tried("", step_seconds(program, DEVICE), program.peak_bytes, True)
        best = min(tried, key=lambda one: one.seconds)
        if not best.how:
            break
        text = to_be_faster(tried)
        assert text.startswith(f"tried, the best first: {best.how}: ")
        told.append(best.how)
        layout = f"{layout}; {best.how.strip('`')}"
        after = lowered(layout)
        assert (after.peak_bytes, step_seconds(after, DEVICE)) == (best.peak_bytes, best.seconds)
    assert len(set(told)) == len(told) > 0


def test_the_state_is_stored_by_the_dim_that_reaches_most_of_it():
    """`d_ff` is the largest dim of the largest parameter, but few parameters have it."""
    stored = [change.how for change in changes("batch:data") if "/" in change.how]
    assert stored == ["`params/embed:model`"]
    peaks = [lowered(f"batch:data; params/{dim}:model").peak_bytes for dim in ("embed", "d_ff")]
    assert peaks[0] < peaks[1]


def test_a_change_that_cannot_be_made_is_left_out():
    program = lowered(MEGATRON)

    def refused(change):
        raise ValueError("no such step")

    assert len(try_changes(program, single_changes(program), refused, DEVICE)) == 1


def test_of_large_programs_fewer_changes_are_tried():
    program = lowered(MEGATRON)
    written = []

    def write(change):
        written.append(change)
        return program

    try_changes(program, single_changes(program, [2, 4, 8], ["full", "dots"]), write, DEVICE, 1)
    assert len(written) == 4


@pytest.mark.parametrize(
    ("now", "rest", "less", "faster"),
    [
        # What saves little is not told; nor what is much slower.
        ((10, 100, True), [(11, 99, True), (16, 10, True)], "", ""),
        # The product of time and memory counts where the step fits.
        ((10, 100, True), [(12, 50, True), (11, 80, True)], "ab", ""),
        # Where it does not fit, only what fits is told, by time.
        ((10, 100, False), [(30, 50, True), (20, 60, True), (5, 90, False)], "ba", ""),
        # If nothing fits, what comes nearest is told first.
        ((10, 100, False), [(30, 80, False), (20, 90, False)], "ab", ""),
        # A faster step that does not fit is no advice.
        ((10, 100, True), [(5, 200, False), (8, 150, True), (7, 160, True)], "", "cb"),
    ],
)
def test_advice_is_ordered_by_what_helps_most(now, rest, less, faster):
    tried = [Tried("", *now), *(Tried(f"`{'abc'[n]}`", *row) for n, row in enumerate(rest))]

    def order(text):
        return "".join(part[1] for part in text.partition("first: ")[2].split("; ") if part)

    assert order(advice(lowered(MEGATRON), (), tried)) == less
    assert order(to_be_faster(tried)) == faster
