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
from tests.lowering.pipelining.steps import GPT, lower


def check(table):
    """Checks a timetable, from its definition."""
    keys = set(table.passes)
    assert set(table.forward_tick) == keys == set(table.backward_tick)
    busy = [(t, c % table.stages) for (c, _), t in table.forward_tick.items()]
    assert len(set(busy)) == len(busy)
    busy = [(t, c % table.stages) for (c, _), t in table.backward_tick.items()]
    assert len(set(busy)) == len(busy)
    for chunk, k in keys:
        if chunk:
            assert table.forward_tick[chunk - 1, k] < table.forward_tick[chunk, k]
            assert table.backward_tick[chunk, k] < table.backward_tick[chunk - 1, k]
        assert table.forward_tick[chunk, k] <= table.backward_tick[chunk, k]
    phases = Joint.of([table]).phases
    assert [p.start for p in phases] == [0, *(p.stop for p in phases[:-1])]
    assert phases[-1].stop == table.ticks


def random_schedule(rng):
    """Returns a correct schedule: any stage does any pass that is ready."""
    stages, rounds, microbatches = rng.choice([1, 2, 3, 4]), rng.choice([1, 2]), rng.randint(1, 6)
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
        rows[c % stages].append(f"{c}{kind}{k}")
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


def test_a_v_shape_cannot_be_run():
    with pytest.raises(ValueError, match="chunk c must be on stage c mod 2") as e:
        clocked(named("zbv", 2, 4))
    assert "--pipeline_table=-` prints its table; circular, gpipe, 1f1b" in str(e.value)


def test_a_wrong_schedule_is_refused():
    rows = [list(row) for row in named("gpipe", 2, 4).rows]
    rows[0].pop()
    with pytest.raises(ValueError, match="`0B0`: it is missing"):
        clocked(Schedule.of(rows, "mine"))


def test_a_file_for_other_sizes_is_told(tmp_path):
    file = tmp_path / "mine.csv"
    csv_files.write(named("gpipe", 2, 4), str(file))
    program = lower(GPT, 4, "pipe:2", "layers:pipe", pipeline=str(file))
    assert program.pipeline.schedule.name.endswith("mine")
    with pytest.raises(ValueError, match="has 4 microbatches, not 8"):
        lower(GPT, 8, "pipe:2", "layers:pipe", pipeline=str(file))
    with pytest.raises(ValueError, match="has 2 stages, not 4"):
        lower(GPT, 4, "pipe:4", "layers:pipe", pipeline=str(file))
