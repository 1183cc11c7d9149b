"""The plans that lowering makes are those that have been reviewed."""

import difflib

import pytest

from tests.golden.plans import HERE, PLANS, UPDATE, columns, file_of


def difference(name, reviewed, found):
    """Returns what differs, with the command that takes it over."""
    lines = difflib.unified_diff(
        reviewed.splitlines(), found.splitlines(), "reviewed", "found", lineterm="", n=1
    )
    told = "\n".join(lines)
    return f"the plan {name} has changed:\n{told}\nif that is meant: {UPDATE} {name}"


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_as_reviewed(name):
    found = PLANS[name].text()
    reviewed = file_of(name).read_text() if file_of(name).exists() else ""
    if found != reviewed:
        pytest.fail(difference(name, reviewed, found), pytrace=False)


def test_no_file_is_stale():
    stale = {path.stem for path in HERE.glob("*.txt")} - set(PLANS)
    assert not stale, f"no plan is called {', '.join(sorted(stale))} any more: {UPDATE}"


def test_a_change_is_told_with_the_command_that_takes_it_over():
    text = difference("one", "a\nb\nc\n", "a\nd\nc\n")
    assert "-b\n+d" in text
    assert text.endswith(f"if that is meant: {UPDATE} one")


def test_rows_are_aligned():
    assert columns([("a", "bb"), ("ccc", "d")]) == ["  a    bb", "  ccc  d"]
