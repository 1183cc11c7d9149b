"""The pages of help, written anew: `python -m tests.golden.help_pages`."""

from meshdsl.cli.help import show_help
from meshdsl.cli.help_pages import FOLDER
from meshdsl.cli.main import COMMANDS

UPDATE = "python -m tests.golden.help_pages"


def pages():
    """Returns the help of each command, made of its flags."""
    return {name: show_help(name, says) + "\n" for name, says in COMMANDS.items()}


def write():
    for stale in FOLDER.glob("*.txt"):
        stale.unlink()
    for name, text in pages().items():
        (FOLDER / f"{name}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
