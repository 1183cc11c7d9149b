"""Which schedule is taken where the options leave it open."""

import functools

import pytest

import meshdsl as md
from meshdsl.lowering.options import Options
from meshdsl.lowering.pipelining import choosing
from tests.lowering.pipelining.steps import GPT, layers, lower, problem

MODEL = layers(GPT, 8)


def alternatives(*args, **options):
    """Returns the simulated seconds and the peak of each number of rounds."""
    from meshdsl.layouts.hardware import hardware
    from meshdsl.lowering.costs.simulation import step_seconds

    programs = {v: lower(*args, pipeline_rounds=v, **options) for v in (1, 2, 4)}
    return {v: (step_seconds(p, hardware("v5p")), p.peak_bytes) for v, p in programs.items()}


def test_without_hardware_there_is_one_round():
    pipeline = lower(MODEL, 4, "pipe:2", "layers:pipe").pipeline
    assert (pipeline.schedule.name, pipeline.rounds) == ("circular", 1)


@pytest.mark.long
def test_with_hardware_it_is_the_fastest_by_simulation():
    program = lower(MODEL, 4, "pipe:2", "layers:pipe", hardware="v5p")
    times = alternatives(MODEL, 4, "pipe:2", "layers:pipe", hardware="v5p")
    least = min(seconds for seconds, _ in times.values())
    assert times[program.pipeline.rounds][0] < 1.02 * least
    (decision,) = [d for d in program.decisions if d.name == "pipeline"]
    assert decision.chosen.seconds <= 1.02 * decision.other.seconds


def fake(seconds, peaks, **options):
    """Returns the rounds and the schedule that are chosen of programs with some times and peaks."""

    @functools.cache
    def program(name, rounds):
        return lower(MODEL, 4, "pipe:2", "layers:pipe", pipeline=name, pipeline_rounds=rounds)

    def key(p):
        return p.pipeline.schedule.name, p.pipeline.rounds

    class Fake:
        def __init__(self, real):
            self.pipeline, self.peak_bytes = real.pipeline, peaks[key(real)]

    from meshdsl.layouts.hardware import hardware
    from meshdsl.lowering.costs import simulation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "step_seconds", lambda p, _: seconds[key(p)])
        chosen, decision = choosing.choose_pipeline(
            lambda o: Fake(program(o.pipeline, o.pipeline_rounds)),
            Fake(program("circular", 1)),
            Options(**options),
            hardware("v5p"),
        )
    return (chosen.pipeline, chosen.pipeline_rounds), decision


ONE, TWO, FOUR, LEAN = ("circular", 1), ("circular", 2), ("circular", 4), ("1f1b", 1)
TURNS = "zbv", 2


@pytest.mark.parametrize(
    ("seconds", "peaks", "expected"),
    [
        ({ONE: 1.0, TWO: 0.9, FOUR: 0.8}, {ONE: 5, TWO: 5, FOUR: 5}, FOUR),
        ({ONE: 1.0, TWO: 0.9, FOUR: 0.95}, {ONE: 5, TWO: 5, FOUR: 5}, TWO),
        ({ONE: 1.0, TWO: 0.995}, {ONE: 5, TWO: 5}, ONE),  # it gains less than one percent
        ({ONE: 1.0, TWO: 0.9, FOUR: 0.8}, {ONE: 5, TWO: 5, FOUR: 20}, TWO),  # too large
        ({ONE: 1.0, TWO: 1.2}, {ONE: 20, TWO: 5}, TWO),  # slower, but it fits
        (
            {ONE: 1.0, TWO: 1.2, TURNS: 1.1, LEAN: 1.5},
            {ONE: 20, TWO: 15, TURNS: 6, LEAN: 5},
            TURNS,
        ),
        (
            {ONE: 1.0, TWO: 1.2, TURNS: 1.1, LEAN: 1.5},
            {ONE: 20, TWO: 15, TURNS: 12, LEAN: 5},
            LEAN,
        ),
        (  # none fits
            {ONE: 1.0, TWO: 1.2, TURNS: 1.1, LEAN: 1.5},
            {ONE: 20, TWO: 15, TURNS: 18, LEAN: 18},
            TWO,
        ),
    ],
)
def test_the_fastest_that_fits_is_chosen(seconds, peaks, expected):
    (name, rounds), decision = fake(seconds, peaks, memory=10)
    assert (name.replace("auto", "circular"), rounds) == expected
    assert decision.chosen.seconds == seconds[expected]


def test_little_memory_takes_the_schedule_that_keeps_less():
    step, _, data, spec = problem(GPT, 8, 16, 32)

    def program(**options):
        jitted = md.jit(step, "pipe:4", "layers:pipe", donate="state", options=Options(**options))
        return jitted.lower(spec, data)

    lean = program(pipeline="1f1b").peak_bytes
    assert lean < program().peak_bytes
    assert program(memory=lean).pipeline.schedule.name == "1f1b"
