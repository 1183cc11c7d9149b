"""The help of each command, as text: flags are made of records, whose modules bring JAX along.

`tests/golden/test_help_pages.py` compares the texts with the flags, and `python -m
tests.golden.help_pages` writes them anew.
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def help_page(command: str) -> str | None:
    """Returns the help of a command; None for a command whose page is not written yet."""
    page = FOLDER / f"{command}.txt"
    return page.read_text(encoding="utf-8") if page.exists() else None
