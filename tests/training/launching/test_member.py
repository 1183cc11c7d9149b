"""The supervisor of a host that is not the first, where the first one is faked."""

import signal
import sys
import time
from types import SimpleNamespace

import pytest

from meshdsl.training.launching import leading, member, terms
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


@pytest.mark.parametrize("asked", [False, True])
def test_what_compiles_ahead_ends_before_a_start(asked, tmp_path):
    program = f"open(r'{tmp_path}/begun', 'w').write('x'); import time; time.sleep(60)"
    said = []
    rest = lambda flags: [sys.executable, "-c", program], {}, tmp_path, (60.0, 60.0), said.append
    agreed = terms.Terms("localhost:1", 2, "one", 30.0)
    one = member.Member(terms.Host(agreed, range(1, 2), *rest, rehearses=asked))
    one._rehearse({"rehearse": 1, "flags": [], "variables": {}})
    while asked and not (tmp_path / "begun").exists():
        time.sleep(0.02)
    child = one._rehearsal
    line = SimpleNamespace(send=lambda **message: None)
    one._start(line, {"start": 1, "of": 1, "shown": False, "flags": [], "variables": {}})
    assert (child and child.code) == (-signal.SIGKILL if asked else None) and not said
    one.children[1].kill()


def test_what_cannot_compile_ahead_is_told_and_does_no_harm(tmp_path):
    said = []
    rest = lambda flags: [sys.executable, "-c", "1 / 0"], {}, tmp_path, (60.0, 60.0), said.append
    host = terms.Host(terms.Terms("localhost:1", 2, "one", 30.0), range(1, 2), *rest)
    terms.rehearsing(host, 1, [], {})
    while not said:
        time.sleep(0.02)
    told = "what compiles ahead ended with exit code 1, and the job goes on: ZeroDivisionError: div"
    assert said[0].startswith(told)


def test_a_signal_that_comes_while_others_are_asked_is_not_lost(monkeypatch, tmp_path):
    agreed = terms.Terms("localhost:1", 2, "one", 30.0)
    host = terms.Host(agreed, range(1, 2), None, {}, tmp_path, (60.0, 60.0), str)
    one = member.Member(host, leads=True)

    def asked(address):
        one._signal = signal.SIGTERM
        raise OSError("away")

    monkeypatch.setattr(member, "asked", asked)
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
