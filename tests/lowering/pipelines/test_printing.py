"""Printing: rows of stages over time slots."""

from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.csv_files import parse
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.printing import show


def test_a_schedule_is_shown_as_rows_over_slots():
    assert show(named("1f1b", 2, 3)) == (
        "1f1b: 2 stages, 2 chunks, 3 microbatches; bubble 25 %\n"
        "slot     0  1  2  3  4  5  6  7  8  9 10 11  live\n"
        "stage 0 F0 F1  .  . B0  - F2 B1  -  . B2  -     2\n"
        "stage 1  . F0 B0  - F1 B1  - F2 B2  -  .  .     1\n"
    )


def test_cells_have_chunks_where_a_stage_has_several_and_both_parts_of_overlaps():
    lines = show(named("zbv", 2, 1)).splitlines()
    assert lines[2] == "stage 0 0F0   .   . 3F0 3I0 3W0   .   . 0I0 0W0     2"
    assert "F1+B0" in show(parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1"))


def test_wide_tables_are_continued_below():
    lines = show(named("1f1b", 2, 3), width=40).splitlines()
    assert all(len(line) <= 40 for line in lines[1:])
    assert lines[1] == "slot     0  1  2  3  4  5  6"
    assert lines[4] == "slot     7  8  9 10 11  live"


def test_slots_follow_the_costs():
    text = show(parse("0F0,0B0"), Costs(forward=0.5, backward=1.5))
    assert text.splitlines()[2] == "stage 0 F0 B0  -  -     1"
    text = show(parse("0F0,0B0"), Costs(forward=0.5, backward=1.5), slot=0.25)
    assert text.splitlines()[2] == "stage 0 F0  - B0  -  -  -  -  -     1"


def test_one_of_each_is_not_called_several():
    text = show(parse("0F0,0B0", name="mine"))
    assert text.startswith("mine: 1 stage, 1 chunk, 1 microbatch; bubble 0 %\n")
