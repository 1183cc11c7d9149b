"""The supervisor of a host that is not the first, where the first one is faked."""

import signal
import socket
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from meshdsl.training.exit_codes import FAILED
from meshdsl.training.launching import children, leading, member, succession, terms
from tests.training.launching.test_hosts import free_port


def test_the_end_of_a_process_is_told_whatever_is_in_the_folder_of_copies(monkeypatch, tmp_path):
    def said(folder):
        raise KeyError("start")

    told, reported = [], []
    monkeypatch.setattr(member, "said", said)
    rest = lambda flags: ["/no/such/program"], {}, tmp_path, (60.0, 60.0), reported.append
    agreed = terms.Terms("localhost:1", 2, "one", 30.0)
    one = member.Member(terms.Host(agreed, range(1, 2), *rest, copies=tmp_path))
    line = SimpleNamespace(send=lambda **message: told.append(message))
    one._start(line, {"start": 1, "of": 1, "shown": False, "flags": [], "variables": {}})
    (message,) = told
    assert (message["ended"], message["code"], message["copies"]) == (1, 1, [])
    assert "No such file" in message["lines"][0] and str(tmp_path) in reported[0]


@pytest.fixture
def first(tmp_path):
    """Returns the supervisor of host 0 of a job that another one leads, as the workdir says."""
    rest = lambda flags: flags, {}, tmp_path, (60.0, 60.0), lambda text: None
    leading.lead(tmp_path, "other:5")
    return member.Member(terms.Host(terms.Terms("localhost:1", 2, "one", 30.0), [0], *rest), True)


def test_the_first_host_asks_again_for_one_that_leads(first, monkeypatch):
    with socket.socket() as connection:
        answers = iter([OSError("no network yet"), connection])

        def asked(address):
            answer = next(answers)
            if answer is not connection:
                raise answer
            return answer

        monkeypatch.setattr(leading, "asked", asked)
        assert first._connected(60.0, time.monotonic()) is connection


def test_the_first_host_leads_where_the_one_that_led_stays_away(first, monkeypatch):
    def asked(address):
        raise OSError("no route")

    monkeypatch.setattr(leading, "asked", asked)
    monkeypatch.setattr(member, "_ASKED_FOR", 0.7)
    since = time.monotonic()
    assert first._connected(60.0, since) == ""
    assert time.monotonic() > since + 0.7


@pytest.fixture
def compiles(tmp_path):
    """Returns what makes the supervisor of a host whose rehearsals run a program."""

    def make(program, numbers=range(1, 2)):
        said = []
        rest = lambda flags: [sys.executable, "-c", program, *flags], {}, tmp_path, (60.0, 60.0)
        agreed = terms.Terms("localhost:1", 3, "one", 30.0)
        return member.Member(terms.Host(agreed, numbers, *rest, said.append)), said

    return make


def test_all_that_compiles_ahead_on_a_host_ends_before_a_start(compiles, tmp_path):
    """Each place has one, and the second does not end the first."""
    begun = "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)"
    one, said = compiles(begun, range(1, 3))
    one._start_number = 1  # it takes part in the start that rehearses
    line = SimpleNamespace(send=lambda **message: said.append(message))
    for number in (1, 2):
        message = {"rehearse": number, "of": 1, "variables": {}}
        one._rehearse(line, {**message, "flags": [f"{tmp_path}/{number}"]})
    while not all((tmp_path / str(number)).exists() for number in (1, 2)):
        time.sleep(0.02)
    children = [*one._rehearsals._children]
    assert [child.code for child in children] == [None, None]
    message = {"start": 1, "of": 2, "shown": False, "variables": {}}
    one._start(line, {**message, "flags": [f"{tmp_path}/0"]})
    assert {child._process.wait() for child in children} == {-signal.SIGKILL} and not said
    one.children[1].kill()


@pytest.mark.parametrize(
    ("program", "event"),
    [
        ("1 / 0", "ended with exit code 1, and the job goes on: ZeroDivisionError: div"),
        ("import os; os.kill(os.getpid(), 9)", "was killed by signal 9 (SIGKILL), and the job"),
        ("raise SystemExit(75)", {"rehearsed": 1, "of": 4}),
    ],
)
def test_the_first_supervisor_knows_what_has_compiled_ahead(program, event, compiles):
    """What could not is reported on its host, and does no harm."""
    one, said = compiles(program)
    line = SimpleNamespace(send=lambda **message: said.append(message))
    one._rehearse(line, {"rehearse": 1, "of": 4, "flags": [], "variables": {}})
    while not said:
        time.sleep(0.02)
    (first,) = said
    assert (
        first == event
        if isinstance(event, dict)
        else first.removeprefix("what compiles ahead ").startswith(event)
    )


def test_a_signal_that_comes_while_others_are_asked_is_not_lost(monkeypatch, tmp_path):
    agreed = terms.Terms("localhost:1", 2, "one", 30.0)
    host = terms.Host(agreed, range(1, 2), None, {}, tmp_path, (60.0, 60.0), str)
    one = member.Member(host, leads=True)

    def asked(address):
        one._signal = signal.SIGTERM
        raise OSError("away")

    monkeypatch.setattr(leading, "asked", asked)
    monkeypatch.setattr(one, "_candidates", lambda: ["localhost:1"])
    assert one._connected(60.0, time.monotonic()) is None


def test_a_host_that_was_cut_off_when_the_job_ended_ends_too(tmp_path):
    leading.end(tmp_path, 65)
    assert leading.leader(tmp_path)[1] is None
    agreed = terms.Terms(f"localhost:{free_port()}", 2, "one", 30.0)
    rest = range(1, 2), None, {}, tmp_path, (60.0, 60.0), str
    assert member.Member(terms.Host(agreed, *rest), joined=True).run() == 65
    # The next job in the workdir begins as if nothing had ended there.
    leading.lead(tmp_path, "localhost:1")
    assert leading.ended(tmp_path) is None


def listed(number, port=1):
    return leading.Listed(f"host{number}", ("127.0.0.1",), port, 1, f"host{number}")


def test_one_that_stood_by_a_moment_ago_comes_first(first):
    """Where it begins to lead it listens at no port for an instant: two would lead."""
    first.leads, first._hosts, first._id = False, [listed(0, 5), listed(1), listed(2)], "host1"
    first.host = replace(first.host, terms=replace(first.host.terms, total=2), shrink_after=0.0)
    first._stood_by = {"127.0.0.1:5": 100.0}
    assert first._leads_now(101.0, 10.0, 60.0) is None
    assert first._leads_now(103.0, 10.0, 60.0) is None  # nobody else stands by: too few are left
    first._stood_by = {"127.0.0.1:5": 100.0, "127.0.0.1:1": 103.0}
    assert first._leads_now(101.0, 10.0, 60.0) is None
    assert first._leads_now(103.0, 10.0, 60.0) == "127.0.0.1:0"


def test_a_host_on_which_a_process_stays_starts_no_other(first, monkeypatch, tmp_path):
    """The first supervisor sees that the connection ends, and goes on without this host."""
    monkeypatch.setattr(children, "_ENDING", 0.2)
    monkeypatch.setattr(children.os, "killpg", lambda group, number: None)
    said, child = [], children.Child(1, True)
    first.host = replace(first.host, report=said.append)
    child.start([sys.executable, "-c", "import time; time.sleep(600)"], lambda child: None)
    first.children = {1: child}
    assert first._start(None, {"start": 1, "of": 3, "shown": True}) is False
    assert first.children == {1: child}
    assert said == [child.unkillable]
    child.send(signal.SIGKILL)


def test_the_first_host_leads_before_its_patience_ends(first, monkeypatch):
    """With a --join_timeout that is shorter than it asks for another one."""

    def asked(address):
        raise OSError("no route")

    monkeypatch.setattr(leading, "asked", asked)
    assert first._connected(2.0, time.monotonic()) == ""


def test_a_host_on_which_a_process_stays_does_not_join_another_leader(first, monkeypatch):
    class Superseded:
        has_unkillable = True

        def run(self):
            raise leading.Superseded

    monkeypatch.setattr(succession.Member, "run", lambda self: leading.Succession())
    monkeypatch.setattr(succession.HostSupervisor, "_leader", lambda self, end: Superseded())
    assert succession.HostSupervisor(first.host, (5, 60.0)).run() == FAILED


def test_a_host_says_when_it_takes_part_after_it_has_waited(first, monkeypatch):
    """Else a spare host, or one that comes back, says nothing while it trains."""
    monkeypatch.setattr(children.Child, "start", lambda self, *given: None)
    reports = []
    first.host = replace(first.host, report=reports.append)

    def start(of):
        message = {"of": of, "start": 1, "shown": True, "flags": [], "variables": {}}
        assert first._start(None, message)

    start(1)
    start(2)
    assert reports == []
    start(4)  # another host had its place in the third
    first._waits = True  # its connection was broken
    start(5)
    start(6)
    assert reports == [f"takes part in start {of}, with process 1" for of in (4, 5)]
