"""Pages that a command writes, for a browser."""

from __future__ import annotations

from pathlib import Path

from meshdsl.cli.mistakes.problems import UsageError


def write_page(name: str, text: str) -> None:
    """Writes a page and says where it is.

    Raises:
        UsageError: the file cannot be written.
    """
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or "it cannot be written").lower()
        raise UsageError([f"--html: cannot write {name}: {reason}"]) from error
    print(f"{name} is written: open it in a browser")
