"""The crew of a first supervisor, whose other hosts are faked, with a clock that the test sets."""

import socket
from types import SimpleNamespace

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.launching import hosts
from meshdsl.training.launching.elastic import Elastic


def free_port():
    with socket.create_server(("localhost", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def leader(tmp_path, monkeypatch):
    """Returns what makes the crew of a first supervisor, with a clock that the test sets."""
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    now, made = [1000.0], []

    def make(**given):
        terms = hosts.Terms(
            f"localhost:{free_port()}",
            3,
            "one",
            30.0,
            Elastic(Mesh.parse("data:6"), "data", 3, 12),
        )
        said = []
        rest = range(1), None, {}, tmp_path, (60.0, 60.0), said.append
        made.append(hosts.Hosts(terms, *rest, **given))
        return made[-1], said, now

    yield make
    for crew in made:
        crew.close(1)


def came(crew, number):
    """Lets another host come to a first supervisor."""
    line = SimpleNamespace(send=lambda **said: None, close=lambda: None, heard=0.0)
    name = f"host{number}"
    new = hosts._Member(line, range(number, number + 1), name, name, False, [name], 1)
    assert crew._not_now({"token": crew._token}, new) == ""


def test_one_that_leads_anew_waits_for_all_that_live_and_names_who_does_not_come(leader):
    """Without their copies the state may be lacking, though fewer could go on."""
    others = {f"host{n}": f"host{n}" for n in (1, 2)}
    crew, said, now = leader(starts=1, shrink_after=10.0, awaited=others)
    came(crew, 1)
    now[0] += 9
    assert crew._count() == 0
    came(crew, 2)
    assert (crew._count(), said) == (3, [])

    crew, said, now = leader(starts=1, shrink_after=10.0, awaited=others)
    came(crew, 2)
    now[0] += 16
    assert [crew._count(), crew._count()] == [2, 2]
    (told,) = said
    assert told.startswith("host1: stood by when the first supervisor was lost, but did not come")


def test_one_that_leads_anew_does_not_wait_for_those_that_are_gone(leader):
    crew, said, _ = leader(starts=1, shrink_after=10.0, awaited={"host2": "host2"})
    came(crew, 2)
    assert (crew._count(), said) == (2, [])
