"""Notes of what lowering decided by simulated time: in words, and only where figures differ."""

from dataclasses import replace

from meshdsl.lowering.program import Alternative, Decision
from meshdsl.reports.explain.decisions import notes_of

JOINED = Alternative("joined", 13.7004, 2**30)
APART = Alternative("apart", 13.7301, 2**31)
DECISION = Decision("collectives", JOINED, APART, True)


def test_a_note_whose_two_times_look_equal_is_left_out():
    slower = replace(DECISION, other=replace(APART, seconds=14.2))
    assert notes_of([DECISION, slower]) == (
        "collectives: joined, 13.7 s per step by simulation; apart: 14.2 s",
    )


def test_a_note_stays_where_the_other_way_needs_too_much_memory():
    (note,) = notes_of([replace(DECISION, fits=False)])
    assert note.endswith("apart: 13.7 s and 2.0 GiB, which leaves too little memory")
