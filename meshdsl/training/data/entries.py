"""What `--data` says: patterns of files, perhaps with weights: `web/*.parquet:0.7,code.bin:0.3`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_WEIGHTED = re.compile(r"(.+):([0-9]+(?:\.[0-9]*)?|\.[0-9]+)")


@dataclass(frozen=True)
class Entry:
    """Files that are taken together.

    Attributes:
        patterns: which files, as in `text_files`.
        weight: their share of a mixture, relative to the other weights; None: there is no mixture.
    """

    patterns: tuple[str, ...]
    weight: Fraction | None = None

    @property
    def name(self) -> str:
        return ",".join(self.patterns)


def parse_entries(text: str | None) -> list[Entry]:
    """Reads patterns, separated by commas, which end in `:weight` in a mixture.

        parse_entries("corpus/**/*.txt,notes/*.md")  # one text
        parse_entries("web/*.parquet:0.7,code.bin:0.3")  # 7 examples of 10 are of the first

    Raises:
        ValueError: only some have weights, or a weight is 0.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    matches = [_WEIGHTED.fullmatch(part) for part in parts]
    weighted = [Entry((m[1],), Fraction(m[2])) for m in matches if m]
    if not weighted:
        return [Entry(tuple(parts))]
    problems = [
        f"`{part}` has no weight, but others have: write `{part}:1`, say"
        for part, match in zip(parts, matches, strict=True)
        if not match
    ]
    problems += [f"`{e.name}` has the weight 0: leave it out" for e in weighted if not e.weight]
    if problems:
        raise ValueError("; ".join(problems))
    return weighted
