"""Lines of text: a heading with what hangs behind it."""

from __future__ import annotations

import textwrap


def wrapped(head: str, text: str, width: int) -> list[str]:
    """Returns `head` and text behind it, in as many lines as they need."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
