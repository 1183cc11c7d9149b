"""Newest: one task at a time, and of those that wait the newest."""

import threading

import pytest

from meshdsl.cli.exploring.newest import Newest, Replaced

SOON = 60  # seconds in which what is certain to happen has happened


class Gate:
    """A task that says when it begins, and waits until it may end."""

    def __init__(self):
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        assert self.may_end.wait(SOON)
        return self


@pytest.fixture
def newest():
    made = Newest(lambda task: task())
    yield made
    made.close()


def test_of_the_tasks_that_wait_only_the_newest_is_done(newest):
    gates = [Gate() for _ in range(4)]
    futures = [newest.ask(gates[0])]
    assert gates[0].begun.wait(SOON)
    futures += [newest.ask(gate) for gate in gates[1:]]
    for future in futures[1:3]:
        with pytest.raises(Replaced):
            future.result(SOON)
    for gate in gates:
        gate.may_end.set()
    assert futures[0].result(SOON) is gates[0]
    assert futures[3].result(SOON) is gates[3]
    assert [gate.begun.is_set() for gate in gates] == [True, False, False, True]


def test_a_task_begins_when_the_one_before_has_ended(newest):
    first, second = Gate(), Gate()
    one = newest.ask(first)
    assert first.begun.wait(SOON)
    other = newest.ask(second)
    assert not second.begun.is_set()
    first.may_end.set()
    assert one.result(SOON) is first
    assert second.begun.wait(SOON)
    second.may_end.set()
    assert other.result(SOON) is second


def test_an_error_is_that_of_its_task_and_others_go_on(newest):
    with pytest.raises(ZeroDivisionError):
        newest.ask(lambda: 1 / 0).result(SOON)
    assert newest.ask(lambda: 7).result(SOON) == 7


def test_nothing_is_done_for_a_reader_who_has_gone(newest):
    gate, done = Gate(), []
    newest.ask(gate)
    assert gate.begun.wait(SOON)
    assert newest.ask(lambda: done.append(1)).cancel()
    newest_of_all = newest.ask(lambda: 3)
    gate.may_end.set()
    assert newest_of_all.result(SOON) == 3
    assert not done


def test_its_thread_ends_when_it_is_closed():
    before = set(threading.enumerate())
    made = Newest(lambda task: task())
    (thread,) = set(threading.enumerate()) - before
    assert made.ask(lambda: 1).result(SOON) == 1
    made.close()
    thread.join(SOON)
    assert not thread.is_alive()
