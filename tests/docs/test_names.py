"""The examples in the docstrings of public names give what they say."""

import doctest
import inspect

import jax
import numpy as np
import pytest

import meshdsl as md
from docs.making import reference

NAMES = [pair for page in reference.order() for pair in reference.names_of(page)]
_PARSER = doctest.DocTestParser()
_FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def example_of(written, value):
    """Returns the example of a name; an alias or a constant has none."""
    text = inspect.cleandoc(value.__doc__ or "")  # of its own: a class inherits none
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        text = ""
    return _PARSER.get_doctest(text, {"md": md, "np": np}, written, written, 0)


WITH = [test for test in (example_of(*pair) for pair in NAMES) if test.examples]


@pytest.mark.parametrize("test", WITH, ids=[test.name for test in WITH])
def test_the_example_of_a_name_gives_what_it_says(test, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    with jax.enable_x64(False):
        result = doctest.DocTestRunner(optionflags=_FLAGS).run(
            test, out=said.append, clear_globs=False
        )
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("page", reference.order())
def test_every_name_of_a_page_has_an_example(page):
    code = [
        p for p in reference.names_of(page) if inspect.isfunction(p[1]) or inspect.isclass(p[1])
    ]
    assert [written for written, value in code if not example_of(written, value).examples] == []
