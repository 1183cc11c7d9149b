"""A supervisor starts processes again where that may help, names what failed, and passes signals.

Its processes are short programs here; `test_launched_jobs.py` trains with it.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from meshdsl.training.exit_codes import FAILED, FINAL
from meshdsl.training.launching import children, supervisor
from meshdsl.training.launching.crew import OneHost
from meshdsl.training.launching.events import NAME, losses
from meshdsl.training.launching.supervisor import Launch, Supervisor

COUNTED = """
import os, signal, sys, time
folder, number = sys.argv[1], int(sys.argv[2])
with open(f"{folder}/starts.{number}", "a") as file:
    file.write(f"{os.getpid()}\\n")
start = len(open(f"{folder}/starts.{number}").read().split())
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Returns what runs a program in some processes: the exit code, and what was reported."""
    monkeypatch.setattr(supervisor, "_LONGEST_DELAY", 0.0)

    def run(program, count=2, max_restarts=5, window=3600.0):
        said = []

        def command(own):
            number = own[0].removeprefix("--process_id=")
            return [sys.executable, "-c", COUNTED + program, str(tmp_path), number]

        crew = OneHost(command, range(count))
        launch = Launch(crew, tmp_path, max_restarts, window, said.append)
        return Supervisor(launch).run(), said

    return run


def starts(folder, number=0):
    """Returns the process numbers of all starts of one of the job's processes."""
    return [*map(int, (folder / f"starts.{number}").read_text().split())]


def events(folder):
    return [json.loads(line) for line in (folder / NAME).read_text().splitlines()]


def is_there(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_all_are_started_again_when_one_is_killed(launched, tmp_path):
    """The one that is left would wait for ever."""
    code, said = launched(
        "while not os.path.exists(f'{folder}/starts.0'): time.sleep(0.02)\n"
        "if start == 1 and number == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if start == 1: time.sleep(600)\n"
    )
    assert code == 0
    assert len(starts(tmp_path, 0)) == len(starts(tmp_path, 1)) == 2
    assert not any(is_there(one) for one in starts(tmp_path, 0))
    killed = r"process 1 was killed by signal 9 \(SIGKILL\) after \d+ s; the other had"
    assert re.match(killed, said[0])
    assert said[1].startswith("restart 1 of at most 5 within 3600 s")
    assert said[1].endswith("from the beginning: there is no checkpoint yet")
    assert said[2].startswith("of ") and "1 failure cost" in said[2]
    kinds = [(one["event"], one["start"]) for one in events(tmp_path)]
    assert kinds == [("started", 1), ("failed", 1), ("started", 2), ("ended", 2)]
    failed = events(tmp_path)[1]
    assert (failed["process"], failed["code"], failed["step"]) == (1, -9, None)
    assert failed["host"] == socket.gethostname()
    assert failed["time"] >= events(tmp_path)[0]["time"] and 0 <= failed["seen_seconds"] < 60
    assert losses(tmp_path).failures == 1


def test_what_a_process_has_started_ends_with_it(launched, tmp_path):
    code, _ = launched(
        "import subprocess\n"
        "if start == 1 and number == 0:\n"
        "    worker = subprocess.Popen(['sleep', '600'])\n"
        "    open(f'{folder}/worker', 'w').write(str(worker.pid))\n"
        "    sys.exit(1)\n"
    )
    worker = int((tmp_path / "worker").read_text())
    end = time.monotonic() + 60
    while is_there(worker) and "Z" not in state(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert code == 0 and (not is_there(worker) or "Z" in state(worker))


def state(process):
    """Returns the state of a process, Z for one that has ended and that nobody has asked for."""
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("code", FINAL)
def test_what_would_end_alike_is_not_started_again(code, launched, tmp_path):
    assert launched(f"sys.exit({code})") == (code, [])
    assert len(starts(tmp_path)) == 1


def test_a_process_that_a_signal_told_to_end_before_it_listened_is_not_started_again(launched):
    assert launched("os.kill(os.getpid(), signal.SIGTERM)") == (143, [])


def test_a_command_that_has_run_is_no_mistake_when_it_is_refused_later(launched, tmp_path):
    """Processes that do not come to join are an error of the same code."""
    code, said = launched("sys.exit({1: 1, 2: 2, 3: 0}[start])", count=1)
    assert (code, len(starts(tmp_path))) == (0, 3)
    assert "process 0 ended with exit code 2" in said[2]


def test_restarts_are_limited_within_a_time(launched, tmp_path):
    code, said = launched("sys.exit(5)", count=1, max_restarts=2)
    assert (code, len(starts(tmp_path))) == (5, 3)
    assert said[-1].startswith("it is not started again: 2 restarts within 3600 s are as many")


def test_restarts_of_long_ago_do_not_count(launched, tmp_path):
    program = "sys.exit(0 if start == 4 else 5)"
    assert launched(program, count=1, max_restarts=1, window=0.0)[0] == 0


def test_failures_without_a_checkpoint_between_them_wait_longer_each_time(launched, monkeypatch):
    monkeypatch.setattr(supervisor, "_LONGEST_DELAY", 60.0)
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)
    program = (
        "if start == 3: os.makedirs(f'{folder}/checkpoints/20')\nsys.exit(0 if start == 5 else 1)\n"
    )
    code, said = launched(program, count=1)
    assert code == 0
    assert [line.partition("within 3600 s")[2] for line in said if "restart" in line] == [
        " in 0.01 s, from the beginning: there is no checkpoint yet",
        " in 0.02 s, from the beginning: there is no checkpoint yet",
        ", from step 20",
        " in 0.01 s, from step 20",
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 75)]
)
def test_a_signal_reaches_all_and_ends_the_job(number, code, launched, tmp_path):
    program = (
        "def stop(got, frame):\n"
        "    open(f'{folder}/got.{number}', 'w').write(str(got))\n"
        "    os._exit(75 if got == signal.SIGUSR1 else 128 + got)\n"
        "for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1): signal.signal(one, stop)\n"
        "open(f'{folder}/ready.{number}', 'w')\n"
        "time.sleep(600)\n"
    )

    def tell():
        while not all((tmp_path / f"ready.{n}").exists() for n in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    said = f"{number.name} came before there was a checkpoint in {tmp_path}"
    assert launched(program) == (code, [said])
    thread.join()
    assert [(tmp_path / f"got.{n}").read_text() for n in range(2)] == [str(int(number))] * 2


def test_a_signal_after_a_notice_is_the_first_one(launched, tmp_path):
    program = (
        "def stop(got, frame):\n"
        "    if got == signal.SIGTERM: os._exit(75)\n"
        "    open(f'{folder}/noticed.{number}', 'w')\n"
        "for one in (signal.SIGTERM, signal.SIGUSR1): signal.signal(one, stop)\n"
        "open(f'{folder}/ready.{number}', 'w')\n"
        "while True: time.sleep(0.02)\n"
    )

    def tell():
        for file, number in (("ready", signal.SIGUSR1), ("noticed", signal.SIGTERM)):
            while not all((tmp_path / f"{file}.{n}").exists() for n in range(2)):
                time.sleep(0.02)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    code, said = launched(program)
    assert code == 75 and said[0].startswith("SIGUSR1 came before there was a checkpoint")
    thread.join()


def test_a_second_signal_ends_processes_that_do_not_end(launched, tmp_path):
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(f'{folder}/ready.{number}', 'w')\n"
        "time.sleep(600)\n"
    )

    def tell():
        while not all((tmp_path / f"ready.{n}").exists() for n in range(2)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=tell)
    thread.start()
    assert launched(program)[0] == 143
    thread.join()


def test_the_last_lines_of_a_process_are_shown_once(launched, capfd):
    program = (
        "print(f'line of {number}', file=sys.stderr, flush=True)\n"
        "print('the same', file=sys.stderr, flush=True)\n"
        "time.sleep(0 if number else 0.5)\n"
        "sys.exit(2)\n"
    )
    code, said = launched(program)
    assert (code, said) == (2, ["process 1: line of 1"])
    assert capfd.readouterr().err == "line of 0\nthe same\n"


def test_a_host_that_cannot_start_processes_says_so(tmp_path):
    crew = OneHost(lambda own: [str(tmp_path / "nothing")], range(2))
    launch = Launch(crew, tmp_path, 5, 3600.0, print)
    with pytest.raises(ValueError, match="process 0 cannot be started on this host: No such file"):
        Supervisor(launch).run()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel ends processes so")
def test_no_process_outlives_its_supervisor(tmp_path):
    child = (
        "import os, sys, time; from meshdsl.training.launching.parent import end_with; "
        "end_with(int(sys.argv[1])); open(sys.argv[2], 'w').write(str(os.getpid())); "
        "time.sleep(600)"
    )
    parent = (
        "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], "
        "str(os.getpid()), sys.argv[2]])"
    )
    supervising = subprocess.Popen([sys.executable, "-c", parent, child, str(tmp_path / "pid")])
    end = time.monotonic() + 120
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < end
        time.sleep(0.05)
    process = int((tmp_path / "pid").read_text())
    supervising.kill()
    supervising.wait()
    while is_there(process):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_record_of_a_job_may_be_cut_off(tmp_path):
    assert losses(tmp_path) is None
    (tmp_path / NAME).write_text(
        '{"event": "failed", "repeated_seconds": 2.5}\n'
        '{"event": "started", "down_seconds": 1.0}\n'
        '{"event": "stepped", "recovery_seconds": 1.5}\n'
        '{"event": "failed", "repeated_seconds": 1}\n{"event": "fai'
    )
    found = losses(tmp_path)
    assert (found.failures, found.repeated_seconds, found.down_seconds) == (2, 3.5, 1.0)
    assert (found.recovery_seconds, found.seconds) == (1.5, 5.0)


def test_copies_that_lack_what_a_lost_host_had_are_not_what_it_goes_on_from(tmp_path, monkeypatch):
    """A line says so, and the next starts wait as after other failures without progress."""
    monkeypatch.setattr(supervisor, "_FIRST_DELAY", 0.01)
    for step in (7, 8):
        folder = tmp_path / "copies" / "process.0" / str(step)
        folder.mkdir(parents=True)
        (folder / "about.json").write_text('{"start": [1, "a"], "needs": [[0], [1]]}')

    class Others(OneHost):
        def copies(self):
            return others

    line = [sys.executable, "-c", COUNTED + "sys.exit(start < 3)", str(tmp_path), "0"]
    crew, said, others = Others(lambda own: line, range(1)), [], []
    launch = Launch(crew, tmp_path, 5, 3600.0, said.append, tmp_path / "copies")
    assert Supervisor(launch).run() == 0
    text = "\n".join(said)
    assert text.count("copies in memory of step 8 lack what process 1 had") == 2
    assert "in 0.02 s, from the beginning: there is no checkpoint yet" in text
    assert [one.get("step") for one in events(tmp_path) if one["event"] == "started"] == [None] * 3

    said.clear()
    rest = {"start": [1, "a"], "has": [1], "needs": [[0], [1]], "time": 0.0}
    others.append([{"step": step, **rest} for step in (7, 8)])
    (tmp_path / "starts.0").unlink()
    assert Supervisor(launch).run() == 0
    assert "from step 8" in (text := "\n".join(said)) and "lack" not in text


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), ValueError("no free port")])
def test_a_job_whose_programs_cannot_be_compiled_ahead_goes_on(error, tmp_path, monkeypatch):
    """The error is that of reading the record, or of what the crew does."""

    def fails(*_):
        raise error

    monkeypatch.setattr(supervisor, "_POLL", 0.01)
    read = fails if isinstance(error, OSError) else lambda *_: (0.0, 0.0)
    monkeypatch.setattr(supervisor, "first_step", read)
    program = f"import os, time\nwhile not os.path.exists(r'{tmp_path}/told'): time.sleep(0.01)"
    crew = OneHost(lambda own: [sys.executable, "-c", program], range(1))
    crew.rehearses, crew.rehearse = lambda: True, fails
    said = []

    def report(text):
        said.append(text)
        monkeypatch.setattr(supervisor, "first_step", lambda *_: None)
        (tmp_path / "told").touch()

    assert Supervisor(Launch(crew, tmp_path, 5, 3600.0, report)).run() == 0
    assert said == [f"nothing is compiled ahead, and the job goes on: {error}"]


def test_a_job_on_one_host_does_not_read_its_record_while_it_runs(launched, monkeypatch):
    monkeypatch.setattr(supervisor, "_POLL", 0.01)
    read = []
    monkeypatch.setattr(supervisor, "first_step", lambda *given: read.append(given))
    assert launched("time.sleep(0.2)", count=1) == (0, [])
    assert len(read) == 1  # at the end


@pytest.fixture
def sleeper(monkeypatch):
    """Returns a program whose process number 1 does not end by SIGKILL, as this test has it."""
    monkeypatch.setattr(children, "_ENDING", 0.5)
    monkeypatch.setattr(children.os, "killpg", lambda group, number: None)
    stays = "number and signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
    return stays + "number or time.sleep(3) or sys.exit(1)\ntime.sleep(600)"


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("renews", [False, True])
def test_a_host_on_which_a_process_stays_takes_no_further_part(
    renews, others, sleeper, tmp_path, monkeypatch
):
    """As where a device driver hangs: its supervisor would wait forever, without a word."""
    closed = []

    class Crew(OneHost):
        def leave(self):
            return None if others else "the others are too few"

        def grows(self):
            return renews and (tmp_path / "starts.1").exists()

        def close(self, code, goes_on=False):
            closed.append((code, goes_on))

    def command(own):
        number = own[0].removeprefix("--process_id=")
        return [sys.executable, "-c", COUNTED + sleeper, str(tmp_path), number]

    monkeypatch.setattr(supervisor, "first_step", lambda file, start: (0.0, 0.0))
    said = []
    launch = Launch(Crew(command, range(2)), tmp_path, 5, 3600.0, said.append)
    one = Supervisor(launch)
    assert one.run() == FAILED and one.has_unkillable
    assert closed == [(FAILED, others)]
    (pid,) = starts(tmp_path, 1)
    told = f"process 1 (pid {pid}) has not ended 0.5 s after SIGKILL: the kernel waits for a device"
    assert any(text.startswith(told) for text in said)
    ends = "the job ends with this host: the others are too few"
    assert (ends in said) is not others
    os.kill(pid, signal.SIGKILL)
