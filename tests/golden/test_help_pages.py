"""The help that commands print at once is that of their flags, and comes without JAX."""

import subprocess
import sys

import pytest

from meshdsl.cli.help_pages import FOLDER, help_page
from meshdsl.cli.main import COMMANDS
from tests.golden.help_pages import UPDATE, pages

HEAVY = ("jax", "numpy", "absl", "rich", "meshdsl.language", "meshdsl.cli.flags")
PROGRAM = (
    "import sys; from meshdsl.cli.main import run; code = run(sys.argv[1:]);"
    f"print(code, [name for name in {HEAVY} if name in sys.modules])"
)


def test_the_written_help_is_that_of_the_flags():
    written = {page.stem: page.read_text(encoding="utf-8") for page in FOLDER.glob("*.txt")}
    differ = sorted(
        name for name, text in pages().items() | written.items() if written.get(name) != text
    )
    assert not differ, f"the help of {', '.join(differ)} has changed; if that is meant: {UPDATE}"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["train", "--help"], ["names", "-h"], ["--version"]]
)
def test_help_and_version_import_neither_jax_nor_the_language(arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_command_without_a_written_help_has_none_at_once():
    assert help_page("new") is None
    assert all(help_page(name) for name in COMMANDS)
