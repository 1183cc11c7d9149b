"""Processes come of a template that has imported what they need, or start without it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from meshdsl.cli import launch
from meshdsl.training.launching import warm as launching_warm
from meshdsl.training.launching.children import Child
from meshdsl.training.launching.job_time import START
from meshdsl.training.launching.signals import handled
from meshdsl.training.launching.warm import Forked, Warm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no template")

TEMPLATE = (
    "import sys; from meshdsl.training.launching.forking import forked; "
    "forked(int(sys.argv[1]), int(sys.argv[2]), {modules}); exec(sys.argv[1])"
)
TOLD = """
import json, os, sys
print(json.dumps({
    "imported": "colorsys" in sys.modules, "words": sys.argv[2:], "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(), "start": os.environ.get("MESHDSL_LAUNCH_START"),
    "set": os.environ.get("SET_BY_IMPORT"), "input": sys.stdin.read(), "own": os.getpid(),
    "shown": open("/proc/self/cmdline").read(),
    "threads": len(os.listdir("/proc/self/task")), "files": sorted(os.listdir("/proc/self/fd")),
}))
"""
NAMES = "import json, sys; print(json.dumps([*sys.modules]))"


class Job:
    """Starts processes that come of a template."""

    def __init__(self, folder, modules=("colorsys",)):
        self.environment = {**os.environ, "PYTHONPATH": f"{os.getcwd()}:{folder}"}
        self.code = "1"
        template = [sys.executable, "-c", TEMPLATE.format(modules=modules)]
        like = self.command("x" * 300)
        self.warm = Warm(template, like, self.environment, self.version)

    def version(self):
        if self.code is None:
            raise FileNotFoundError("a file is being replaced")
        return self.code

    def command(self, program, *words):
        return [
            sys.executable,
            "-c",
            "exec(__import__('sys').argv[2])",
            str(os.getpid()),
            program,
            *words,
        ]

    def begun(self, program, *words, ended=lambda child: None, **variables):
        child = Child(0, shown=False)
        command = self.command(program, *words)
        child.start(command, ended, {**self.environment, **variables}, self.warm)
        return child

    def told(self, *words, program=TOLD, **variables):
        """Returns what a process tells, once it has ended."""
        has_ended = threading.Event()
        child = self.begun(program, *words, ended=lambda child: has_ended.set(), **variables)
        assert has_ended.wait(60)
        assert child.code == 0, child.lines()
        return json.loads(child.lines()[-1])

    def template(self):
        return self.warm._process.pid


@pytest.fixture
def job(tmp_path):
    """Returns what makes a job, whose template does not outlive the test."""
    made = []

    def make(*modules):
        made.append(Job(tmp_path, modules or ("colorsys",)))
        return made[-1]

    yield make
    for one in made:
        one.warm.close()


def is_there(process):
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_process_has_all_imports_and_is_otherwise_as_one_that_is_started(job, tmp_path):
    (tmp_path / "sets.py").write_text("import os; os.environ['SET_BY_IMPORT'] = 'yes'")
    warm = job("colorsys", "sets")
    told = warm.told("--process_id=3", **{START: "7"})
    assert told["imported"] and told["parent"] == os.getpid() and told["leads"]
    assert told["words"] == ["--process_id=3"] and told["start"] == "7" and told["set"] == "yes"
    assert told["input"] == "" and told["threads"] == 1
    assert told["shown"].rstrip("\0").split("\0") == warm.command(TOLD, "--process_id=3")
    again = warm.told()
    assert again["start"] is None and again["own"] != told["own"]
    process = subprocess.run(
        warm.command(TOLD), stdin=subprocess.DEVNULL, capture_output=True, env=warm.environment
    )
    cold = json.loads(process.stdout)
    assert not cold["imported"] and again["files"] == cold["files"]


def test_what_the_template_has_not_imported_is_read_by_each_process(job, tmp_path):
    """So is a user's model, which may have changed."""
    warm, program = job(), "import json, mine; print(json.dumps(mine.x))"
    for x in (1, 22):
        (tmp_path / "mine.py").write_text(f"x = {x}")
        assert warm.told(program=program) == x


def test_processes_draw_numbers_of_their_own(job):
    warm = job("numpy.random", "random")
    program = (
        "import json, random, numpy; print(json.dumps([random.random(), numpy.random.rand()]))"
    )
    (a, b), (c, d) = warm.told(program=program), warm.told(program=program)
    assert a != c and b != d


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("raise SystemExit(65)", 65),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import atexit; atexit.register(print, 'parting')", 0),
    ],
)
def test_how_a_process_ended_is_told(program, code, job):
    has_ended = threading.Event()
    child = job().begun(program, ended=lambda child: has_ended.set())
    assert has_ended.wait(60) and child.code == code
    assert child.lines() == ["parting"] * (code == 0)


def test_a_process_is_ended_with_all_that_it_has_started(job, tmp_path):
    program = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    child = job().begun(program + "\nimport time; time.sleep(600)")
    wait_for(lambda: child._lines)
    other = int(child._lines[0])
    child.kill()
    assert child._process.wait() == -signal.SIGKILL
    wait_for(lambda: not is_there(other))


def test_a_template_that_was_killed_is_replaced(job):
    warm = job()
    warm.told()
    first = warm.template()
    os.kill(first, signal.SIGKILL)
    assert warm.told()["imported"] and warm.template() != first


def test_a_change_of_the_code_makes_another_template(job):
    """When all start again: those of one start have the same code."""
    warm = job()
    warm.told(**{START: "1"})
    first, warm.code = warm.template(), "2"
    warm.told(**{START: "1"})
    assert warm.template() == first
    assert warm.told(**{START: "2"})["imported"]
    assert warm.template() != first and not is_there(first)


def test_code_that_changes_at_this_moment_costs_the_template_alone(job):
    warm = job()
    warm.told(**{START: "1"})
    warm.code = None
    assert not warm.told(**{START: "2"})["imported"]


def test_a_process_with_other_variables_starts_without_a_template(job):
    """Libraries may have read them when they were imported."""
    assert not job().told(XLA_FLAGS="--xla_cpu_enable_fast_math=true")["imported"]


@pytest.mark.parametrize(
    "text",
    [
        "raise ImportError",
        "import threading, time; threading.Thread(target=time.sleep, args=[9], daemon=1).start()",
    ],
)
def test_a_template_that_cannot_be_forked_is_not_used(text, job, tmp_path):
    (tmp_path / "bad.py").write_text(text)
    begun = tmp_path / "begun"
    (tmp_path / "says.py").write_text(f"print('begun', file=open({str(begun)!r}, 'a'))")
    warm = job("says", "bad")
    for _ in range(3):
        assert not warm.told()["imported"] and warm.warm._process is None
    assert begun.read_text().count("begun") == 2  # no start waits for a third one


def test_a_signal_ends_the_waiting_for_the_template(job, tmp_path):
    """The process starts without it, and can get the signal at once."""
    (tmp_path / "slow.py").write_text(
        f"open({str(tmp_path / 'begun')!r}, 'w'); import time; time.sleep(600)"
    )
    warm, ended, got = job("slow"), threading.Event(), []
    warm.warm.begin()
    template = warm.template()

    def send():
        wait_for((tmp_path / "begun").exists)
        os.kill(os.getpid(), signal.SIGTERM)

    with handled(got.append, lambda: None):
        sender = threading.Thread(target=send)
        sender.start()
        child = warm.begun("print('cold')", ended=lambda child: ended.set())
        sender.join()
    assert got == [signal.SIGTERM] and ended.wait(60) and child.lines() == ["cold"]
    assert is_there(template) and warm.template() == template  # which may still be of use


def test_whether_a_start_would_wait_for_the_template_is_known(job, tmp_path):
    (tmp_path / "slow.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.02)"
    )
    warm = job("slow")
    assert not warm.warm.keeps_waiting()  # it has not begun
    warm.warm.begin()
    assert warm.warm.keeps_waiting()
    (tmp_path / "go").touch()
    wait_for(lambda: not warm.warm.keeps_waiting())
    assert not warm.warm._ready and "slow" in warm.told(program=NAMES)
    assert not warm.warm.keeps_waiting()
    warm.warm.close()
    assert not warm.warm.keeps_waiting()


def test_what_libraries_print_is_not_among_the_results():
    program = "from meshdsl.training.launching.parent import own_output; own_output()\n"
    program += "import os; os.write(1, b'a library'); print('a result')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a result\n", "a library")


def test_output_without_a_buffer_stays_so():
    program = "from meshdsl.training.launching.parent import own_output; own_output()\n"
    program += "import os; print('a result'); os._exit(0)"  # as a process that is killed
    done = subprocess.run([sys.executable, "-u", "-c", program], capture_output=True, text=True)
    assert done.stdout == "a result\n"


def test_an_answer_that_comes_too_late_is_not_read_by_the_next_start(job, monkeypatch):
    """Though a signal has come, for which no other template is started at once."""
    warm = job("colorsys")
    warm.told()
    template = warm.template()
    os.kill(template, signal.SIGSTOP)
    monkeypatch.setattr(launching_warm, "_ANSWER", 0.1)
    came = iter([True])
    monkeypatch.setattr(launching_warm, "came", lambda: next(came, False))
    assert not warm.told()["imported"] and not is_there(template)
    monkeypatch.undo()
    assert warm.told()["imported"]


def test_a_signal_may_come_while_one_is_sent():
    """As the second Ctrl-C does, whose handler sends a signal too."""
    with subprocess.Popen(["sleep", "600"]) as process:
        forked = Forked(process.pid)

        def again(number, frame):
            forked.send_signal(signal.SIGKILL)

        before = signal.signal(signal.SIGALRM, again)
        try:
            with forked._reaping:  # as where the signal comes within `send_signal`
                signal.raise_signal(signal.SIGALRM)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert process.wait(60) == -signal.SIGKILL
        forked.send_signal(signal.SIGKILL)  # it has ended: nothing happens


@pytest.mark.long
def test_what_train_imports_can_be_forked(job):
    """Else every start would be a cold one, and nobody would see it."""
    warm = job(*launch._IMPORTED)
    program = "import sys, json; print(json.dumps('orbax.checkpoint' in sys.modules))"
    assert warm.told(program=program)


def test_template_and_processes_end_with_the_supervisor_however_it_ends(tmp_path):
    program = """
import os, sys
from tests.training.launching.test_warm import Job
job = Job(sys.argv[1])
begun = [job.begun("import time; print(1, flush=True); time.sleep(600)") for _ in range(2)]
while not all(child._lines for child in begun): pass
print(job.template(), *[child._process.pid for child in begun], flush=True)
import time; time.sleep(600)
"""
    supervisor = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        all_there = [*map(int, supervisor.stdout.readline().split())]
        assert len(all_there) == 3 and all(map(is_there, all_there))
    finally:
        supervisor.kill()
        supervisor.communicate()
    wait_for(lambda: not any(map(is_there, all_there)))


def test_what_says_that_all_is_well_is_not_shown(capfd):
    lines = [
        "[Gloo] Rank 0 is connected to 1 peer ranks.",
        "W1128 04:51:29.905303 8268 coordination_service.cc:185] [5] Using experimental recoverable"
        " task feature. The default shutdown barrier will only block others.",
        "a line about the [Gloo] Rank of a user, and Using experimental recoverable task feature",
    ]
    child, ended = Child(0, shown=True), threading.Event()
    code = f"import sys; sys.stderr.write({chr(10).join(lines) + chr(10)!r})"
    child.start([sys.executable, "-c", code], lambda _: ended.set())
    assert ended.wait(60)
    assert child.lines() == lines[2:]
    assert capfd.readouterr().err == lines[2] + "\n"
