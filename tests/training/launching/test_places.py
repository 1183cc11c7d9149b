"""Who has which number in a start, and what is reported of who takes whose place."""

import json
import socket
from types import SimpleNamespace

import pytest

from meshdsl.training.launching.events import compiled_counts
from meshdsl.training.launching.places import Named, by_host, change, host_of, in_order

HERE = socket.gethostname()


def place(name):
    """Returns a place by its host and number, as `b1`; `me0` is on the host that leads."""
    host, number = name[:-1], int(name[-1])
    name = f"host-{host.strip('+')}"  # b+ is a new supervisor of the host of b
    return None if host == "me" else SimpleNamespace(own_id=host, host=name), number


def last(names):
    return [(Named.of(one), host_of(one)) for one in map(place, names.split())]


@pytest.mark.parametrize(
    "before, now, ordered",
    [
        ("", "me0 b1 c2", "me0 b1 c2"),
        ("me0 b1 c2", "me0 c2 d0", "me0 d0 c2"),  # whoever stays keeps the number
        ("me0 b1 c2", "me0 c2", "me0 c2"),
        ("me0 c2", "me0 b1 c2", "me0 c2 b1"),
    ],
)
def test_who_stays_keeps_the_number_if_there_is_one(before, now, ordered):
    names = [place(name) for name in now.split()]
    places = in_order(names, [one for one, _ in last(before)])
    assert [Named.of(one) for one in places] == [one for one, _ in last(ordered)]


@pytest.mark.parametrize(
    "before, now, said",
    [
        ("", "me0 b1", ""),  # the first start
        ("me0 b1", "me0 b1", ""),
        ("me0 b1", "me0", ""),  # that fewer go on is reported with their mesh
        ("me0 b1", "me0 c0", "host-c takes part in the place of host-b, with process 1"),
        ("me0", "me0 b1 b2", "host-b takes part, with processes 1 and 2"),
        ("me0 b1", "me0 b+1", "host-b takes part, with process 1"),
        ("me0 b1 c2", "me0 b+1 d2", "host-b, host-d take part in the place of host-c, with"),
        ("me0 b1 c2", "me0 d1 e2", "host-d, host-e take part in the place of host-b, host-c"),
    ],
)
def test_who_takes_whose_place_is_reported(before, now, said):
    text = change([place(name) for name in now.split()], last(before))
    assert text.startswith(said) and bool(text) == bool(said)


def test_a_new_leader_reports_who_has_which_processes():
    places = [place(name) for name in ("me0", "b1", "b2", "c3")]
    said = f"process 0 on {HERE}, processes 1 and 2 on host-b, process 3 on host-c"
    assert by_host(places) == said


def test_a_new_leader_knows_for_how_many_processes_programs_were_compiled(tmp_path):
    """Else they are compiled ahead again, beside the steps."""
    file = tmp_path / "launch.jsonl"
    assert compiled_counts(file) == set()
    lines = [
        {"event": "started", "start": 1, "processes": [0, 1, 2, 3]},  # of an earlier command
        {"event": "stepped", "start": 1},
        {"event": "started", "start": 1, "processes": [0, 1, 2]},
        {"event": "stepped", "start": 1},
        {"event": "compiled_ahead", "start": 1, "processes": 2},
        {"event": "started", "start": 2, "processes": [0]},
        {"event": "failed", "start": 2},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compiled_counts(file) == {2, 3}
