"""The order in which links serve transfers."""

import random

import pytest

from meshdsl.lowering.costs.flights import queued
from meshdsl.lowering.costs.streams import Start, Steps, Wait, Work

LINK = ("data",)


def order(steps):
    return [step.key for step in steps if isinstance(step, Start)]


def chain(name, first, second):
    return [Start(f"{name}1", first, LINK), Start(f"{name}2", second, LINK, (f"{name}1",))]


def time(step):
    return step.time


def test_first_steps_go_before_second_ones():
    steps = [Wait("a2"), Work(10), Wait("b2")]
    found = queued(steps, {0: [*chain("a", 5, 20), *chain("b", 5, 20)]}, time)
    assert order(found) == ["a1", "b1", "a2", "b2"]
    assert Steps.of(found).run().totals.exposed == 30 + 10


def test_where_transfers_are_served_in_turn_they_keep_their_order():
    steps = [Wait("a2"), Work(10), Wait("b2")]
    found = queued(steps, {0: [*chain("a", 5, 20), *chain("b", 5, 20)]}, time, in_turn=True)
    assert order(found) == ["a1", "a2", "b1", "b2"] and found[4:] == steps


def test_a_start_stands_before_the_work_in_which_it_becomes_ready():
    first, second = Work(3), Work(4)
    found = queued([first, second], {0: chain("a", 5, 20), 1: [Start("b", 1, LINK)]}, time)
    assert found[:2] == [found[0], first] and order(found) == ["a1", "b", "a2"]
    assert found.index(second) == 4, "a2 is ready while the second work runs"


def test_transfers_of_one_step_that_are_ready_at_once_keep_their_order():
    starts = [Start(name, 7, LINK) for name in "cab"]
    assert order(queued([Work(1), *map(Wait, "abc")], {0: starts}, time)) == ["c", "a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_each_transfer_starts_once_behind_what_it_needs_and_before_its_wait(seed):
    draw = random.Random(seed)
    steps, starts, keys = [], {}, []
    for number in range(40):
        if draw.random() < 0.5:
            after = tuple(draw.sample(keys, min(len(keys), draw.randrange(3))))
            at = draw.randrange(len(steps) + 1)
            needed = [
                position for position, some in starts.items() for one in some if one.key in after
            ]
            starts.setdefault(max([at, *needed]), []).append(
                Start(number, draw.randrange(1, 50), (draw.choice("xy"),), after)
            )
            keys.append(number)
        else:
            steps.append(Work(draw.randrange(1, 50)))
    steps += [Wait(key) for key in keys]
    found = queued(steps, starts, time)
    assert [step for step in found if not isinstance(step, Start)] == steps
    begun = order(found)
    assert sorted(begun) == keys
    for some in starts.values():
        for start in some:
            assert all(begun.index(other) < begun.index(start.key) for other in start.after)
            assert found.index(start) < next(
                at
                for at, step in enumerate(found)
                if isinstance(step, Wait) and step.key == start.key
            )
