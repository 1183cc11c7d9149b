"""Properties of all schedules: built-in, random and damaged ones, against an independent judge."""

import dataclasses
import functools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.actions import Action
from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.checks.checking import first_fault
from meshdsl.lowering.pipelines.costs import Costs
from meshdsl.lowering.pipelines.messages import with_messages
from meshdsl.lowering.pipelines.named import NAMES, WITH_ROUNDS
from meshdsl.lowering.pipelines.named import named as make
from meshdsl.lowering.pipelines.planning import plan
from meshdsl.lowering.pipelines.schedule import Schedule
from tests.lowering.pipelines import independent

MUTATIONS = 2_000
# Random schedules take long to draw on a busy machine.
PATIENT = settings(suppress_health_check=[HealthCheck.too_slow])
named = functools.cache(make)
explicit = functools.cache(lambda schedule: with_messages(schedule))


@st.composite
def built_in(draw):
    """Draws a built-in schedule of up to 5 stages, 4 rounds and 9 microbatches."""
    name = draw(st.sampled_from(NAMES))
    rounds = draw(st.integers(1, 4)) if name in WITH_ROUNDS else None
    return named(name, draw(st.integers(1, 5)), draw(st.integers(1, 9)), rounds)


@st.composite
def any_right(draw):
    """Draws rows of cells that an independent generator has made."""
    stages = draw(st.integers(1, 4))
    chunks = draw(st.integers(stages, 6))
    microbatches = draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32))
    return parsed(independent.random_rows(seed, stages, chunks, microbatches))


def parsed(rows):
    return Schedule.of([[Action.parse(cell) for cell in row] for row in rows])


def cells(schedule):
    return [[str(action) for action in row if action] for row in schedule.rows]


def judged(schedule):
    return independent.is_right(cells(schedule), schedule.chunks, schedule.microbatches)


@settings(PATIENT, max_examples=100)
@given(built_in())
def test_built_in_schedules_are_right(schedule):
    assert judged(schedule)
    assert first_fault(schedule, buffers=peaks(schedule)) is None
    assert first_fault(explicit(schedule), in_flight=0) is None


@settings(PATIENT, max_examples=100)
@given(built_in() | any_right())
def test_a_schedule_is_read_back_from_csv(schedule):
    for one in (schedule, explicit(schedule)):
        assert csv_files.parse(csv_files.text(one), one.name) == one


@settings(PATIENT, max_examples=100)
@given(any_right())
def test_any_right_schedule_is_accepted_with_and_without_messages(schedule):
    assert judged(schedule)
    assert first_fault(schedule) is None
    assert first_fault(explicit(schedule), in_flight=0) is None
    assert plan(explicit(schedule)).makespan == plan(schedule).makespan


@pytest.mark.long
@settings(PATIENT, max_examples=100)
@given(built_in() | any_right(), st.randoms(use_true_random=False))
def test_times_are_those_of_an_independent_simulation(schedule, draw):
    per_chunk = {
        name: tuple(draw.randint(low, 4) for _ in range(schedule.chunks))
        for name, low in (("forward", 1), ("inputs", 1), ("weights", 1), ("send", 0))
    }
    kinds = {"F": "forward", "I": "inputs", "W": "weights"}
    begins, makespan = independent.simulate(
        cells(schedule),
        schedule.chunks,
        lambda kind, chunk: per_chunk[kinds[kind]][chunk],
        lambda kind, chunk: per_chunk["send"][chunk - (kind == "I")],
    )
    planned = plan(schedule, Costs(**per_chunk))
    assert planned.makespan == makespan
    for stage, row in enumerate(planned.spans):
        assert [span.start for span in row] == [begins[stage, str(s.action)] for s in row]
    with_all = plan(with_messages(schedule, Costs(**per_chunk)), Costs(**per_chunk))
    assert [[s.start for s in row] for row in with_all.spans] == [
        [s.start for s in row] for row in planned.spans
    ]
    assert sum(planned.bubbles) == makespan * schedule.stages - sum(map(sum, (planned.busy,)))
    assert max(planned.peaks) <= max(peaks(schedule))


def damaged(schedule, draw):
    """Returns rows with one thing changed, what was changed, and where: (stage, column)."""
    rows = [list(row) for row in schedule.without_empty_cells().rows]
    stage = draw.choice([s for s, row in enumerate(rows) if row])
    column = draw.randrange(len(rows[stage]))
    other = draw.randrange(len(rows[stage]))
    kind = draw.choice(["drop", "repeat", "swap", "rename", "move"])
    action = rows[stage][column]
    if kind == "drop":
        del rows[stage][column]
    elif kind == "repeat":
        rows[stage].insert(other, action)
    elif kind == "swap":
        rows[stage][column], rows[stage][other] = rows[stage][other], action
    elif kind == "rename":
        microbatch = draw.randrange(schedule.microbatches)
        rows[stage][column] = dataclasses.replace(action, microbatch=microbatch)
    else:
        del rows[stage][column]
        target = draw.randrange(len(rows))
        rows[target].insert(draw.randint(0, len(rows[target])), action)
    wrong = dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))
    return wrong, kind, action, (stage, min(column, other))


@pytest.mark.long
@settings(PATIENT, max_examples=MUTATIONS)
@given(built_in() | any_right(), st.integers(0, 2**32))
def test_a_damaged_schedule_is_refused_with_its_first_wrong_action(schedule, seed):
    wrong, kind, action, (stage, column) = damaged(schedule, random.Random(seed))
    fault = first_fault(wrong)
    assert (fault is None) == judged(wrong)
    if fault is None:
        assert kind in ("swap", "rename", "move")
        return
    assert fault.why and fault.fix
    if kind == "drop" and wrong.rows[stage]:
        assert (fault.stage, fault.action) == (stage, action)
    elif kind == "repeat":
        assert (fault.stage, fault.action) == (stage, action)
        assert fault.column >= column
    elif kind == "swap":
        assert fault.column >= column or fault.stage != stage
    if fault.action and "missing" not in fault.why:
        assert wrong.rows[fault.stage][fault.column] == fault.action


@settings(PATIENT, max_examples=150)
@given(built_in() | any_right(), st.randoms(use_true_random=False), st.booleans())
def test_a_message_that_is_dropped_or_repeated_is_named(schedule, draw, drop):
    with_all = explicit(schedule)
    messages = [cell for cell in with_all.cells() if not cell[2].computes]
    if len(messages) < 3:
        return
    stage, column, action = draw.choice(messages)
    rows = [list(row) for row in with_all.rows]
    if drop:
        del rows[stage][column]
    else:
        rows[stage].insert(column + 1, action)
    fault = first_fault(dataclasses.replace(with_all, rows=tuple(map(tuple, rows))))
    assert (fault.stage, fault.action) == (stage, action)
