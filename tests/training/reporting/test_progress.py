"""Progress: a bar on a terminal, a line for each tenth elsewhere."""

import io
import subprocess
import sys

from rich.console import Console

from meshdsl.training.reporting.progress import Progress


def test_elsewhere_there_are_about_ten_lines_however_many_candidates(capsys):
    with Progress(1000, "candidates") as progress:
        for number in range(1000):
            progress.step(failed=number == 500)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[0] == "100 of 1,000 candidates"
    assert lines[-1] == "1,000 of 1,000 candidates; 1 could not be measured"


def test_a_candidate_that_fails_takes_all_its_turns_with_it(capsys):
    with Progress(15, "turns") as progress:
        progress.step(5, failed=True)
        for _ in range(10):
            progress.step()
        progress.step(0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "5 of 15 turns; 1 could not be measured"
    assert lines[-1] == "15 of 15 turns; 1 could not be measured"


def test_on_a_terminal_there_is_a_bar():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True)
    with Progress(4, "candidates", console) as progress:
        progress.step(3, failed=True)
    shown = console.file.getvalue()
    assert "3/4" in shown and "1 could not be measured" in shown


def test_nothing_to_do_shows_nothing():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, force_interactive=True)
    with Progress(0, "candidates", console):
        pass
    assert console.file.getvalue() == ""


def test_what_is_soon_done_says_nothing_but_on_a_terminal(capsys):
    with Progress(4, "examples", patience=100) as progress:
        progress.step(4)
    assert capsys.readouterr().err == ""


def test_what_nobody_reads_does_not_end_a_command():
    code = (
        "import sys; from meshdsl.training.reporting.progress import Progress\n"
        "sys.stdin.read()\n"
        "with Progress(9, 'examples') as progress: [progress.step() for _ in range(9)]\n"
        "print('scores')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stderr.close()
    assert process.communicate("")[0] == "scores\n"
    assert process.returncode == 0
