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
import time

import pytest

from meshdsl.training.launching import hosts
from meshdsl.training.launching.events import NAME
from meshdsl.training.launching.lines import Line

SUPERVISOR = """
import json, os, sys
from pathlib import Path
from meshdsl.training.launching.crew import OneHost
from meshdsl.training.launching.hosts import Hosts, Terms
from meshdsl.training.launching.member import Member
from meshdsl.training.launching.supervisor import Launch, Supervisor

given = json.loads(sys.argv[1])
folder = Path(given["folder"])
numbers = range(given["first"], given["first"] + given["processes"])

def say(text):
    print(text, file=sys.stderr, flush=True)

def command(own):
    start = "import os, signal, sys, time; number = int(sys.argv[2]); folder = sys.argv[1]\\n"
    start += "start = int(os.environ['MESHDSL_LAUNCH_START'])\\n"
    start += "open(f'{folder}/{start}.{number}', 'w').write(str(os.getpid()))\\n"
    number = own[0].removeprefix("--process_id=")
    return [sys.executable, "-c", start + given["program"], str(folder), number]

terms = Terms(f"localhost:{given['port']}", given["total"], given["code"], given["silence"])
rest = command, os.environ, Path(given["workdir"]), (given["patience"], 60.0), say
try:
    if given["first"]:
        code = Member(terms, numbers, *rest).run()
    else:
        code = Supervisor(Launch(Hosts(terms, numbers, *rest), folder, 5, 60.0, say)).run()
except ValueError as error:
    say(error)
    code = 2
sys.exit(code)
"""


def free_port():
    with socket.create_server(("localhost", 0)) as listener:
        return listener.getsockname()[1]


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
    }
    started = []

    def start(first, **given):
        line = [sys.executable, "-c", SUPERVISOR, json.dumps({**usual, "first": first, **given})]
        started.append(subprocess.Popen(line, stderr=subprocess.PIPE, text=True))
        return started[-1]

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


@pytest.mark.parametrize("told", [0, 1])
def test_a_signal_to_any_host_reaches_all_processes_once(told, job, tmp_path):
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
    both[told].terminate()
    time.sleep(0.1)
    both[1 - told].terminate()  # schedulers send it to every host
    assert [one.wait(90) for one in both] == [143, 143]
    assert [(tmp_path / f"got.{n}").read_text() for n in range(3)] == ["x"] * 3


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"code": "two"}, "is two, and one on the first host: install the same version on both"),
        ({"total": 4}, "--num_processes is 4 on"),
        ({"first": 2, "processes": 2}, "process 3 goes beyond the 3 of --num_processes"),
        ({"workdir": "elsewhere"}, "is not the one of the first host: it has to be on a disk"),
    ],
)
def test_hosts_that_do_not_fit_are_told_why(given, said, job, tmp_path):
    given = {**given, "workdir": str(tmp_path / given["workdir"])} if "workdir" in given else given
    job(0)
    other = job(**{"first": 1, **given})
    assert other.wait(90) == 2
    text = other.stderr.read()
    assert "the first supervisor refuses this one: " in text and said in text


def test_two_hosts_with_the_same_numbers_are_told(job):
    first, second = job(0), job(1)
    wait_for(lambda: "waiting for the hosts of process 2" in first.stderr.readline())
    third = job(1)
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
    assert hosts.Terms("host0:7", 2, "", 1.0).meeting == "host0:8"
