"""Command lines of pages and of help run, at a small size; `tests.docs.shell` says which do not.

Those of `explain`, and most of those that train, run in `test_commands.py`.
"""

import functools
import re
import shlex
import shutil

import pytest

from meshdsl.cli.help import HELP
from meshdsl.version import VERSION
from tests.docs import shell
from tests.docs.pages import PAGES, name_of
from tests.docs.test_commands import lines_of

LINES = {name_of(page): [*lines_of(page)] for page in PAGES}
LINES |= {
    f"{name} --help": [["meshdsl", name, *shlex.split(text)] for text in about.examples.values()]
    for name, about in HELP.items()
}
RUNS = {
    name: [*shell.needed(commands, name.endswith(" --help"))] for name, commands in LINES.items()
}
# Pages with these alone take seconds.
QUICK = {"doctor", "names"}


def marks(commands):
    return [pytest.mark.slow] * any(command[1] not in QUICK for command in commands)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Returns a folder with the files that lines name."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("given")
    shell.write_files(folder)
    return folder


@pytest.fixture(scope="module")
def trained(given):
    """Returns a function that gives the folder of runs of two steps, and trains them once."""

    @functools.cache
    def train():
        page = shell.Shell(given, lambda: given)
        page.run(["meshdsl", "train", "--model=gpt_mini", "--workdir=runs/gpt_mini"])
        weights = "--init_from=models/Llama-3.1-8B"
        page.run(["meshdsl", "train", weights, "--data=notes/*.md", "--workdir=runs/llama"])
        return given / "runs"

    return train


@pytest.fixture
def page(given, trained, tmp_path):
    folder = tmp_path / "page"
    shutil.copytree(given, folder, ignore=shutil.ignore_patterns("runs"))
    page = shell.Shell(folder, trained)
    yield page
    page.close()


CASES = [
    pytest.param(commands, id=name, marks=marks(commands))
    for name, commands in RUNS.items()
    if commands
]


@pytest.mark.parametrize("commands", CASES)
def test_the_lines_of_a_page_run_in_order(page, commands):
    for command in commands:
        said = page.run(command)
        if command[1] == "serve" or "--live" in command:
            path = "/v1/models" if command[1] == "serve" else "/"
            assert shell.get(re.match(r"http://[^/]+", page.address)[0] + path)
        elif command[1] in ("generate", "doctor", "names", "plan", "evaluate"):
            assert said.strip()
        for name in ("out", "html"):
            if written := shell.flag(command, name):
                assert (page.folder / written).exists()


def test_the_version_is_printed(page):
    assert VERSION in page.run(["meshdsl", "--version"])


def test_what_does_not_run_is_listed_with_a_reason_and_the_list_has_nothing_else():
    texts = [
        shlex.join(command).removeprefix(".venv/bin/").replace("'", "")
        for commands in LINES.values()
        for command in commands
    ]
    unused = [what for what in shell.NOT_RUN if not any(re.search(what, text) for text in texts)]
    assert not unused
    programs = {command[0] for commands in RUNS.values() for command in commands}
    assert programs <= {"meshdsl", ".venv/bin/meshdsl", "python", "curl"}
