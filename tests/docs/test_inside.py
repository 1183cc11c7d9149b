"""The pages that say how algorithms work name files and tests that there are."""

import re

import pytest

from tests.docs.pages import DOCS, ROOT, name_of

INSIDE = sorted((DOCS / "inside").glob("*.md"))
TESTS = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", file.read_text(), re.M)
}


@pytest.mark.parametrize("page", INSIDE, ids=name_of)
def test_the_files_that_a_page_names_are_there(page):
    named = re.findall(r"`([\w/]+(?:/\w+)+(?:\.py)?)`", page.read_text())
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", INSIDE, ids=name_of)
def test_the_tests_that_a_page_names_are_there(page):
    named = {*re.findall(r"`(test_\w+)`", page.read_text())}
    assert named
    assert named - TESTS == set()
