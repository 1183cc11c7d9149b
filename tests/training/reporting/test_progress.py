"""Progress: a bar on a terminal, a line for each tenth elsewhere."""

import io

from rich.console import Console

from meshdsl.training.reporting.progress import Progress


def test_elsewhere_there_are_about_ten_lines_however_many_candidates():
    console = Console(file=io.StringIO(), width=100)
    with Progress(1000, "candidates", console) as progress:
        for number in range(1000):
            progress.step(failed=number == 500)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0] == "100 of 1,000 candidates"
    assert lines[-1] == "1,000 of 1,000 candidates; 1 could not be measured"


def test_a_candidate_that_fails_takes_all_its_turns_with_it():
    console = Console(file=io.StringIO(), width=100)
    with Progress(15, "turns", console) as progress:
        progress.step(5, failed=True)
        for _ in range(10):
            progress.step()
        progress.step(0)
    lines = console.file.getvalue().splitlines()
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


def test_what_is_soon_done_says_nothing_but_on_a_terminal():
    console = Console(file=io.StringIO(), width=100)
    with Progress(4, "examples", console, patience=100) as progress:
        progress.step(4)
    assert console.file.getvalue() == ""
