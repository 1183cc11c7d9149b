"""Supervisors of several hosts start together, stop together, and refuse what does not fit.

Each is a process of its own here, and what they start are short programs;
`tests/cli/test_launch.py` trains with them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from meshdsl.training.launching import leading, terms
from meshdsl.training.launching.events import NAME
from meshdsl.training.launching.lines import Line

pytestmark = pytest.mark.long
SUPERVISOR = """
import json, os, sys, time
from pathlib import Path
from meshdsl.layouts.mesh import Mesh
from meshdsl.training.launching.elastic import Elastic
from meshdsl.training.launching.succession import HostSupervisor
from meshdsl.training.launching.terms import Devices, Host, Terms

given = json.loads(sys.argv[1])
folder = Path(given["folder"])
(folder / f"here.{os.getpid()}").touch()
while len([*folder.glob("here.*")]) < given["beside"]:
    time.sleep(0.02)
numbers = range(given["first"], given["first"] + given["processes"])

def say(text):
    print(text, file=sys.stderr, flush=True)

def command(own):
    start = "import os, signal, sys, time; number = int(sys.argv[2]); folder = sys.argv[1]\\n"
    start += "start = int(os.environ['MESHDSL_LAUNCH_START'])\\n"
    start += "file = f'{folder}/{start}.{number}'\\n"
    start += "open(file + '.flags', 'w').write(' '.join(sys.argv[3:]))\\n"
    start += "open(file, 'w').write(str(os.getpid()))\\n"
    number = own[0].removeprefix("--process_id=")
    return [sys.executable, "-c", start + given["program"], str(folder), number, *own]

class Template:
    # It imports until a file is there, and cannot be forked.

    def keeps_waiting(self):
        return not (folder / "imported").exists()

    def started(self, *_):
        return None

warm = Template() if given["imports"] else None
elastic = Elastic(Mesh.parse("data:6"), "data", 3, 12) if given["elastic"] else None
where = f"localhost:{given['port']}"
terms = Terms(where, given["total"], given["code"], given["silence"], elastic)
copies = folder / f"copies.{given['first']}"
rest = command, os.environ, Path(given["workdir"]), (given["patience"], 60.0), say
try:
    devices = Devices(given["devices"], True)
    last = given["shrink_after"], copies, given["spare"], warm, devices
    code = HostSupervisor(Host(terms, numbers, *rest, *last), (5, 60.0)).run()
except ValueError as error:
    say(error)
    code = 2
sys.exit(code)
"""


def free_port():
    """Returns a port that is free, as is the one after it."""
    while True:
        with socket.create_server(("localhost", 0)) as listener:
            port = listener.getsockname()[1]
            with suppress(OSError), socket.create_server(("localhost", port + 1)):
                return port


@pytest.fixture
def job(tmp_path):
    """Returns what starts the supervisor of one host of a job."""
    usual = {
        "folder": str(tmp_path),
        "workdir": str(tmp_path),
        "port": free_port(),
        "total": 3,
        "code": "one",
        "silence": 30.0,
        "patience": 60.0,
        "processes": 1,
        "program": "",
        "elastic": False,
        "shrink_after": 1.0,
        "spare": False,
        "devices": 1,
        "imports": False,  # whether it still imports what its processes need
        "beside": 0,  # how many begin together, however long each takes to import what it needs
    }
    started = []

    def start(first, **given):
        line = [sys.executable, "-c", SUPERVISOR, json.dumps({**usual, "first": first, **given})]
        started.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True))
        return started[-1]

    start.port = usual["port"]
    yield start
    for one in started:
        one.kill()
        one.communicate()


def wait_for(condition, seconds=90):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def have_come(port, count):
    """Waits until the supervisors of so many other hosts have come to the first one."""
    files = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]

    def connections():
        rows = [row.split() for file in files for row in file.read_text().splitlines()]
        there = [row[1].partition(":")[2] == f"{port:04X}" for row in rows if row[3] == "01"]
        return sum(there) == count

    wait_for(connections)
    time.sleep(1)  # in which it says who it is


def process(folder, start, number):
    """Returns a process of a start, when it has begun."""
    file = folder / f"{start}.{number}"
    return int(wait_for(lambda: file.exists() and file.read_text()))


def is_there(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


WAITS = "time.sleep(600 if start == 1 else 0)"


def test_all_hosts_start_again_when_a_process_of_one_is_killed(job, tmp_path):
    """At once: nobody waits until collectives give up."""
    first, second = job(0, program=WAITS), job(1, processes=2, program=WAITS)
    numbers = [process(tmp_path, 1, n) for n in range(3)]
    os.kill(numbers[2], signal.SIGKILL)
    began = time.monotonic()
    wait_for(lambda: not any(map(is_there, numbers)))
    assert time.monotonic() - began < 10
    assert (first.wait(90), second.wait(90)) == (0, 0)
    host = socket.gethostname()
    assert f"process 2 was killed by signal 9 (SIGKILL) on {host} after" in first.stderr.read()
    kinds = [json.loads(line)["event"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert kinds == ["started", "failed", "started", "ended"]


def test_a_host_that_is_gone_is_waited_for(job, tmp_path):
    first, second = job(0, processes=2, program=WAITS), job(2, program=WAITS)
    numbers = [process(tmp_path, 1, n) for n in range(3)]
    second.kill()
    os.kill(numbers[2], signal.SIGKILL)  # what the kernel does where `end_with` asks for it
    wait_for(lambda: not any(map(is_there, numbers)))
    assert not (tmp_path / "2.0").exists()
    again = job(2, program=WAITS)
    assert (first.wait(90), again.wait(90)) == (0, 0)
    assert "process 2 is lost: nothing is heard of its supervisor on" in first.stderr.read()


def test_a_first_supervisor_that_is_gone_is_waited_for(job, tmp_path):
    first, second = job(0, processes=2, program=WAITS), job(2, program=WAITS)
    number = process(tmp_path, 1, 2)
    first.kill()
    wait_for(lambda: not is_there(number))
    assert second.poll() is None
    for file in tmp_path.glob("1.*"):
        file.unlink()
    program = "time.sleep(0)"
    again = job(0, processes=2, program=program)
    number = process(tmp_path, 1, 2)  # of the second host, which has the program of before
    os.kill(number, signal.SIGKILL)
    assert (again.wait(90), second.wait(90)) == (0, 0)
    assert "is broken: the processes of this host are stopped" in second.stderr.read()


def test_a_host_that_stands_still_for_too_long_is_lost(job, tmp_path):
    first = job(0, processes=2, program=WAITS, silence=3.0)
    second = job(2, program=WAITS, silence=3.0)
    numbers = [process(tmp_path, 1, n) for n in range(3)]
    os.kill(second.pid, signal.SIGSTOP)
    wait_for(lambda: not any(map(is_there, numbers[:2])))
    assert is_there(numbers[2])
    os.kill(second.pid, signal.SIGCONT)  # it finds that the connection is broken, and comes again
    assert (first.wait(90), second.wait(90)) == (0, 0)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_signal_to_any_host_reaches_all_processes_once(signalled, job, tmp_path):
    program = (
        "def stop(got, frame):\n"
        "    open(f'{folder}/got.{number}', 'a').write('x')\n"
        "    time.sleep(0.5); os._exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(f'{folder}/ready.{number}', 'w')\n"
        "while True: time.sleep(0.02)\n"
    )
    both = job(0, program=program), job(1, processes=2, program=program)
    wait_for(lambda: all((tmp_path / f"ready.{n}").exists() for n in range(3)))
    both[signalled].terminate()
    time.sleep(0.1)
    both[1 - signalled].terminate()  # schedulers send it to every host
    assert [one.wait(90) for one in both] == [143, 143]
    assert [(tmp_path / f"got.{n}").read_text() for n in range(3)] == ["x"] * 3
    assert "its 3 processes, and it has no --elastic_axis" in both[0].stderr.read()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"code": "two"}, "is two, and one on the first host: install the same version on both"),
        ({"total": 4}, "--num_processes is 4 on"),
        ({"first": 2, "processes": 2}, "process 3 goes beyond the 3 of --num_processes"),
        ({"workdir": "elsewhere", "patience": 6.0}, "/elsewhere, is not the one of the first h"),
        ({"spare": True, "devices": 2}, "has 2 devices, those of other hosts 1, and all need the"),
    ],
)
def test_hosts_that_do_not_fit_are_told_why_on_both(given, said, job, tmp_path):
    given = {**given, "workdir": str(tmp_path / given["workdir"])} if "workdir" in given else given
    first = job(0)
    other = job(**{"first": 1, **given})
    assert other.wait(90) == 2
    text = other.stderr.read()
    assert "the first supervisor refuses this one: " in text and said in text
    first.kill()
    assert "is refused: " in (text := first.stderr.read()) and said in text


def test_two_hosts_with_the_same_numbers_are_told(job):
    first, second = job(0), job(1)
    wait_for(lambda: "waiting for the hosts of process 2" in first.stderr.readline())
    third = job(1, patience=6.0)
    assert third.wait(90) == 2
    assert "process 1: " in (text := third.stderr.read()) and "another --first_process" in text
    assert second.poll() is None


def test_hosts_that_do_not_come_are_named(job):
    first, second = job(0, patience=6.0), job(1)
    assert (first.wait(90), second.wait(90)) == (2, 1)
    text = first.stderr.read()
    assert "process 2: no supervisor came for them within 6 s" in text
    alone = job(1, patience=2.0)
    assert alone.wait(90) == 2 and "was not there for 2 s" in alone.stderr.read()


def test_what_is_no_supervisor_does_no_harm(job):
    port = free_port()
    first = job(0, port=port, processes=2)
    for text in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"first": "x"}\n',
        b"\xff\n",
        b'{"started": 1}\n',
        b"x" * 2**21,
    ):
        with wait_for(lambda: reached(port)) as other:
            try:
                other.sendall(text)
                while other.recv(1000):
                    pass
            except OSError:  # it was closed before it had read everything
                pass
    second = job(2, port=port)
    assert (first.wait(90), second.wait(90)) == (0, 0)


ELASTIC = """
def stop(got, frame): os._exit(75)
signal.signal(signal.SIGUSR1, stop)
end = f"{folder}/end"
if number == 0:
    line = {"time": 0, "event": "stepped", "start": start}
    open(f"{folder}/launch.jsonl", "a").write(json.dumps(line) + "\\n")
open(f"{folder}/ready.{start}.{number}", "w")
while not os.path.exists(end): time.sleep(0.02)
"""


def flags(folder, start, number):
    process(folder, start, number)
    return (folder / f"{start}.{number}.flags").read_text().split()


def test_fewer_hosts_go_on_and_more_when_one_comes_back(job, tmp_path):
    given = {"program": "import json\n" + ELASTIC, "elastic": True, "beside": 3}
    given["shrink_after"] = 10.0  # on a busy machine the last one may connect seconds after others
    for name in (0, 1):
        (tmp_path / f"copies.{name}").mkdir()
    first, second, third = (job(n, **given) for n in range(3))
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    assert not any("mesh_shape" in flag for flag in flags(tmp_path, 1, 2))
    third.kill()
    os.kill(process(tmp_path, 1, 2), signal.SIGKILL)
    assert flags(tmp_path, 2, 1)[1:2] == ["--num_processes=2"]
    assert flags(tmp_path, 2, 1)[3:] == ["--mesh_shape=data:4", "--microbatches=2"]
    assert not (tmp_path / "2.2").exists()
    assert all((tmp_path / f"copies.{n}").exists() for n in (0, 1))  # others read them
    third = job(2, imports=True, **given)
    have_come(job.port, 2)
    assert not (tmp_path / "3.0").exists()  # nobody stands still while it imports
    (tmp_path / "imported").touch()
    assert flags(tmp_path, 3, 2)[1:2] == ["--num_processes=3"]
    wait_for(lambda: all((tmp_path / f"ready.3.{n}").exists() for n in range(3)))
    (tmp_path / "end").touch()
    assert [one.wait(90) for one in (first, second, third)] == [0, 0, 0]
    text = first.stderr.read()
    assert "going on with 2 of 3 processes, on the mesh data:4, until others are there" in text
    assert "more processes have come: all save their state and start again, with them" in text
    kinds = [json.loads(line)["event"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert [kind for kind in kinds if kind != "stepped"] == (
        ["started", "failed", "started", "renewed", "started", "ended"]
    )


def test_a_spare_host_takes_the_place_of_a_lost_one_at_once(job, tmp_path):
    given = {"program": "import json\n" + ELASTIC, "shrink_after": 30.0}
    first, second, spare = job(0, **given), job(1, processes=2, **given), None
    wait_for(lambda: (tmp_path / "ready.1.2").exists())
    spare = job(3, processes=2, spare=True, **given)
    have_come(job.port, 2)
    second.kill()
    began = time.monotonic()
    for number in (1, 2):
        os.kill(process(tmp_path, 1, number), signal.SIGKILL)
    assert flags(tmp_path, 2, 2)[:2] == ["--process_id=2", "--num_processes=3"]
    assert time.monotonic() - began < 20
    (tmp_path / "end").touch()
    assert (first.wait(90), spare.wait(90)) == (0, 0)


def test_a_new_spare_host_drops_no_other_that_stands_still(job, tmp_path):
    given = {"program": "import json\n" + ELASTIC, "total": 2}
    first, spare = job(0, **given), job(1, spare=True, **given)
    process(tmp_path, 1, 1)
    os.kill(spare.pid, signal.SIGSTOP)
    time.sleep(6)  # longer than a host that comes again is silent
    job(1, spare=True, **given)
    have_come(job.port, 2)
    os.kill(spare.pid, signal.SIGCONT)
    (tmp_path / "end").touch()
    assert (first.wait(90), spare.wait(90)) == (0, 0) and not (tmp_path / "2.0").exists()


def test_a_host_that_stays_keeps_its_number_where_a_spare_one_takes_another_place(job, tmp_path):
    """Its copies in memory are then those that its processes need."""
    program = "open(f'{folder}/by.{start}.{number}', 'w').write(str(os.getppid()))\n" + WAITS
    first, second, third = (job(n, program=program) for n in range(3))
    wait_for(lambda: all((tmp_path / f"1.{n}").exists() for n in range(3)))
    spare = job(3, program=program, spare=True)
    have_come(job.port, 3)
    second.kill()
    os.kill(process(tmp_path, 1, 1), signal.SIGKILL)
    assert [one.wait(90) for one in (first, spare, third)] == [0, 0, 0]
    by = [int((tmp_path / f"by.2.{number}").read_text()) for number in range(3)]
    assert by == [first.pid, spare.pid, third.pid]


def test_a_host_that_is_taken_away_leaves_the_others_a_saved_state(job, tmp_path):
    given = {"program": "import json\n" + ELASTIC, "elastic": True, "beside": 3}
    first, second, third = (job(n, **given) for n in range(3))
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    third.terminate()
    assert third.wait(90) == 143 and "away: the others go on\n" in third.stderr.read()
    assert flags(tmp_path, 2, 1)[1:2] == ["--num_processes=2"]
    (tmp_path / "end").touch()
    assert (first.wait(90), second.wait(90)) == (0, 0)
    assert "failure" not in first.stderr.read()


def test_the_host_that_leads_leaves_as_any_other_when_it_is_taken_away(job, tmp_path):
    """Its state is saved, and another one leads at once: nothing has failed."""
    given = {
        "program": "import json\n" + BY + ELASTIC,
        "elastic": True,
        "beside": 3,
        "shrink_after": 300.0,
    }
    first, second, third = (job(n, **given) for n in range(3))
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    first.terminate()
    assert first.wait(90) == 143
    assert "SIGTERM takes this host away: the others go on, and one of" in first.stderr.read()
    assert ppids(tmp_path, 2, 2) == [second.pid, third.pid]
    assert flags(tmp_path, 2, 0)[3] == "--mesh_shape=data:4"
    (tmp_path / "end").touch()
    assert [one.wait(90) for one in (second, third)] == [0, 0]
    events = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    kinds = [one["event"] for one in events if one["event"] != "stepped"]
    assert kinds == ["started", "renewed", "started", "ended"]
    assert f", on {socket.gethostname()}, has left the job: the one" in second.stderr.read()


def test_a_signal_to_all_hosts_ends_a_job_that_could_lose_any_of_them(job, tmp_path):
    given = {"program": "import json\n" + BY + ELASTIC, "elastic": True, "beside": 3}
    three = [job(n, **given, shrink_after=20.0) for n in range(3)]
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    for one in three:
        one.terminate()
    assert [one.wait(90) for one in three] == [143] * 3
    kinds = [json.loads(line)["event"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert "failed" not in kinds


def ppids(folder, start, count):
    """Returns which supervisors have started the processes of a start."""
    process(folder, start, count - 1)
    files = [folder / f"by.{start}.{number}" for number in range(count)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text()) for file in files]


BY = "open(f'{folder}/by.{start}.{number}', 'w').write(str(os.getppid()))\n"


def kill_host(folder, supervisor, *processes):
    """Kills a supervisor and its processes, as the end of their host does."""
    supervisor.kill()
    for number in processes:
        os.kill(number, signal.SIGKILL)


def test_the_job_goes_on_without_the_first_host_and_grows_again_with_it(job, tmp_path):
    given = {"program": "import json\n" + BY + ELASTIC, "elastic": True, "beside": 3}
    first, second, third = (job(n, **given) for n in range(3))
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    kill_host(tmp_path, first, process(tmp_path, 1, 0))
    assert ppids(tmp_path, 2, 2) == [second.pid, third.pid]
    meets = flags(tmp_path, 2, 0)[2]
    assert meets != flags(tmp_path, 1, 0)[2] and meets == flags(tmp_path, 2, 1)[2]
    first = job(0, **given)
    assert sorted(ppids(tmp_path, 3, 3)) == sorted([first.pid, second.pid, third.pid])
    wait_for(lambda: all((tmp_path / f"ready.3.{n}").exists() for n in range(3)))
    kill_host(tmp_path, second, process(tmp_path, 3, ppids(tmp_path, 3, 3).index(second.pid)))
    assert sorted(ppids(tmp_path, 4, 2)) == sorted([first.pid, third.pid])  # a second time
    (tmp_path / "end").touch()
    assert [one.wait(90) for one in (first, third)] == [0, 0]
    events = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    kinds = [one["event"] for one in events if one["event"] != "stepped"]
    again = ["failed", "started"]
    assert kinds == ["started", *again, "renewed", "started", *again, "ended"]
    assert [one["start"] for one in events if one["event"] == "started"] == [1, 2, 3, 4]
    assert {one["host"] for one in events if one["event"] == "failed"} == {socket.gethostname()}


def test_a_spare_host_lets_the_job_go_on_without_the_first_one(job, tmp_path):
    program = BY + "time.sleep(600 if start == 1 else 0)"
    first, second = job(0, program=program), job(1, processes=2, program=program)
    wait_for(lambda: all((tmp_path / f"1.{n}").exists() for n in range(3)))
    spare = job(3, program=program, spare=True, shrink_after=300.0)
    have_come(job.port, 2)
    kill_host(tmp_path, first, process(tmp_path, 1, 0))
    assert (second.wait(90), spare.wait(90)) == (0, 0)
    assert ppids(tmp_path, 2, 3) == [second.pid, second.pid, spare.pid]


class Cable:
    """Carries connections to a port of this host, until it is cut."""

    def __init__(self, port):
        self._to, self._ends = port, []
        self._listener = socket.create_server(("localhost", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._carry, daemon=True).start()

    def cut(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _carry(self):
        with suppress(OSError):
            while True:
                near, far = self._listener.accept()[0], socket.socket()
                self._ends += [near, far]
                try:
                    far.connect(("localhost", self._to))
                except OSError:  # nobody listens yet
                    near.close()
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_first_supervisor_that_was_cut_off_gives_way(job, tmp_path):
    """The others see that their connections are broken, however long it takes."""
    given = {"program": "import json\n" + BY + ELASTIC, "elastic": True, "beside": 3}
    cable = Cable(job.port)
    first, second, third = (
        job(n, port=cable.port if n else job.port, silence=300.0, **given) for n in range(3)
    )
    wait_for(lambda: all((tmp_path / f"ready.1.{n}").exists() for n in range(3)))
    os.kill(first.pid, signal.SIGSTOP)
    cable.cut()
    old = process(tmp_path, 1, 0)
    assert ppids(tmp_path, 2, 2) == [second.pid, third.pid]
    os.kill(first.pid, signal.SIGCONT)
    wait_for(lambda: not is_there(old))
    assert sorted(ppids(tmp_path, 3, 3)) == sorted([first.pid, second.pid, third.pid])
    (tmp_path / "end").touch()
    assert [one.wait(300) for one in (first, second, third)] == [0, 0, 0]
    assert "another supervisor leads the job now" in first.stderr.read()


def test_a_start_does_not_take_the_end_of_an_earlier_one_for_its_own(job, tmp_path):
    """A host stands still while another process fails, and hears of two starts when it goes on."""
    first, second = job(0, processes=2, program=WAITS), job(2, program=WAITS)
    numbers = [process(tmp_path, 1, n) for n in range(3)]
    os.kill(second.pid, signal.SIGSTOP)
    os.kill(numbers[0], signal.SIGKILL)
    process(tmp_path, 2, 0)  # 15 s later
    os.kill(second.pid, signal.SIGCONT)
    assert (first.wait(90), second.wait(90)) == (0, 0)
    assert process(tmp_path, 2, 2) and not is_there(numbers[2])
    kinds = [json.loads(line)["event"] for line in (tmp_path / NAME).read_text().splitlines()]
    assert kinds == ["started", "failed", "started", "ended"]


def test_what_takes_connections_and_closes_them_is_given_up(job):
    with socket.create_server(("localhost", 0)) as listener:
        listener.settimeout(0.5)
        member = job(1, port=listener.getsockname()[1], patience=4.0)
        while member.poll() is None:
            try:
                listener.accept()[0].close()
            except TimeoutError:
                continue
    assert member.returncode == 2
    assert "was not there for 4 s" in (text := member.stderr.read()) and "broken" not in text


def test_a_signal_while_hosts_are_waited_for_leaves_copies_where_they_are(job, tmp_path):
    first, second = job(0, processes=2, program=WAITS), job(2, program=WAITS)
    numbers = [process(tmp_path, 1, n) for n in range(3)]
    (tmp_path / "copies.0").mkdir()
    second.kill()
    os.kill(numbers[2], signal.SIGKILL)
    wait_for(lambda: not any(map(is_there, numbers)))
    wait_for(lambda: "restart 1" in first.stderr.readline())
    time.sleep(1.5)
    first.terminate()
    assert first.wait(90) == 143
    assert (tmp_path / "copies.0").exists()


def reached(port):
    try:
        return socket.create_connection(("localhost", port), 10)
    except OSError:
        return None


def test_a_line_ends_when_nothing_is_heard_for_too_long():
    ours, theirs = socket.socketpair()
    with theirs:
        line = Line(ours, 0.5)
        theirs.sendall(b'{}\n{"one": 1}\n')
        assert [*line.messages()] == [{"one": 1}]
    assert terms.Terms("host0:7", 2, "", 1.0).meeting == "host0:8"


def test_a_job_that_ends_says_so_in_the_workdir(job, tmp_path):
    first, other = job(0, total=2), job(1, total=2)
    assert first.wait(90) == other.wait(90) == 0
    assert leading.ended(tmp_path) == 0
