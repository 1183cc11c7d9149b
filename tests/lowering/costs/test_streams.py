"""Steps on a device and its links, against a second simulation that unrolls everything."""

import random

import pytest

from meshdsl.lowering.costs.streams import Choose, Repeat, Start, Steps, Wait, Work, moments
from tests.calls import calls_of

LINKS = (("data", 1), ("data", -1), ("model", 1), ("model", -1))


def drawn(draw, depth=2, most=12):
    """Returns random steps; every transfer is waited for in the sequence that starts it."""
    steps, on_the_way = [], []
    for _ in range(draw.randint(1, most)):
        choice = draw.random()
        if choice < 0.35:
            steps.append(Work(draw.randint(0, 50)))
        elif choice < 0.65:
            links = tuple(draw.sample(LINKS, draw.randint(1, 3)))
            after = tuple(draw.sample(on_the_way, min(len(on_the_way), draw.randint(0, 1))))
            key = object()
            steps.append(Start(key, draw.randint(0, 90), links, after))
            on_the_way.append(key)
        elif choice < 0.8 and on_the_way:
            steps.append(Wait(on_the_way.pop(draw.randrange(len(on_the_way)))))
        elif choice < 0.92 and depth:
            steps.append(Repeat(Steps.of(drawn(draw, depth - 1, 6)), draw.randint(0, 7)))
        elif depth:
            branches = [Steps.of(drawn(draw, depth - 1, 5)) for _ in range(draw.randint(1, 3))]
            steps.append(Choose(tuple(branches)))
    return steps + [Wait(key) for key in on_the_way]


class Plain:
    """A device with a clock that only goes forward, in absolute time."""

    def __init__(self):
        self.now = self.exposed = 0
        self.links = dict.fromkeys(LINKS, 0)
        self.ends = {}

    def copy(self):
        other = Plain()
        other.now, other.exposed = self.now, self.exposed
        other.links, other.ends = dict(self.links), dict(self.ends)
        return other

    def run(self, steps):
        for step in steps:
            match step:
                case Work(time):
                    self.now += time
                case Start(key, time, links, after):
                    earlier = [self.links[link] for link in links] + [self.ends[k] for k in after]
                    end = max([self.now, *earlier]) + time
                    self.links.update(dict.fromkeys(links, end))
                    self.ends[key] = end
                case Wait(key):
                    self.exposed += max(0, self.ends[key] - self.now)
                    self.now = max(self.now, self.ends[key])
                case Repeat(body, count):
                    for _ in range(count):
                        self.run(body.steps)
                case Choose(branches):
                    runs = [self.copy() for _ in branches]
                    for run, branch in zip(runs, branches, strict=True):
                        run.run(branch.steps)
                    longest = max(runs, key=lambda run: run.now)
                    self.__dict__.update(longest.__dict__)
        return self


@pytest.mark.parametrize("seed", range(200))
def test_times_are_those_of_a_clock_that_unrolls_everything(seed):
    steps = drawn(random.Random(seed))
    plain = Plain().run(steps)
    run = Steps.of(steps).run()
    assert run.totals.time == plain.now
    assert run.totals.exposed == plain.exposed
    assert sum(run.waits.values()) == plain.exposed


@pytest.mark.parametrize("seed", range(200))
def test_a_change_gives_the_times_of_a_run_from_nothing(seed):
    draw = random.Random(seed)
    steps = Steps.of(drawn(draw, most=200))
    steps.run()
    for _ in range(5):
        every = list(walked(steps))
        old = draw.choice([s for s in every if isinstance(s, Work | Start)] or every)
        match old:
            case Work(time):
                new = [Work(time + draw.randint(1, 40)), Work(draw.randint(0, 3))]
            case Start(key, time, links, after):
                new = [Start(key, time + draw.randint(1, 40), links, after)]
            case _:
                new = [old]
        steps = steps.replaced({old: new})
        known = steps.run()
        fresh = copied(steps).run()
        assert (known.totals, dict(known.waits), known.state) == (
            fresh.totals,
            dict(fresh.waits),
            fresh.state,
        )


def walked(steps):
    for step in steps.steps:
        yield step
        for inner in (step.body,) if isinstance(step, Repeat) else getattr(step, "branches", ()):
            yield from walked(inner)


def copied(steps):
    """Returns the same steps, which remember nothing."""

    def one(step):
        if isinstance(step, Repeat):
            return Repeat(copied(step.body), step.count)
        if isinstance(step, Choose):
            return Choose(tuple(map(copied, step.branches)))
        return step

    return Steps.of(map(one, steps.steps))


def test_a_step_that_does_not_occur_changes_nothing():
    steps = Steps.of([Work(3), Repeat(Steps.of([Work(4)]), 5)])
    assert steps.replaced({Work(3): [Work(9)]}) is steps  # another step that takes as long
    assert steps.run().totals.time == 23


def test_a_loop_costs_as_much_as_its_first_iterations():
    key = object()
    body = [Start(key, 30, LINKS), Work(20), Wait(key)]
    steps = Steps.of([Repeat(Steps.of(body), 10**12)])
    few = Steps.of([Repeat(Steps.of(body), 10)])
    assert calls_of(steps.run) <= calls_of(few.run)
    totals = steps.run().totals
    assert (totals.work, totals.exposed) == (20 * 10**12, 10 * 10**12)


def added(found, times=1):
    """Returns the work and the waits of moments, those in loops as often as they run."""
    work = waits = 0
    for moment in found:
        if isinstance(moment.step, Work):
            work += moment.time * times
        elif isinstance(moment.step, Start):
            waits += moment.wait * times
        else:
            count = getattr(moment.step, "count", 1)
            inner = added(moment.inside, times * count)
            assert inner == (sum(inner) - moment.wait * times, moment.wait * times)
            assert sum(inner) == moment.time * times
            work, waits = work + inner[0], waits + inner[1]
    return work, waits


@pytest.mark.parametrize("seed", range(200))
def test_moments_add_up_to_the_totals(seed):
    steps = Steps.of(drawn(random.Random(seed)))
    totals = steps.run().totals
    assert added(moments(steps)) == (totals.work, totals.exposed)


def test_an_iteration_that_waits_longer_counts_once():
    first, second = object(), object()
    body = Steps.of([Start(second, 10, ("link",)), Wait(second)])
    steps = Steps.of([Start(first, 1000, ("link",)), Repeat(body, 100), Wait(first)])
    loop = moments(steps)[1]
    assert (loop.wait, loop.inside[0].wait, loop.inside[0].time) == (2000, 20, 10)


@pytest.mark.parametrize("seed", range(100))
def test_hidden_is_the_work_while_a_transfer_travels(seed):
    """Picosecond by picosecond, without loops."""
    steps = drawn(random.Random(seed), depth=0, most=30)
    found = moments(Steps.of(steps))
    works = [one for one in found if isinstance(one.step, Work)]
    working = {at for one in works for at in range(one.start, one.start + one.time)}
    waited = {step.key: at for at, step in enumerate(steps) if isinstance(step, Wait)}
    for one in found:
        if isinstance(one.step, Start):
            travels = range(one.start, one.start + one.time)
            assert one.hidden == len(working.intersection(travels))
            assert one.hidden <= one.time
            beside = [w.step for w in works if {*travels}.intersection(range_of(w))]
            assert list(one.beside) == beside
            assert all(steps.index(step) < waited[one.step.key] for step in beside)


def range_of(moment):
    return range(moment.start, moment.start + moment.time)


def test_the_waits_of_a_loop_do_not_hide_a_transfer():
    far, near = object(), object()
    body = Steps.of([Start(near, 30, ("a",)), Wait(near), Work(10)])
    steps = Steps.of([Start(far, 10**6, ("b",)), Repeat(body, 5), Wait(far)])
    assert moments(steps)[0].hidden == 5 * 10


def test_a_transfer_without_links_takes_its_time():
    assert Steps.of([Start("g", 3, ()), Wait("g")]).run().totals.exposed == 3


@pytest.mark.parametrize("around", [lambda body: Repeat(body, 2), lambda body: Choose((body,))])
def test_a_transfer_must_be_waited_for_where_it_starts(around):
    with pytest.raises(AssertionError, match="ends before its transfers"):
        Steps.of([around(Steps.of([Start("g", 3, ("a",))]))]).run()
