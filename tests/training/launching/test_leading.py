"""The crew of a first supervisor, whose other hosts are faked, with a clock that the test sets."""

import json
import re
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.launching import crew, hosts, leading, remote, terms
from meshdsl.training.launching.children import Child
from meshdsl.training.launching.elastic import Elastic
from meshdsl.training.launching.events import NAME, events_of
from meshdsl.training.launching.leading import Listed
from meshdsl.training.processes import meeting
from tests.training.launching.test_hosts import free_port


@pytest.fixture
def leader(tmp_path, monkeypatch):
    """Returns what makes the crew of a first supervisor, with a clock that the test sets."""
    monkeypatch.setattr(hosts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    now, made = [1000.0], []

    def make(shrink_after, port=None, rehearses=False, **given):
        agreed = terms.Terms(
            f"localhost:{port or free_port()}",
            3,
            "one",
            30.0,
            Elastic(Mesh.parse("data:6"), "data", 3, 12),
        )
        said = []
        rest = range(1), None, {}, tmp_path, (60.0, 60.0), said.append
        host = terms.Host(agreed, *rest, shrink_after, rehearses=rehearses)
        made.append(hosts.Hosts(host, **given))
        return made[-1], said, now

    yield make
    for one in made:
        one.close(1)


def came(crew, number, copies=(), spare=False):
    """Lets another host come to a first supervisor; returns it."""
    line = SimpleNamespace(send=lambda **said: None, close=lambda: None, heard=0.0)
    name, one = f"host{number}", terms.Devices(1, True)
    first = 0 if spare else number
    new = remote.RemoteHost(
        line, range(first, first + 1), name, name, spare, [name], 1, copies, one, True
    )
    assert crew._not_now({"token": crew._token}, new) == ""
    return new


@pytest.mark.parametrize("taken", [0, 1])
def test_a_port_that_others_have_is_told_before_anything_is_started(taken, leader, monkeypatch):
    """Supervisors meet at the first port, processes at the one after it."""
    monkeypatch.setattr(meeting, "_HELD", 0.0)
    port = free_port()
    where = ["", ", the one after that of --coordinator"][taken]
    with (
        socket.create_server(("", port + taken)),
        pytest.raises(ValueError, match=f"cannot listen on port {port + taken} of .*{where}: Addr"),
    ):
        leader(0.0, port)


def test_a_host_without_free_ports_is_told_how_to_find_them(monkeypatch):
    def create(*_, **given):
        raise OSError(98, "Address already in use (while attempting to bind on address ...)")

    monkeypatch.setattr(socket, "create_server", create)
    told = "no free port for {}: Address already in use. See what has them (ss -tan), or "
    for who, ask in (
        ("its processes to meet at", crew.free_port),
        ("the supervisor, where it stands by", leading.Standby),
    ):
        with pytest.raises(ValueError, match=re.escape(told.format(who))):
            ask()


@pytest.mark.parametrize(
    ("virtual", "variables", "files", "devices"),
    [
        (4, {}, 8, (4, True)),
        (None, {"JAX_PLATFORMS": "cpu"}, 8, None),
        (None, {"CUDA_VISIBLE_DEVICES": "0, 3"}, 8, (2, True)),
        (None, {"CUDA_VISIBLE_DEVICES": ""}, 8, None),
        (None, {"CUDA_VISIBLE_DEVICES": "-1"}, 8, None),
        (None, {}, 8, (8, False)),
        (None, {}, 0, None),
    ],
)
def test_devices_are_counted_without_opening_them(virtual, variables, files, devices, monkeypatch):
    monkeypatch.setattr(terms, "glob", lambda pattern: ["file"] * files)
    assert terms.devices_here(virtual, variables) == devices


def awaited(*numbers):
    """Returns hosts that have not come yet."""
    return [Listed(f"host{n}", (f"host{n}",), 1, 1, f"host{n}") for n in numbers]


def test_one_that_leads_anew_waits_for_all_that_live_and_names_who_does_not_come(leader):
    """Without their copies the state may be lacking, though fewer could go on."""
    others = awaited(1, 2)
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

    crew, said, now = leader(starts=1, shrink_after=10.0, awaited=others, left=True)
    now[0] += 16
    crew._count()
    assert said[0].startswith("host1, host2: stood by when the first supervisor left the job, but")


def test_one_that_leads_anew_does_not_wait_for_those_that_are_gone(leader):
    crew, said, _ = leader(starts=1, shrink_after=10.0, awaited=awaited(2))
    came(crew, 2)
    assert (crew._count(), said) == (2, [])


def took(crew, *numbers):
    """Lets hosts come to a first supervisor, and begins a start."""
    for number in numbers:
        came(crew, number)
    return crew.assemble(SimpleNamespace(ending=False))


def test_a_host_that_comes_back_without_some_of_its_devices_is_refused(leader):
    """Else its process would end at every start, and the job at last."""
    crew, said, _ = leader(shrink_after=10.0)

    def unfit(*devices):
        new = SimpleNamespace(spare=False, host="host2", devices=None)
        new.devices = terms.Devices(*devices) if devices else None
        return crew._unfit(new)

    assert unfit(7, True) == ""  # the processes of the first start know it better
    took(crew, 1, 2)
    crew._members.pop()
    assert unfit(7, True).startswith("each process on host2 has 7 devices, those of other hosts 1")
    assert unfit(1, True) == unfit() == "" and not said
    assert unfit(7, False) == ""  # devices in /dev may be others'
    assert said[0].startswith("as far as /dev shows, each process on host2 has 7 devices")


def test_programs_are_compiled_ahead_for_one_host_fewer(leader, tmp_path, monkeypatch):
    """By a process on each host that such a start has, once; again if it could not finish."""
    begun, sent = [], []
    monkeypatch.setattr(hosts.Rehearsals, "start", lambda *given: begun.append(given[2:]))
    crew, said, _ = leader(shrink_after=0.0, rehearses=True)
    took(crew, 1, 2)
    for member in crew._members:
        member.line.send = lambda **message: sent.append(message)
    assert crew.rehearses()
    crew.rehearse()
    ((number, flags, variables, finished),) = begun
    (message,) = sent
    assert (number, message["rehearse"]) == (0, 1)
    assert flags[1:2] + flags[3:] == [
        "--num_processes=2",
        "--mesh_shape=data:4",
        "--microbatches=2",
    ]
    assert message["flags"][1:] == flags[1:] and message["variables"] == variables
    assert said == [
        "compiling ahead for 2 processes, on the mesh data:4, at the lowest priority; "
        "--nocompile_ahead leaves that out"
    ]
    finished()
    assert not (tmp_path / NAME).exists()  # the other one still compiles
    crew.assemble(SimpleNamespace(ending=False))
    crew.rehearse()
    assert len(begun) == 2
    begun[1][-1]()
    crew._rehearsed(1, 2)
    (event,) = events_of(tmp_path / NAME)
    assert (event["event"], event["start"], event["processes"]) == ("compiled_ahead", 2, 2)
    crew.assemble(SimpleNamespace(ending=False))
    crew.rehearse()
    assert len(begun) == 2


def test_nothing_is_compiled_ahead_unless_all_hosts_do(leader):
    crew, _, _ = leader(shrink_after=0.0, rehearses=True)
    took(crew, 1, 2)
    crew._members[1].rehearses = False
    assert not crew.rehearses()


def test_a_first_supervisor_leaves_if_the_others_can_go_on(leader):
    crew, _, now = leader(shrink_after=10.0)
    now[0] += 11  # fewer may begin
    assert "it has not begun" in crew.leave()
    assert len(took(crew, 1, 2)) == 3
    assert crew.leave() is None
    one, other = crew._members
    assert not crew._needed(one)
    one.leaving = 15
    assert crew._needed(other)  # who would be left?
    assert not crew._needed(one)  # it leaves already


def test_a_first_supervisor_that_the_job_needs_is_told_why(leader):
    crew, _, now = leader(shrink_after=10.0)
    crew._counts = [3, 2]
    now[0] += 11
    took(crew, 1)
    assert crew.leave().startswith(
        "the other hosts have places for 1 of its 3 processes, and it ne"
    )
    assert len(crew._places()) == 2  # this one stays


def signalled(crew, at):
    """Sends SIGTERM to another host; returns which signals then end the job."""
    ends = []
    crew._job = SimpleNamespace(ending=crew._leaves, pass_on=ends.append, renew=lambda: None)
    crew._signalled(crew._members[at], 15)
    return ends


def test_the_host_whose_signal_ends_the_job_is_named_with_the_reason(leader):
    crew, said, _ = leader(shrink_after=10.0)
    crew._counts = [3]
    came(crew, 1)  # the job has not begun
    assert signalled(crew, 0) == [15]
    assert said == [
        "SIGTERM to host1 ends the job: the other hosts have places for 1 of its 3 processes, and "
        "it needs 3. A host with --spare would take the place of host1"
    ]


def test_a_signal_that_ends_a_job_whose_first_host_leaves_is_told_once(leader):
    crew, said, _ = leader(shrink_after=10.0)
    crew._counts = [3, 2]
    took(crew, 1, 2)
    assert crew.leave() is None
    assert [signalled(crew, at) for at in (1, 0)] == [[15], [15]]
    (told,) = said
    assert told.startswith("SIGTERM to host2 ends the job: the other hosts have places for 1 of")


def test_places_of_a_host_that_leaves_are_taken_off_once(leader):
    crew, said, _ = leader(shrink_after=10.0)
    crew._counts = [3, 2]
    took(crew, 1, 2)
    assert signalled(crew, 0) == []
    crew._members.pop()  # is lost
    assert signalled(crew, 0) == [15]  # a second signal to the one that leaves
    assert "have places for 1 of its 3 processes" in said[0]


def test_hosts_that_have_not_come_back_count_where_another_one_is_taken_away(leader):
    crew, said, _ = leader(starts=1, shrink_after=10.0, awaited=awaited(1, 2))
    crew._counts = [3, 2]
    assert crew.leave() is None

    crew, said, _ = leader(starts=1, shrink_after=10.0, awaited=awaited(1, 2))
    crew._counts = [3, 2]
    came(crew, 2)
    assert (signalled(crew, 0), said) == ([], [])

    crew, said, _ = leader(starts=1, shrink_after=10.0, awaited=awaited(1))
    crew._counts = [3, 2]
    assert "have places for 1 of its 3 processes" in crew.leave()


def test_all_places_are_asked_at_the_same_time(monkeypatch):
    """The hosts of a rack that is lost do not answer, each for two seconds."""
    together = threading.Barrier(20)

    def asked(address):
        together.wait(30)
        raise OSError("no route")

    monkeypatch.setattr(leading, "asked", asked)
    found = leading.Responses.of([f"host{n}:1" for n in range(20)])
    assert (found.connection, found.standing_by, found.reason) == (None, [], "no route")


@pytest.mark.parametrize(
    ("answers", "found"), [("slowly", "standing_by"), ("never", "silent"), ("closes", "reason")]
)
def test_a_host_that_answers_slowly_stands_by(answers, found, monkeypatch):
    """On a busy machine. One that stands still, or is no supervisor, does not."""
    monkeypatch.setattr(leading, "_FIRST_MESSAGE", 60.0 if answers == "slowly" else 0.2)
    with socket.create_server(("localhost", 0)) as listener:

        def answer():
            connection = listener.accept()[0]
            with suppress(OSError), connection:
                if answers == "slowly":
                    time.sleep(1)
                    connection.sendall(leading._STANDS_BY)
                if answers != "closes":
                    connection.recv(1)

        threading.Thread(target=answer, daemon=True).start()
        place = f"localhost:{listener.getsockname()[1]}"
        responses = leading.Responses.of([place])
    closes = "it takes connections and closes them"
    assert responses.connection is None
    assert getattr(responses, found) == (closes if answers == "closes" else [place])


def hosts_of(processes):
    """Returns the hosts of the processes of a start; "": the first one."""
    return ["" if isinstance(one, Child) else one.member.host for one in processes]


def again(crew):
    return crew.assemble(SimpleNamespace(ending=False))


@pytest.mark.parametrize("alone", [False, True])
def test_a_host_that_fails_again_and_again_gives_its_place_to_a_spare_one(alone, leader):
    """As where a device is broken: another start on it costs minutes, and fails like the last.

    Where it alone has copies of its part, the steps since a checkpoint would be lost: later.
    """
    crew, said, _ = leader(shrink_after=10.0)
    needs = ((0, 1), (2,) if alone else (1, 2))
    copied = [[copies_of(step, number, needs) for step in (7, 8)] for number in (1, 2)]
    came(crew, 1, copied[0]), came(crew, 2, copied[1])
    used = again(crew)
    came(crew, 3, spare=True)
    for number, progress in ((2, False), (2, True), (1, False), (2, True)):
        crew.note_failure(used[number], progress)
        used = again(crew)
    for _ in range(3 if alone else 1):
        assert hosts_of(used) == ["", "host1", "host2"] and not said
        crew.note_failure(used[2], progress=False)
        used = again(crew)
    assert said[0].startswith("2 starts in a row failed on host2 first, without a step between")
    assert said[1] == "host3 takes part in the place of host2, with process 2"
    assert hosts_of(used) == ["", "host1", "host3"]


def test_the_host_that_leads_has_process_0_however_often_it_fails(leader):
    """The others meet at its address."""
    crew, said, _ = leader(shrink_after=10.0)
    processes = took(crew, 1, 2)
    came(crew, 3, spare=True)
    for _ in range(5):
        crew.note_failure(processes[0], progress=False)
        processes = again(crew)
        assert hosts_of(processes) == ["", "host1", "host2"] and not said


def gone(crew, member):
    """Does what the end of a connection does."""
    crew._members.remove(member)
    crew._lost(member)


def copies_of(step, has, needs=((0,), (1,), (2,))):
    start = [1, "a"]
    return {"step": step, "start": start, "has": [has], "needs": needs, "time": step + has / 1000}


@pytest.mark.parametrize("held_twice", [False, True])
def test_a_host_with_copies_that_no_other_has_is_waited_for_beside_spare_ones(held_twice, leader):
    """Its connection may have been broken for a moment; else the steps since a checkpoint go."""
    needs = ((0,), (1, 2)) if held_twice else ((0,), (1,), (2,))
    crew, _, now = leader(shrink_after=10.0)
    (crew._workdir / "process.0").mkdir()
    crew._host = replace(crew._host, copies=crew._workdir)
    for step in (7, 8):
        folder = crew._workdir / "process.0" / str(step)
        folder.mkdir()
        (folder / "about.json").write_text(json.dumps({"start": [1, "a"], "needs": needs}))
    copied = [[copies_of(step, number, needs) for step in (7, 8)] for number in range(3)]
    came(crew, 1, copied[1])
    lost = came(crew, 2, copied[2])
    again(crew)
    came(crew, 3, spare=True)
    gone(crew, lost)
    crew._starts = 2
    assert crew._count() == (3 if held_twice else 0)
    now[0] += 11
    assert crew._count() == 3


def test_a_spare_host_that_goes_is_no_loss(leader):
    """Fewer go on at a time that the loss of the others decides."""
    crew, _, now = leader(shrink_after=10.0)
    took(crew, 1, 2)
    spare = came(crew, 3, spare=True)
    gone(crew, next(one for one in crew._members if one.host == "host2"))
    now[0] += 9
    gone(crew, spare)
    now[0] += 2
    assert crew._count() == 2


def test_the_list_of_hosts_is_sent_once_where_many_have_come(leader):
    crew, _, _ = leader(shrink_after=10.0)
    lists = []
    for number in range(1, 5):
        came(crew, number, spare=number > 2).line.send = lambda **said: lists.append(said)
        crew._tell_change()
    assert [len(said["hosts"]) for said in lists] == [1]  # the first one, at once
    end = time.monotonic() + 60
    while len(lists) < 5:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert [len(said["hosts"]) for said in lists] == [1, 4, 4, 4, 4]


def test_a_host_that_is_lost_late_counts_as_lost_when_it_was_heard_last(monkeypatch):
    """But not before its process began: it may be silent since an earlier start."""
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    for heard, ended_at in ((990.0, 990.0), (900.0, 960.0)):
        member = SimpleNamespace(line=SimpleNamespace(heard=heard), host="host1")
        one = remote.RemoteProcess(1, 1, member, True, began=960.0)
        one.note_end(1, [], lost=True)
        assert one.ended_at == ended_at


def test_a_new_leader_waits_for_copies_that_only_the_one_before_has(leader):
    """It led after two seconds, as spare hosts suffice; that one may come back a moment later."""
    crew, _, now = leader(starts=1, shrink_after=10.0, away=2.0)
    crew._starts, needs = 2, ((0,), (1, 2))
    for number in (1, 2):
        came(crew, number, [copies_of(step, number, needs) for step in (7, 8)])
    assert crew._count() == 0
    now[0] += 8
    assert crew._count() == 3


def test_of_several_that_lead_the_first_place_counts(monkeypatch):
    """The others are those of files of before, where another job may lead now."""
    made, later = {}, threading.Event()

    def asked(address):
        if address[0] == "gone":
            raise OSError("no route")
        if address[0] == "first":
            later.wait(0.2)
        made[address[0]] = socket.socket()
        return made[address[0]]

    monkeypatch.setattr(leading, "asked", asked)
    found = leading.Responses.of(["gone:1", "first:1", "other:1"])
    assert found.leader == "first:1" and found.connection is made["first"]
    assert made["other"].fileno() == -1  # closed
    found.connection.close()
    monkeypatch.setattr(leading, "_PREFERRED", 0.0)
    found = leading.Responses.of(["first:1", "other:1"])
    assert found.leader == "other:1"
    found.connection.close()
