"""Checking: a right schedule is accepted, of a wrong one the first wrong action is named."""

import dataclasses

import pytest

from meshdsl.lowering.pipelines.checks.checking import check, first_fault
from meshdsl.lowering.pipelines.checks.faults import ScheduleError
from meshdsl.lowering.pipelines.csv_files import parse
from meshdsl.lowering.pipelines.named import NAMES, named

ONE_STAGE = "0F0,0B0,0F1,0B1"


def fault_of(text, **options):
    fault = first_fault(parse(text), **options)
    return str(fault) if fault else None


def test_the_error_names_the_schedule_the_place_the_reason_and_the_fix():
    with pytest.raises(ScheduleError) as error:
        check(parse("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", name="mine"))
    assert str(error.value) == (
        "schedule `mine` is wrong at stage 1, column 3, `1F1`: it is missing. "
        "Add `1F1` to the row of stage 1, before column 3"
    )
    assert isinstance(error.value, ValueError)
    fault = error.value.fault
    assert (fault.stage, fault.column, str(fault.action)) == (1, 2, "1F1")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p, m", [(1, 1), (2, 3), (3, 3), (4, 9)])
def test_built_in_schedules_are_right(name, p, m):
    check(named(name, p, m))


def test_overlaps_and_actions_on_weights_are_right_where_they_should_be():
    check(parse("0UNSHARD,0F0,0F1,0RESHARD,0UNSHARD,0B0,0B1,0RESHARD,0REDUCE_GRAD"))
    check(parse("0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0I1)OVERLAP_F_B,0W1,0B2"))


@pytest.mark.parametrize(
    "text, fault",
    [
        # The stage, the chunk, the microbatch.
        ("0F0,0B0\n\n", None),
        ("0F0,0B0\n,\n1F0,1B0", "stage 1, column 1: the stage computes nothing. Remove the row,"),
        (
            "0F0,0B0,0F1,0B1,1F1\n1F0,1B0,1B1",
            "stage 0, column 5, `1F1`: chunk 1 is on stage 1. Move `1F1` to the row of stage 1",
        ),
        (
            "0F0,0B0\n2F0,2B0",
            "stage 1, column 1, `2F0`: no stage has chunk 1. Number chunks from 0 without a gap",
        ),
        # Every action once.
        (
            "0F0,0B0,0F1",
            "stage 0, column 4, `0B1`: it is missing. Add `0B1` to the row of stage 0,",
        ),
        ("0F0,0I0", "stage 0, column 3, `0W0`: it is missing. Add `0W0` to the row of stage 0, at"),
        (
            "0F0,0W0",
            "stage 0, column 2, `0I0`: it is missing. Add `0I0` to the row of stage 0, bef",
        ),
        ("0B0", "stage 0, column 1, `0F0`: it is missing. Add `0F0` to the row of stage 0, before"),
        (
            "0F0,0B0,0F0",
            "stage 0, column 3, `0F0`: `0F0` is already in stage 0, column 1. Remove one of",
        ),
        (
            "0F0,0B0,0W0",
            "stage 0, column 3, `0W0`: `0W0` is already in stage 0, column 2. Remove one of",
        ),
        # What is needed stands before.
        (
            "0B0,0F0",
            "stage 0, column 1, `0B0`: it needs `0F0`, which is in column 2. Move it behind",
        ),
        ("0F0,0W0,0I0", "stage 0, column 2, `0W0`: it needs `0I0`, which is in column 3. Move it"),
        ("0F0,1F0,0B0,1B0", "stage 0, column 3, `0B0`: it needs `1B0`, which is in column 4. Move"),
        # Overlaps.
        (
            "(0F0;0B0)OVERLAP_F_B",
            "stage 0, column 1, `(0F0;0B0)OVERLAP_F_B`: `0B0` needs `0F0` of the same overla",
        ),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B,0B1",
            "stage 0, column 2, `(0B0;0F1)OVERLAP_F_B`: an overlap is one forward pass and t",
        ),
        # Weights.
        (
            "0F0,0UNSHARD,0B0",
            "stage 0, column 1, `0F0`: the weights of chunk 0 are not gathered. Put `0UNSHAR",
        ),
        (
            "0UNSHARD,0UNSHARD,0F0,0B0",
            "stage 0, column 2, `0UNSHARD`: the weights are gathered alr",
        ),
        (
            "0UNSHARD,0F0,0B0,0RESHARD,0RESHARD",
            "stage 0, column 5, `0RESHARD`: the weights are not",
        ),
        (
            "0F0,0F1,0B0,0REDUCE_GRAD,0B1",
            "stage 0, column 4, `0REDUCE_GRAD`: 1 gradients of the chunk's weights are comp",
        ),
        (
            "0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD",
            "stage 0, column 4, `0REDUCE_GRAD`: the gradients are",
        ),
    ],
)
def test_the_first_wrong_action_is_named(text, fault):
    assert (fault_of(text) or "").startswith(fault or "")
    assert bool(fault_of(text)) == bool(fault)


def test_chunks_and_microbatches_beyond_those_of_the_schedule_are_refused():
    schedule = parse(ONE_STAGE)
    fault = first_fault(dataclasses.replace(schedule, microbatches=1))
    assert str(fault).startswith(
        "stage 0, column 3, `0F1`: there is no microbatch 1. Remove it: the microbatches are "
    )
    schedule = parse("0F0,0B0\n1F0,1B0")
    fault = first_fault(dataclasses.replace(schedule, chunks=1))
    assert str(fault).startswith(
        "stage 1, column 1, `1F0`: there is no chunk 1. Remove it: the chunks are 0 to 0"
    )


def test_of_several_wrong_actions_the_one_in_the_least_column_is_named():
    fault = first_fault(parse("0F0,0F1,0B0,0B1,0B1\n1F0,1F0,1B0,1F1,1B1"))
    assert (fault.stage, fault.column) == (1, 1)


def test_stages_that_wait_for_each_other_are_named_with_what_they_wait_for():
    assert fault_of("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1") == (
        "stage 0, column 2, `0B0`: stages wait for each other: `0B0` waits for `1B0`, which is "
        "behind `1F1` on stage 1, `1F1` waits for `0F1`, which is behind `0B0` on stage 0. "
        "Move `1B0` before `1F1` on stage 1"
    )


def test_a_deadlock_is_seen_behind_a_stage_that_only_waits():
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1"
    assert fault_of(text).startswith(
        "stage 1, column 2, `1B0`: stages wait for each other: `1B0` waits for `2B0`, which i"
    )


def test_buffers_limit_the_live_chunk_inputs():
    schedule = named("1f1b", 3, 8)
    assert first_fault(schedule, buffers=3) is None
    assert first_fault(schedule, buffers=(3, 2, 1)) is None
    assert str(first_fault(schedule, buffers=2)) == (
        "stage 0, column 3, `0F2`: 3 chunk inputs are live, and the stage has 2 buffers. "
        "Do a backward pass before it, or give the stage 3 buffers"
    )
    assert str(first_fault(schedule, buffers=(3, 2, 0))).startswith("stage 2, column 1, `2F0`: 1 ")
    with pytest.raises(ScheduleError, match="`gpipe` is wrong at stage 0, column 5, `0F4`: 5 "):
        check(named("gpipe", 2, 8), buffers=4)


STAGE_0 = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
STAGE_1 = "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1"


@pytest.mark.parametrize(
    "stage_0, stage_1, fault",
    [
        (STAGE_0, STAGE_1, None),
        (
            STAGE_0.replace("0SEND_F1,", ""),
            STAGE_1,
            "stage 0, column 4, `0SEND_F1`: it is missing. Add it behind `0F1`, which comput",
        ),
        (
            STAGE_0,
            STAGE_1.replace("1RECV_F1,", ""),
            "stage 1, column 5, `1RECV_F1`: it is missing. Add it before `1F1`, which needs ",
        ),
        (
            STAGE_0.replace("0F0,0SEND_F0", "0SEND_F0,0F0"),
            STAGE_1,
            "stage 0, column 1, `0SEND_F0`: it sends `0F0`, which is in column 2. Move it be",
        ),
        (
            STAGE_0.replace("0RECV_B0,0B0", "0B0,0RECV_B0"),
            STAGE_1,
            "stage 0, column 5, `0B0`: it needs `0RECV_B0`, which is in column 6. Move `0REC",
        ),
        (
            STAGE_0,
            STAGE_1 + ",1SEND_B1",
            "stage 1, column 9, `1SEND_B1`: `1SEND_B1` is already in stage 1, column 8.",
        ),
        (
            STAGE_0,
            STAGE_1.replace("1B1,", "1B1,1SEND_F1,"),
            "stage 1, column 8, `1SEND_F1`: no other stage sends or needs it. Remove it: a me",
        ),
        (
            STAGE_0 + ",1SEND_B1",
            STAGE_1.removesuffix(",1SEND_B1"),
            "stage 0, column 9, `1SEND_B1`: chunk 1 is on stage 1. Move `1SEND_B1` to the ro",
        ),
        (
            STAGE_0,
            STAGE_1.replace("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0"),
            "stage 1, column 1, `1RECV_F1`: stage 0 sends `0SEND_F0` to this stage before. R",
        ),
    ],
)
def test_the_first_wrong_message_is_named(stage_0, stage_1, fault):
    assert (fault_of(f"{stage_0}\n{stage_1}") or "").startswith(fault or "")
    assert bool(fault_of(f"{stage_0}\n{stage_1}")) == bool(fault)


def test_a_receive_that_waits_for_a_later_send_is_a_deadlock():
    stage_0 = "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1"
    assert fault_of(f"{stage_0}\n{STAGE_1}").startswith(
        "stage 0, column 3, `0RECV_B0`: stages wait for each other: `0RECV_B0` "
        "waits for `1SEND_B0`, which is behind `1RECV_F1` on stage 1, `1RECV_F1` waits for "
    )


def test_links_that_hold_few_messages_make_deadlocks():
    stage_0 = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1"
    stage_1 = "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    for in_flight in (None, 2, 1):
        assert fault_of(f"{stage_0}\n{stage_1}", in_flight=in_flight) is None
    assert fault_of(f"{stage_0}\n{stage_1}", in_flight=0) == (
        "stage 0, column 4, `0SEND_F1`: stages wait for each other: `0SEND_F1` "
        "waits for `1RECV_F1`, which is behind `1SEND_B0` on stage 1, `1SEND_B0` waits for "
        "`0RECV_B0`, which is behind `0SEND_F1` on stage 0. Move `1RECV_F1` before `1SEND_B0` on "
        "stage 1"
    )
