"""Schedules on a clock: every pass once, nothing before what it reads."""

import random

import pytest

from meshdsl.lowering.pipelines import csv_files
from meshdsl.lowering.pipelines.buffers import peaks
from meshdsl.lowering.pipelines.circular import Circular
from meshdsl.lowering.pipelines.named import named
from meshdsl.lowering.pipelines.schedule import Schedule
from meshdsl.lowering.pipelining.clocking import clocked
from meshdsl.lowering.pipelining.joint import Joint
from meshdsl.lowering.pipelining.timetable import circular
from tests.lowering.pipelining.steps import GPT, check_same, layers, lower


def home(chunk, stages, turns):
    """Returns the stage of a chunk; if `turns`, every second round goes in reverse."""
    turn, at = divmod(chunk, stages)
    return stages - 1 - at if turns and turn % 2 else at


def check(table):
    """Checks a timetable, from its definition."""
    keys = set(table.passes)
    assert set(table.forward_tick) == keys == set(table.backward_tick)
    for ticks in (table.forward_tick, table.backward_tick):
        busy = [(t, home(c, table.stages, table.turns)) for (c, _), t in ticks.items()]
        assert len(set(busy)) == len(busy)
    for chunk, k in keys:
        if chunk:
            assert table.forward_tick[chunk - 1, k] < table.forward_tick[chunk, k]
            assert table.backward_tick[chunk, k] < table.backward_tick[chunk - 1, k]
        assert table.forward_tick[chunk, k] <= table.backward_tick[chunk, k]
    phases = Joint.of([table]).phases
    assert [p.start for p in phases] == [0, *(p.stop for p in phases[:-1])]
    assert phases[-1].stop == table.ticks


def random_schedule(rng, sizes=None):
    """Returns a correct schedule: any stage does any pass that is ready.

    Args:
        sizes: stages, rounds, microbatches and whether rounds turn around; random if not given.
    """
    drawn = rng.choice([1, 2, 3, 4]), rng.choice([1, 2]), rng.randint(1, 6), rng.random() < 0.5
    stages, rounds, microbatches, turns = sizes or drawn
    chunks = stages * rounds
    rows = [[] for _ in range(stages)]
    forward, backward = set(), set()
    while len(backward) < chunks * microbatches:
        ready = [
            ("F", c, k)
            for c in range(chunks)
            for k in range(microbatches)
            if (c, k) not in forward and (c == 0 or (c - 1, k) in forward)
        ]
        ready += [
            ("B", c, k) for c, k in forward - backward if c == chunks - 1 or (c + 1, k) in backward
        ]
        kind, c, k = rng.choice(sorted(ready))
        (forward if kind == "F" else backward).add((c, k))
        rows[home(c, stages, turns)].append(f"{c}{kind}{k}")
    return "\n".join(",".join(row) for row in rows) + "\n"


def test_random_schedules_run_on_a_clock(tmp_path):
    rng = random.Random(0)
    file = tmp_path / "mine.csv"
    for _ in range(150):
        file.write_text(random_schedule(rng))
        check(clocked(csv_files.read(str(file))))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_the_circular_clock_is_that_of_its_formulas(stages, rounds, microbatches):
    table, clock = circular(stages, rounds, microbatches), Circular(stages, rounds, microbatches)
    check(table)
    assert table.ticks == clock.ticks
    assert clocked(clock.schedule()).ticks <= table.ticks
    assert table.live == peaks(clock.schedule())


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_circular_needs_no_more_ticks_than_the_others(name):
    for stages, microbatches in ((2, 4), (4, 8), (4, 16), (8, 16)):
        other = clocked(named(name, stages, microbatches))
        check(other)

        def passes(table):
            return sum(p.ticks * len(p.passes) for p in Joint.of([table]).phases)

        assert passes(circular(stages, 1, microbatches)) <= passes(other)


def test_buffers_in_use_at_once_differ():
    for table in (circular(4, 2, 8), circular(3, 2, 5), clocked(named("gpipe", 4, 8))):
        for stage, buffers in enumerate(table.kept[0]):
            spans = {k: (table.forward_tick[k], table.backward_tick[k]) for k in buffers}
            for one, a in spans.items():
                for other, b in spans.items():
                    meet = a[0] <= b[1] and b[0] <= a[1]
                    assert one == other or not meet or buffers[one] != buffers[other], stage


def test_other_orders_of_chunks_cannot_be_run():
    schedule = Schedule.of(named("gpipe", 2, 4).rows[::-1], "mine")
    with pytest.raises(ValueError, match="chunk c must be on stage c mod 2, or turn") as e:
        clocked(schedule)
    assert "--pipeline_table=-` prints its table; all built-in schedules" in str(e.value)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 6), (8, 16)])
def test_zbv_keeps_what_1f1b_keeps_in_about_the_ticks_of_circular(stages, microbatches):
    """Its chunks are half as large, so two of its passes take the time of one."""
    turning, onward = clocked(named("zbv", stages, microbatches)), circular(stages, 1, microbatches)
    lean = clocked(named("1f1b", stages, microbatches))
    check(turning)
    assert turning.turns and not onward.turns
    assert turning.placement == (*range(stages), *reversed(range(stages)))
    assert max(turning.live) <= 2 * max(lean.live)

    def passes(table):
        ticks = [*table.forward_tick.values()], [*table.backward_tick.values()]
        return sum(max(each) - min(each) + 1 for each in ticks)

    assert passes(turning) <= 2 * passes(onward) + 2 < 2 * passes(lean) + 2


@pytest.mark.long
def test_rounds_may_turn_around_at_both_ends(tmp_path):
    """Also in random orders, in which several results arrive at once and wait."""
    file = tmp_path / "mine.csv"
    for seed in range(3):
        file.write_text(random_schedule(random.Random(seed), (2, 3, 4, True)))
        check_same(layers(GPT, 6), 4, "pipe:2", "layers:pipe", pipeline=str(file))


def test_a_wrong_schedule_is_refused():
    rows = [list(row) for row in named("gpipe", 2, 4).rows]
    rows[0].pop()
    with pytest.raises(ValueError, match="`0B0`: it is missing"):
        clocked(Schedule.of(rows, "mine"))


def test_a_file_for_other_sizes_is_told(tmp_path):
    file = tmp_path / "mine.csv"
    csv_files.write(named("gpipe", 2, 4), str(file))
    program = lower(GPT, 4, "pipe:2", "layers:pipe", pipeline=str(file))
    assert program.pipeline.schedule.name == str(file)
    with pytest.raises(ValueError, match="has 4 microbatches, not 8"):
        lower(GPT, 8, "pipe:2", "layers:pipe", pipeline=str(file))
    with pytest.raises(ValueError, match="has 2 stages, not 4"):
        lower(GPT, 4, "pipe:4", "layers:pipe", pipeline=str(file))
