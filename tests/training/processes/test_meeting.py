"""Processes meet before JAX connects them; those that do not come are named to all others."""

import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from meshdsl.training.processes import meeting
from meshdsl.training.processes.meeting import Meeting, listed
from tests.lowering.backends.tf.hosts.test_cluster import free_ports


@pytest.fixture
def coordinator():
    (port,) = free_ports(1)
    return f"localhost:{port}"


class Clock:
    """A clock that runs `ahead` seconds ahead, so that no test depends on how fast threads run."""

    def __init__(self):
        self.ahead = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead

    def passes_at(self, line):
        """Returns a report that lets an hour pass when a line comes."""

        def report(text):
            if text == line:
                self.ahead = 3600.0

        return report


@pytest.fixture
def clock(monkeypatch):
    """Returns the clock of all meetings, which report often."""
    made = Clock()
    namespace = SimpleNamespace(monotonic=made.monotonic, sleep=time.sleep)
    monkeypatch.setattr(meeting, "time", namespace)
    monkeypatch.setattr(meeting, "_REPORT_AFTER", 0.01)
    monkeypatch.setattr(meeting, "_REPORT_EVERY", 0.01)
    return made


def met(coordinator, count, indices, timeout=60.0, report=lambda line: None):
    """Returns what some processes, here threads, get out of a meeting: values or an error."""

    def one(index):
        try:
            return Meeting(coordinator, count, index, timeout, report).meet(f"value {index}")
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(len(indices)) as pool:
        return list(pool.map(one, indices))


def visit(coordinator, text):
    """Connects to the first process as soon as it listens, and says something."""
    host, port = coordinator.split(":")
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
        except OSError:
            time.sleep(0.02)
            continue
        connection.sendall(text)
        return connection


def hello(process, count=3):
    return json.dumps({"process": process, "count": count, "value": None}).encode() + b"\n"


@pytest.mark.parametrize("count", [1, 2, 9])
def test_all_get_the_values_of_all_in_order(coordinator, count):
    values = [f"value {index}" for index in range(count)]
    assert met(coordinator, count, range(count)) == [values] * count


def test_processes_that_do_not_come_are_named_to_all_others(coordinator, clock):
    report = clock.passes_at("waiting for processes 1 and 3 to join")
    for text in met(coordinator, 4, [0, 2], report=report):
        assert "processes 1 and 3 did not join within 60 s" in text
        assert "--join_timeout waits longer" in text


def test_a_first_process_that_does_not_come_is_named(coordinator):
    (text,) = met(coordinator, 2, [1], timeout=0.5)
    assert f"process 0, the coordinator at {coordinator}, did not come within 0.5 s" in text
    assert "Connection refused" in text


def test_a_process_that_came_and_ended_is_missing_again(coordinator, clock):
    thread = threading.Thread(target=lambda: visit(coordinator, hello(1)).close())
    thread.start()
    missing = "processes 1 (was there, on 127.0.0.1, and has ended) and 2"
    (text,) = met(coordinator, 3, [0], report=clock.passes_at(f"waiting for {missing} to join"))
    thread.join()
    assert f"{missing} did not join" in text


def test_a_process_that_is_started_in_place_of_another_counts(coordinator, clock):
    gone = "waiting for processes 1 (was there, on 127.0.0.1, and has ended) and 2 to join"
    with ThreadPoolExecutor(2) as pool:
        pool.submit(lambda: visit(coordinator, hello(1)).close())
        others = []

        def report(line):
            if line == gone and not others:
                others.append(pool.submit(met, coordinator, 3, [1, 2]))

        first = met(coordinator, 3, [0], report=report)
        assert first == [["value 0", "value 1", "value 2"]]
        assert others[0].result() == 2 * first


def test_who_is_missing_is_reported_while_waiting(coordinator, clock):
    """Process 2 comes when it is reported missing: the meeting ends well only if it is."""
    with ThreadPoolExecutor(1) as pool:
        last = []

        def report(line):
            if line == "waiting for process 2 to join" and not last:
                last.append(pool.submit(met, coordinator, 3, [2]))

        assert met(coordinator, 3, [0, 1], report=report) == 2 * last[0].result()


def test_a_missing_first_process_is_reported_while_waiting(coordinator, clock):
    with ThreadPoolExecutor(1) as pool:
        first = []

        def report(line):
            if line == f"waiting for process 0 at {coordinator}: Connection refused" and not first:
                first.append(pool.submit(met, coordinator, 2, [0]))

        assert met(coordinator, 2, [1], report=report) == first[0].result()


def test_two_processes_with_one_number_are_an_error_in_all(coordinator):
    others = [visit_later(coordinator, hello(1)) for _ in range(2)]
    (text,) = met(coordinator, 3, [0])
    assert "two processes have the number 1, on 127.0.0.1 and on 127.0.0.1" in text
    for other in others:
        with other() as connection:
            assert "two processes have the number 1" in json.loads(connection.recv(9999))["error"]


def visit_later(coordinator, text):
    found = []
    thread = threading.Thread(target=lambda: found.append(visit(coordinator, text)))
    thread.start()

    def result():
        thread.join()
        return found[0]

    return result


def test_processes_that_count_differently_are_an_error_in_all(coordinator):
    other = visit_later(coordinator, hello(1, count=2))
    (text,) = met(coordinator, 3, [0])
    assert "process 1 on 127.0.0.1 was started with --num_processes=2, process 0 with 3" in text
    with other() as connection:
        assert "--num_processes=2" in json.loads(connection.recv(9999))["error"]


@pytest.mark.parametrize(
    "text", [b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"process": []}\n', b"x" * 2**17, b"7\n"]
)
def test_what_is_no_process_of_ours_is_let_go(coordinator, text, clock):
    """Time passes once it is: the meeting then ends without it."""

    def visitor():
        with suppress(OSError), visit(coordinator, text) as connection:
            connection.recv(1)  # until it is closed
        clock.ahead = 3600.0

    with ThreadPoolExecutor(1) as pool:
        pool.submit(visitor)
        (found,) = met(coordinator, 2, [0])
    assert "process 1 did not join" in found


def test_a_port_in_use_is_an_error_that_says_so(coordinator):
    with socket.create_server(("", int(coordinator.split(":")[1]))):
        (text,) = met(coordinator, 2, [0])
    assert "process 0 cannot listen on port" in text and "a second process 0" in text


@pytest.mark.parametrize("wrong", ["host0", "host0:", ":12", "host0:port", "host0:99999"])
def test_a_coordinator_is_a_host_and_a_port(wrong):
    (text,) = met(wrong, 2, [1])
    assert f"coordinator {wrong!r}: it is host:port" in text


def test_long_lists_of_processes_are_cut():
    assert listed([3]) == "process 3"
    assert listed(range(12)) == "processes 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_a_port_that_one_before_holds_for_a_moment_is_waited_for(coordinator, monkeypatch):
    port = int(coordinator.split(":")[1])
    other = socket.create_server(("", port))
    monkeypatch.setattr(meeting.time, "sleep", lambda seconds: other.close())
    meeting.check_free(port)


def test_too_many_open_files_do_not_end_what_accepts(monkeypatch):
    monkeypatch.setattr(meeting, "_ACCEPT_AGAIN", 0.0)
    left = [OSError(errno.EMFILE, ""), ("one", 1), OSError(errno.ECONNABORTED, ""), ("two", 2)]
    left.append(OSError(errno.EINVAL, "shut down"))

    def accept():
        result = left.pop(0)
        if isinstance(result, OSError):
            raise result
        return result

    listener = SimpleNamespace(accept=accept)
    assert [*meeting.accepted(listener)] == [("one", 1), ("two", 2)] and not left


def test_what_accepts_ends_when_its_listener_is_shut_down_or_closed():
    listener = meeting.listening(0)
    thread = threading.Thread(target=lambda: [*meeting.accepted(listener)], daemon=True)
    thread.start()
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(60)
    assert not thread.is_alive()
    listener.close()
    assert [*meeting.accepted(listener)] == []
