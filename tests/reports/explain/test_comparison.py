"""Two layouts of one program: what changes, and by how much."""

import pytest

from meshdsl.lowering.costs.units import show_bytes
from meshdsl.reports.explain import compare, explain
from meshdsl.reports.explain.comparison import Total
from tests.reports.explain.steps import MEGATRON, explained

SEQUENCE = f"{MEGATRON}; length:model?"


def compared(first=MEGATRON, second=SEQUENCE, **sizes):
    return compare(explained(layout=first, **sizes)[1], explained(layout=second, **sizes)[1])


def test_a_layout_does_not_differ_from_itself():
    found = compared(MEGATRON, MEGATRON)
    assert found.traffic == () and found.parameters == () and found.same > 0
    assert {total.change for total in (*found.totals, *found.parts)} == {"same"}
    assert "on the wire: the same collectives" in str(found)


def test_every_collective_is_added_removed_changed_or_the_same():
    found = compared()
    for letter, report in (("before", found.before), ("after", found.after)):
        listed = [getattr(one, letter) for one in found.traffic if getattr(one, letter)]
        assert len(listed) + found.same == len(report.traffic)
    more = sum(one.more_bytes for one in found.traffic)
    sums = [sum(t.wire_bytes for t in report.traffic) for report in (found.before, found.after)]
    assert more == pytest.approx(sums[1] - sums[0])
    kinds = {one.any.kind for one in found.traffic if one.what == "added"}
    assert kinds >= {"all_gather", "reduce_scatter"}
    assert {one.any.kind for one in found.traffic if one.what == "removed"} == {"all_reduce"}


def test_what_changes_most_comes_first():
    changes = [abs(one.more_bytes) for one in compared().traffic]
    assert changes == sorted(changes, reverse=True)


def test_totals_are_those_of_both_reports():
    found = compared()
    totals = {one.name: one for one in found.totals}
    peak = totals["peak memory"]
    assert (peak.before, peak.after) == (
        found.before.memory.peak_bytes,
        found.after.memory.peak_bytes,
    )
    assert totals["step at the peaks"].after == found.after.timeline.seconds
    assert totals["step by simulation"].after == found.after.simulated.seconds
    assert sum(one.before for one in found.parts) == peak.before
    assert sum(one.after for one in found.parts) == peak.after


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        (100, 150, "+50 %"),
        (100, 25, "-75 %"),
        (100, 100, "same"),
        (1000, 1001, "+0.1 %"),
        (2**40, 2**40 - 1, "< 0.01 %"),
        (0, 2048, "+2.0 KiB"),
        (2048, 0, "-100 %"),
    ],
)
def test_a_change_is_told_in_percent(before, after, change):
    assert Total("bytes", before, after, show_bytes).change == change


def test_parameters_that_lie_elsewhere_are_listed_with_both_layouts():
    found = compared(second="batch:data; heads:model; vocab:model")
    moved = {path: (str(a.layout), str(b.layout)) for path, a, b in found.parameters}
    assert moved == {
        "state/params/blocks/w_in": ("d_ff:model", "replicated"),
        "state/params/blocks/w_out": ("d_ff:model", "replicated"),
    }
    assert "parameters that lie elsewhere" in str(found)


def test_the_text_is_short_and_fits_120_columns():
    text = str(compared())
    lines = text.split("\n")
    assert len(lines) < 70
    for line in lines:
        assert len(line) <= 120 and line == line.rstrip(), line
    assert lines[1] == f"  A  {MEGATRON}" and f"  B  {SEQUENCE}" in lines
    assert "steps.py:" in text
    assert "by less than 1 % of it all: " in text


def test_pads_are_compared_where_there_are_any():
    with_pads = compared(mesh="data:2 model:3")
    assert "pads at the peak" in {one.name for one in with_pads.totals}
    assert "pads at the peak" not in {one.name for one in compared().totals}


def test_layouts_of_a_program_on_other_hardware_are_compared_as_well():
    programs = [explained(layout=layout)[0] for layout in (MEGATRON, SEQUENCE)]
    found = compare(*(explain(program, "h100") for program in programs))
    assert "8 devices of NVIDIA H100 SXM, two layouts" in str(found)
