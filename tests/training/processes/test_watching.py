"""A process that has ended is seen to have ended; one that stands still is waited for."""

import contextlib
import math
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from meshdsl.training.processes import watching
from meshdsl.training.processes.watching import JobProcesses, Look, Watch


@pytest.fixture
def listening():
    """Returns what makes a socket that listens, until the test ends."""
    made = []

    def one():
        own = socket.create_server(("localhost", 0))
        made.append(own)
        return own

    yield one
    for each in made:
        each.close()


def port(own):
    return own.getsockname()[1]


def free_port():
    with socket.create_server(("localhost", 0)) as own:
        return port(own)


def test_looks_are_answered_however_often(listening):
    own = listening()
    hosts = ("localhost",), ("not.there.invalid",), ("not.there.invalid", "localhost")
    job = JobProcesses(0, hosts, (port(own),) * 3, own)
    thread = threading.Thread(target=job.answer, daemon=True)
    thread.start()
    for _ in range(20):
        assert job.absent([0] * 16) == []
    assert job.absent([0, 1, 2]) == [1]
    job.close()
    thread.join(10)
    assert not thread.is_alive() and job.absent([0]) == [0]


def test_a_process_that_stands_still_is_silent_and_not_ended(listening, monkeypatch):
    monkeypatch.setattr(watching, "_SECONDS", 0.2)
    still = listening()  # the system accepts for it, and nobody answers
    job = JobProcesses(0, (("localhost",),) * 2, (port(still), free_port()), still)
    assert job.looks([0, 1]) == {0: Look.SILENT, 1: Look.ENDED}


def test_one_whose_names_cannot_be_looked_up_is_silent_and_not_ended(listening):
    hosts = ("not.there.invalid",), (), ("not.there.invalid", "localhost")
    job = JobProcesses(0, hosts, (free_port(),) * 3, listening())
    assert job.looks([0, 1, 2]) == {0: Look.SILENT, 1: Look.SILENT, 2: Look.ENDED}


class Over(threading.Event):
    """The event that ends a watch; something happens at each of its first waits."""

    def __init__(self, actions):
        super().__init__()
        self.actions = [*actions]

    def wait(self, timeout=None):
        if self.actions:
            self.actions.pop(0)()
        return super().wait(timeout)


@pytest.fixture
def watch(monkeypatch):
    """Returns what runs a quick watch over a process with a port; it ends after some seconds."""
    for name, value in {
        "_SECONDS": 0.1,
        "_EVERY": 0.05,
        "_GRACE": 0.1,
        "_REPORT_AFTER": 0.3,
    }.items():
        monkeypatch.setattr(watching, name, value)
    lines, reasons = [], []
    monkeypatch.setattr(watching, "report", lines.append)

    def run(other, pause, seconds, *actions):
        job = JobProcesses(0, (("localhost",),) * 2, (0, other), socket.socket(), watched=(1,))
        over = Over(actions)
        made = Watch(job, pause, over, reasons.append)
        thread = threading.Thread(target=made.run)
        thread.start()
        yield
        thread.join(seconds)
        over.set()
        thread.join()
        job.listening.close()

    return run, lines, reasons


def test_one_that_has_ended_is_named(watch):
    run, lines, reasons = watch
    list(run(free_port(), 60, 5))
    (reason,) = reasons
    assert "process 1 on localhost of the job has ended" in reason and not lines


@pytest.fixture
def three(listening):
    """Returns three processes of a job that answer each other."""
    own = [listening() for _ in range(3)]
    hosts = (("localhost",),) * 3
    jobs = [JobProcesses(n, hosts, (*map(port, own),), each) for n, each in enumerate(own)]
    for job in jobs:
        threading.Thread(target=job.answer, daemon=True).start()
    yield jobs
    for job in jobs:
        job.close()


def test_one_that_ends_because_another_has_ended_is_not_named(three):
    first, second, third = three
    third.close()
    assert second.why([2]).startswith("process 2 on localhost of the job has ended, and")
    second.say(second.why([2]))
    second.close()
    assert first.looks([1, 2]) == {1: Look.ENDED, 2: Look.ENDED}
    assert first.why([1, 2]) == second.why([2])


def test_what_no_process_says_changes_no_reason(three):
    first = three[0]
    for text in (b"", b"GET / HTTP/1.0\r\n\r\n", b"3", b'{"process": 1}', b"x" * 10000):
        with socket.create_connection(("localhost", first.ports[0])) as stranger:
            stranger.sendall(text)
            with contextlib.suppress(OSError):  # it has hung up
                stranger.shutdown(socket.SHUT_WR)
                stranger.recv(1)
    three[1].say("two\nlines \x1b[31m")
    assert not first.reasons
    three[1].say("two\nlines")
    assert first.reasons == {1: "two lines"}


def test_a_failure_is_that_of_another_process_of_the_job(three):
    first = three[0]
    for number in ("7", "-1", "0", "true", '"1"'):
        with socket.create_connection(("localhost", first.ports[0])) as stranger:
            words = f'{{"process": {number}, "reason": "x", "alone": true}}'
            stranger.sendall(words.encode())
    three[1].say("process 2 has ended")
    until(lambda: 1 in first.reasons)
    assert first.failure is None
    three[1].say("the disk is full", alone=True)
    until(lambda: first.failure)
    assert first.failure == "the disk is full"


def test_a_stranger_that_says_nothing_is_not_waited_for(three, monkeypatch):
    monkeypatch.setattr(watching, "_HEARING", 0.05)
    with socket.create_connection(("localhost", three[0].ports[0])):
        assert three[1].looks([0]) == {0: Look.ANSWERS}


def until(true):
    """Waits until something is true, however busy the machine is."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_one_that_stands_still_is_waited_for_and_named_meanwhile(watch, listening):
    run, lines, reasons = watch
    still = listening()
    for _ in run(port(still), 60, 0):
        until(lambda: lines)
        job = JobProcesses(1, (), (), still)
        threading.Thread(target=job.answer, daemon=True).start()
        until(lambda: len(lines) > 1)
    job.close()
    assert not reasons
    assert lines[:2] == [
        "process 1 on localhost does not answer; it is waited for up to 60 s (--pause_timeout)",
        "process 1 on localhost answers again",
    ]


def test_one_that_stands_still_for_too_long_is_named(watch, listening):
    run, _, reasons = watch
    list(run(port(listening()), 0.5, 5))
    (reason,) = reasons
    assert "process 1 on localhost of the job has not answered for 0.5 s" in reason
    assert "--pause_timeout waits longer" in reason


@pytest.mark.parametrize(("others_end_later", "pause"), [(False, 60), (False, 110), (True, 60)])
def test_a_pause_of_this_process_is_named_only_if_the_others_are_gone_after_it(
    watch, listening, monkeypatch, others_end_later, pause
):
    run, _, reasons = watch
    other, ahead = listening(), [0.0]
    job = JobProcesses(1, (), (), other)
    threading.Thread(target=job.answer, daemon=True).start()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(ahead))
    monkeypatch.setattr(watching, "time", clock)

    def stand_still():
        ahead.append(100.0)

    def stand_still_and_be_left():
        stand_still()
        job.close()

    def nothing():
        pass

    later = (stand_still, nothing, job.close)
    actions = later if others_end_later else (stand_still_and_be_left,)
    list(run(port(other), pause, 60, nothing, *actions))
    (reason,) = reasons
    assert "process 1 on localhost of the job has ended" in reason
    assert ("This process itself stood still for 100 s" in reason) == (pause == 110)
    cause = "this process stood still for 100 s (it was stopped, or its machine was), and the other"
    assert reason.startswith(cause) == (pause == 60 and not others_end_later)


def test_a_process_that_wakes_knows_it_before_its_watch(three, monkeypatch):
    made = Watch(three[0], 60, threading.Event(), print)
    assert made.why([1]).startswith("process 1 on localhost of the job has ended")
    thread = threading.Thread(target=made.run)
    thread.start()
    until(lambda: made._due < math.inf)
    now = time.monotonic()
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now + 200))
    reason = made.why([1])
    made.over.set()
    thread.join()
    assert reason.startswith("this process stood still for ")
    assert "wait for 60 s (--pause_timeout): process 1 on localhost of the job has" in reason


def test_a_watch_that_is_over_leaves_another_of_the_same_process_at_work(watch):
    run, _, reasons = watch
    for _ in run(free_port(), 60, 0):
        pass  # over at once
    assert not reasons
    list(run(free_port(), 60, 5))
    assert len(reasons) == 1
