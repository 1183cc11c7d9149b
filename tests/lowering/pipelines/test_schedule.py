"""Schedules: tables of actions, and what follows from them at once."""

import dataclasses

import pytest

from meshdsl.lowering.pipelines.csv_files import parse
from meshdsl.lowering.pipelines.schedule import Schedule


def test_a_schedule_counts_stages_chunks_microbatches_and_rounds():
    schedule = parse("0F0,3F0,0F1,3F1,3B0,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1")
    assert (schedule.stages, schedule.chunks, schedule.microbatches) == (2, 4, 2)
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.rounds == 2


def test_a_chunk_is_where_most_of_its_computations_are():
    assert parse("0F0,0B0\n1F0,1B0,0F1,0B1\n0F2,0B2,0F3,0B3").placement == (2, 1)
    assert parse("1F0").placement == (0, 0)


def test_messages_and_empty_cells_can_be_removed():
    schedule = parse("0F0,0SEND_F0,,0RECV_B0,0B0\n,1RECV_F0,1F0,1B0,1SEND_B0")
    assert schedule.has_messages
    assert schedule.without_empty_cells() == parse(
        "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
    )
    bare = schedule.without_messages()
    assert not bare.has_messages
    assert bare == parse("0F0,,0B0\n,1F0,1B0")


def test_a_schedule_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse("0F0,0B0").chunks = 3
    assert Schedule.of([[]]).chunks == Schedule.of([[]]).microbatches == 0
